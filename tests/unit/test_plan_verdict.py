"""The planner's clusters, its rows, its verdict and its text, and what it reads of a run's output."""

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from pier_megatron import PierConfig
from pier_megatron.commands.plan import measured, text, verdict, ways
from pier_megatron.commands.plan.cluster import CLUSTERS, FIGURES, TCP_EFFICIENCY, Cluster, add_arguments, chosen, named_or_file
from pier_megatron.commands.plan.fit import RECOMPUTE, Fix
from pier_megatron.commands.plan.model import Job, predict

# GPT-2 XL on 64 GPUs of 4 a node, one each group.
_XL = Job(flops=5.7e15, shard=1.56e9, gpus=64, tensor_parallel=1, replicas=64, groups=64)
_A100 = CLUSTERS["perlmutter"]
_SLOW, _FAST = (dataclasses.replace(_A100, node_bandwidth=rate) for rate in (1e9, 1e12))
# An outer step of 256 MB to the other side of the world.
_FAR = dataclasses.replace(_FAST, nodes_per_site=1, site_bandwidth=1e12, site_latency=0.3)


def config(**kwargs: Any) -> PierConfig:
    return PierConfig(**({"train_iters": 100_000, "groups": 64} | kwargs))


def rows(cluster: Cluster = _A100, job: Job = _XL, hidden: bool = True, measured: bool = False) -> dict[str, ways.Row]:
    """The rows of a job that fits."""
    found = {ways.SYNCHRONOUS: ways.synchronous_row(predict(job, cluster).of_synchronous(hidden), 100_000)}
    for name, changed in {
        ways.OWN: config(),
        "--pier-overlap 25": config(overlap=25),
        "--pier-exchange-dtype int8": config(exchange_dtype="int8"),
    }.items():
        found[name] = ways.gain_of(changed, job, cluster, measured, hidden)
    return found


def line(cluster: Cluster = _A100, groups: int = 64, **kwargs: Any) -> str:
    return verdict.of_rows(rows(cluster, **kwargs), groups, kwargs.get("measured", False))


@pytest.mark.parametrize("hidden", [False, True])
def test_gain_is_of_the_whole_run_and_of_the_same_flags(hidden: bool) -> None:
    prediction = predict(_XL, _A100)
    row = rows(hidden=hidden)[ways.OWN]
    synchronous, local = prediction.of_synchronous(hidden), prediction.mean_iteration(config(), hidden)
    run = 0.1 * synchronous + 0.9 * local
    assert (row.seconds, row.gain) == (pytest.approx(run), pytest.approx(synchronous / run))
    assert row.days == pytest.approx(run * 100_000 / 86400)
    assert row.low < row.gain < row.high
    assert row.gain_with_flags == rows()[ways.OWN].gain
    # On a network on which Pier loses, too.
    lost = ways.gain_of(config(sync_interval=1), _XL, _FAST, is_measured=False, hidden=hidden)
    assert lost.low <= lost.gain <= lost.high < 1


def test_measured_tflops_narrow_the_spread() -> None:
    assumed, known = (rows(measured=measured)[ways.OWN] for measured in (False, True))
    assert assumed.low < known.low < known.gain == assumed.gain < known.high < assumed.high


def test_verdict_begins_with_the_answer() -> None:
    assert line().startswith("Measure first, with --pier-overlap 25: 2.")
    assert line(_SLOW).startswith("Use it, with --pier-overlap 25: ")
    assert line(measured=True).startswith("Use it, with --pier-overlap 25: ")
    assert line(_FAST).startswith("Do not use it: 1.0")
    assert line(_FAR).startswith("Do not use it: with --pier-overlap 25 at best 1.0")
    assert line(groups=1).startswith("Do not use it for speed: one group")
    # What does not fit is not recommended, whatever it wins.
    found = rows() | {"--pier-overlap 25": dataclasses.replace(rows()["--pier-overlap 25"], fits=False)}
    assert verdict.of_rows(found, 64, is_measured=False).startswith("Measure first, with --pier-exchange-dtype int8: 2.")


def test_what_overlap_flags_would_win_alone_is_no_gain_of_pier() -> None:
    quick = dataclasses.replace(_A100, node_bandwidth=50e9)
    assert rows(quick, hidden=False)[ways.OWN].gain > 1.15
    assert line(quick, hidden=False).startswith(
        ("First give --overlap-grad-reduce and --overlap-param-gather: with them Pier is ",)
    )
    assert line(quick).startswith(("Measure first", "Do not use it"))


def test_no_row_contradicts_the_verdict() -> None:
    for rate in (0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000):
        for known in (False, True):
            found = rows(dataclasses.replace(_A100, node_bandwidth=rate * 1e9), measured=known)
            said, best = verdict.of_rows(found, 64, known), max(row.gain for row in found.values())
            assert said.startswith(("Use it", "Measure first") if best >= 1.05 else ("Measure first", "Do not use it"))
            assert len(said.split()) <= 25, said


@pytest.mark.parametrize(
    ("fix", "gain", "said"),
    [
        (None, None, "Does not fit: 64.6 of 40 GB. Raise --tensor-model-parallel-size or --pipeline-model-parallel-size."),
        (("--micro-batch-size 1 --pier-offload", 35e9), 2.3, "(35.0 GB) 2.30 x as fast as synchronous training."),
        (("--micro-batch-size 1", 35e9), None, "With --micro-batch-size 1 (35.0 GB) it fits."),
        (
            (f"--micro-batch-size 1 {RECOMPUTE} --pier-offload --pier-overlap 0", 35e9),
            None,
            "35.0 GB and recomputed activations.",
        ),
    ],
)
def test_what_does_not_fit(fix: tuple[str, float] | None, gain: float | None, said: str) -> None:
    change = None if fix is None else Fix(*fix, argparse.Namespace(), config())
    found = verdict.does_not_fit(64.6e9, 40e9, change, gain)
    assert said in found
    assert found.startswith("Does not fit: ")
    assert len(found.split()) <= 25, found


def test_communication_is_hidden_only_by_the_flags_of_the_job() -> None:
    # Without the distributed optimizer there are no parameters to gather.
    for reduces, gathers, is_sharded in itertools.product((False, True), repeat=3):
        given = {"overlap_grad_reduce": reduces, "overlap_param_gather": gathers, "use_distributed_optimizer": is_sharded}
        assert ways.is_hidden(argparse.Namespace(**given)) == (reduces and (gathers or not is_sharded))


def test_text_fits_one_screen_and_says_how_much_does_not() -> None:
    plan = {"gpus": 64, "memory": {}, "memory needed": 6e9, "memory of a GPU": 40e9}
    plan |= {
        "verdict": "Use it " + "word " * 23 + "end",
        "rows": {name: dataclasses.asdict(row) for name, row in rows().items()},
        "assumed": [f"{number} " + "word " * 30 for number in range(20)],
    }
    lines, whole = (text.lines(plan, has_details=has_details) for has_details in (False, True))
    assert len(lines) == 24
    assert max(map(len, lines)) <= 100
    assert "19 word" in "\n".join(whole)
    # None of the rows is of groups, which would add more.
    assert lines[-1] == f"  and {len(whole) - 23} lines more: --details"


_LOG = """
[default0]:  global_batch_size ............................... 16
[default0]:  world_size ...................................... 4
 [2026-11-24 10:00:00.1] iteration        1/       6 | consumed samples: 16 | elapsed time per iteration (ms): 9000.0 |
 [2026-11-24 10:00:01.1] iteration        2/       6 | consumed samples: 32 | elapsed time per iteration (ms): 500.0 | lm
 [2026-11-24 10:00:02.1] iteration        3/       6 | consumed samples: 48 | elapsed time per iteration (ms): 400.0 |
 [2026-11-24 10:00:03.1] iteration        4/       6 | consumed samples: 64 | elapsed time per iteration (ms): 300.5 |
"""


def test_times_of_a_log(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    found = ({"global_batch_size": "16", "world_size": "4"}, {1: 9.0, 2: 0.5, 3: 0.4, 4: 0.3005})
    # torchrun's prefix, srun's, and output that ends in the middle of a number.
    for log in (_LOG, _LOG.replace("[default0]:", "0: "), f"{_LOG} iteration 5/ 6 | elapsed time per iteration (ms): ."):
        file.write_text(log)
        assert measured.read(file) == found
    assert measured.steady(found[1], 0) == [0.4, 0.3005]
    assert measured.steady(found[1], 2) == [0.3005]


_REPOSITORY = Path(__file__).resolve().parents[2]
_EXAMPLE = _REPOSITORY / "examples" / "cluster.yaml"
_UNITS = {figure.metadata["key"]: (figure.name, figure.metadata["unit"]) for figure in FIGURES}


def parsed(*words: str) -> Cluster:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return chosen(parser.parse_args(words))


def test_example_file_has_every_figure_that_a_cluster_needs() -> None:
    cluster = parsed("--cluster", str(_EXAMPLE))
    assert (cluster.gpus_per_node, cluster.memory, cluster.flops) == (8, 80e9, 350e12)
    assert (cluster.gpu_bandwidth, cluster.node_bandwidth, cluster.site_bandwidth) == (360e9, 12.5e9, 1.25e9)
    assert (cluster.latency, cluster.site_latency) == (pytest.approx(3e-5), pytest.approx(0.03))
    assert (cluster.nodes_per_site, cluster.efficiency) == (8, TCP_EFFICIENCY)
    assert cluster.node_rate == pytest.approx(12.5e9 * TCP_EFFICIENCY)
    # The planner asks for what data sheets say, not for what a file or a flag has given.
    assert not cluster.is_of_data_sheets
    assert parsed("--cluster", "dgx-h100").is_of_data_sheets
    assert not parsed("--cluster", "dgx-h100", "--node-bandwidth", "40").is_of_data_sheets
    assert [cluster.sites(gpus) for gpus in (1, 64, 65, 128, 129)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("key", _UNITS)
def test_flag_wins_over_a_name_and_over_a_file(key: str) -> None:
    value = 1 if key == "efficiency" else 3
    words = [f"--{key}", str(value)]
    if key in ("nodes-per-site", "site-bandwidth"):
        words += ["--site-bandwidth", "3", "--nodes-per-site", "3"]
    for where in ("perlmutter", str(_EXAMPLE)):
        name, unit = _UNITS[key]
        assert getattr(parsed("--cluster", where, *words), name) == pytest.approx(value * unit)
    assert parsed("--cluster", "perlmutter") == CLUSTERS["perlmutter"]


@pytest.mark.parametrize("key", _UNITS)
@pytest.mark.parametrize("value", ["-5", "nan", "inf", "1e300", "many", ""])
def test_figures_out_of_range_are_refused_by_flag_and_by_key(
    key: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("--cluster", "vista", f"--{key}={value}")
    said = capsys.readouterr().err
    assert f"argument --{key}: {value or '(empty)'}: must be a" in said
    lines = [line for line in _EXAMPLE.read_text().splitlines() if not line.startswith(key)]
    file = tmp_path / "mine.yaml"
    file.write_text("\n".join([*lines, f"{key}: '{value}'"]))
    with pytest.raises(argparse.ArgumentTypeError, match=f"mine.yaml: {key}: {value or '.empty.'}: must be a"):
        named_or_file(str(file))


@pytest.mark.parametrize("flag", ["tflops", "memory", "node-bandwidth", "gpus-per-node", "efficiency", "site-bandwidth"])
def test_zero_is_refused_where_it_cannot_be(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--cluster", "vista", f"--{flag}", "0")
    assert f"argument --{flag}: 0: must be a" in capsys.readouterr().err


def test_rate_of_all_gpus_together_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--cluster", "vista", "--tflops", "100000")
    assert "argument --tflops: 100000: must be a number in (0, 20000]" in (said := capsys.readouterr().err), said
    assert "it is that of one GPU" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory: 80\ngpu-per-node: 8", "gpu-per-node: no such key. Did you mean gpus-per-node?"),
        ("gpus-per-node: 8\nmemory: 80", "tflops, node-bandwidth, gpu-bandwidth missing; see examples/cluster.yaml"),
        ("just words", "must be lines of KEY: NUMBER"),
        ("memory: [", "no YAML"),
        ("memory: 2026-13-45", "no YAML"),
        ("memory: true", "mine.yaml: memory: True: must be a number"),
        (
            "nodes: [{name: a}]",
            "nodes: plan knows equal nodes only; python examples/skip_routes.py searches routes over unequal",
        ),
        (_EXAMPLE.read_text().replace("site-bandwidth", "# site-bandwidth"), "nodes-per-site without site-bandwidth"),
    ],
)
def test_file_that_describes_no_cluster(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(argparse.ArgumentTypeError) as refusal:
        named_or_file(str(file))
    assert f"{file}: " in str(refusal.value)
    assert said in str(refusal.value)


def test_misspelt_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--cluster", "perlmuter")
    said = capsys.readouterr().err
    assert "argument --cluster: perlmuter: no such file, and no cluster of that name" in said
    assert "Did you mean perlmutter?" in said
