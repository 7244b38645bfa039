"""The planner's verdict, the ways it compares, and what it reads of a run's log."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pier_megatron import PierConfig
from pier_megatron.commands.plan import loss, measured, ways
from pier_megatron.commands.plan.cluster import CLUSTERS, Cluster
from pier_megatron.commands.plan.fit import RECOMPUTE
from pier_megatron.commands.plan.model import Job, Way, predict
from pier_megatron.commands.plan.verdict import gain_of, verdict

# GPT-2 XL on 64 GPUs of 4 a node, one each group.
_XL = Job(flops=5.7e15, shard=1.56e9, gpus=64, tensor_parallel=1, replicas=64, groups=64)
_A100 = CLUSTERS["perlmutter"]
_DOCS = Path(__file__).parents[2] / "docs"
_FAST = dataclasses.replace(_A100, node_bandwidth=1e12)


def config(**kwargs: Any) -> PierConfig:
    return PierConfig(**({"train_iters": 100_000, "groups": 64} | kwargs))


def line(cluster: Cluster = _A100, job: Job = _XL, **kwargs: Any) -> str:
    settings = {
        "source": "assumed",
        "is_measured": False,
        "memory": 30e9,
        "remedy": None,
        "can_overlap": True,
        "config": config(),
    } | kwargs
    return verdict(job, cluster, settings.pop("config"), **settings)


def test_gain_is_of_the_whole_run() -> None:
    prediction = predict(_XL, _A100)
    gain = gain_of(Way(50), _XL, _A100, config(), is_measured=False)
    local = prediction.mean_iteration(Way(50))
    run = 0.1 * prediction.synchronous_hidden + 0.9 * local
    assert gain.expected == pytest.approx(prediction.synchronous_hidden / run)
    assert gain.expected < prediction.synchronous_hidden / local
    assert (gain.days, gain.synchronous_days) == (
        pytest.approx(run * 100_000 / 86400),
        pytest.approx(prediction.synchronous_hidden * 100_000 / 86400),
    )
    assert gain.low < gain.expected < gain.high
    # On a network on which Pier loses, too.
    lost = gain_of(Way(1), _XL, _FAST, config(), is_measured=False)
    assert lost.low <= lost.expected <= lost.high < 1
    plain = 0.1 * prediction.synchronous + 0.9 * prediction.mean_iteration(Way(50), hidden=False)
    assert gain.without_flags == pytest.approx(prediction.synchronous / plain)


def test_measured_tflops_narrow_the_spread() -> None:
    assumed, known = (gain_of(Way(50), _XL, _A100, config(), is_measured=known) for known in (False, True))
    assert assumed.low < known.low < known.expected == assumed.expected < known.high < assumed.high


def test_line_begins_with_the_answer() -> None:
    assert line().startswith("Measure first, with --pier-overlap 25: 2.")
    slow = dataclasses.replace(_A100, node_bandwidth=1e9)
    assert line(slow).startswith("Use it with --pier-overlap 25: ")
    assert line(slow, config=config(overlap=25)).startswith("Use it: ")
    assert line(is_measured=True).startswith("Use it with --pier-overlap 25: ")
    far = dataclasses.replace(_FAST, nodes_per_site=1, site_bandwidth=1e12, site_latency=0.3)
    assert line(far).startswith("Do not use it, not even with --pier-overlap 25: 1.0")
    assert line(can_overlap=False).startswith("Measure first: 2.")
    assert line(_FAST).startswith("Do not use it: 1.0")
    assert line(job=dataclasses.replace(_XL, groups=1)).startswith("Do not use it for speed: there is one group")
    assert line().endswith("90 TFLOP/s per GPU assumed.")
    assert "\n" not in line()


def test_gain_of_a_job_that_has_to_offload_counts_its_copies() -> None:
    remedied = line(memory=64.6e9, remedy=("--pier-offload", 35e9))
    gains = [said[said.index(": 2.") :] for said in (remedied, line(config=config(offload=True)), line())]
    assert gains[0] == gains[1] != gains[2]


@pytest.mark.parametrize("remedy", [None, ("--pier-offload", 35e9), (RECOMPUTE, 35e9)])
def test_what_does_not_fit_is_not_recommended(remedy: tuple[str, float] | None) -> None:
    slow = dataclasses.replace(_A100, node_bandwidth=1e9)
    for is_measured in (False, True):
        said = line(slow, memory=64.6e9, remedy=remedy, is_measured=is_measured)
        assert said.startswith("Does not fit: it needs 64.6 GB of a GPU that has 40 GB. ")
        assert "Use it" not in said
        if remedy is None:
            assert "raise --tensor-model-parallel-size" in said
            assert " x as fast" not in said
        else:
            assert f"It fits with {remedy[0]}" in said


def test_the_jobs_own_way_is_a_row() -> None:
    for settings, name in (
        ({}, "Pier, H = 50, blocking"),
        ({"sync_interval": 80}, "Pier, H = 80, blocking"),
        ({"sync_interval": 1}, "Pier, H = 1, blocking"),
        ({"overlap": 25}, "Pier, H = 50, overlapped by H / 2"),
        ({"overlap": 7, "exchange_dtype": "int4"}, "Pier, H = 50, overlapped by 7, int4"),
        ({"fragments": 2, "sync_interval": 200}, "Pier, H = 200, blocking, 2 fragments"),
        ({"preset": "noloco"}, "NoLoCo, H = 50, blocking"),
    ):
        rows, own = ways.modes(predict(_XL, _A100), config(**settings))
        assert own == name
        assert rows[own] == pytest.approx(
            predict(_XL, _A100).mean_of_run(ways.of_job(config(**settings)), ways.lazy_share(config(**settings)))
        )


def test_sites_are_rows() -> None:
    assert ways.sites(_XL, _A100, config()) == {}
    two = dataclasses.replace(_A100, nodes_per_site=8, site_bandwidth=1e9, site_latency=0.03)
    rows = ways.sites(_XL, two, config())
    near, apart = (rows[f"this job, H = 50, {what}"] for what in ("all in one site", "--pier-groups 2: one per site"))
    own = predict(_XL, two).mean_of_run(Way(50), 0.1)
    assert near < own
    # A group that fills a site synchronises its 32 replicas in each iteration, and sends as much over the link as 64 groups.
    assert apart > near


def test_sweeps_meet_the_job_where_it_stands() -> None:
    prediction, settings = predict(_XL, _A100), config()
    own = prediction.mean_of_run(Way(50), 0.1)
    assert ways.over_intervals(prediction, settings)[50][ways.BLOCKING] == pytest.approx(own)
    rates = ways.over_rates(_XL, _A100, settings)
    nearest = min(rates, key=lambda rate: abs(rate - _A100.node_bandwidth))
    assert rates[nearest][ways.BLOCKING] == pytest.approx(own)
    assert ways.over_gpus(_XL, 512, _A100, settings)[64][ways.BLOCKING] == pytest.approx(own)
    # The slower the link, the longer; the longer the interval, the shorter.
    blocking = [found[ways.BLOCKING] for _, found in sorted(rates.items())]
    assert blocking == sorted(blocking, reverse=True)


def test_loss_is_said_to_be_unknown() -> None:
    known = loss.expected_shares(None, config(preset="pier"), 512)
    said = loss.text(known, 64)
    assert said.startswith("Loss: not known. Published for --pier-preset pier at 1,800 outer steps: +0.2 % with 8 groups")
    assert said.endswith("This job takes 1800.")
    # An outer step ends the run, however long the interval.
    longest = config(sync_interval=200_000, lazy_start_iters=0, preset="pier")
    assert loss.text(loss.expected_shares(None, longest, 512), 64).endswith("This job takes 1.")
    assert "give --log" in loss.text(loss.expected_shares(None, config(preset="pier-rising"), 512), 64)
    assert "not studied for diloco" in loss.text(loss.expected_shares(None, config(preset="diloco"), 512), 64)


def test_published_losses_are_those_of_the_anchors() -> None:
    """Final validation losses of the authors' runs, synchronous AdamW and Pier, by number of groups."""
    published = {8: (2.9665, 2.9728), 64: (2.4802, 2.4753), 32: (2.7006, 2.7340), 128: (2.7006, 2.8106)}
    for groups, (adamw, pier) in published.items():
        assert f"{pier / adamw - 1:+.1%} with {groups}".replace("%", " %") in loss.PUBLISHED


_LOG = """
[default0]:  global_batch_size ............................... 16
[default0]:  world_size ...................................... 4
 [2026-11-24 10:00:00.1] iteration        1/       6 | consumed samples: 16 | elapsed time per iteration (ms): 9000.0 |
 [2026-11-24 10:00:01.1] iteration        2/       6 | consumed samples: 32 | elapsed time per iteration (ms): 500.0 | lm
 [2026-11-24 10:00:02.1] iteration        3/       6 | consumed samples: 48 | elapsed time per iteration (ms): 400.0 |
 [2026-11-24 10:00:03.1] iteration        4/       6 | consumed samples: 64 | elapsed time per iteration (ms): 300.5 |
"""


def test_times_of_a_text_log(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text(_LOG)
    run = measured.read(file, None)
    assert run.arguments == {"global_batch_size": "16", "world_size": "4"}
    assert run.iterations == {1: 9.0, 2: 0.5, 3: 0.4, 4: 0.3005}
    file.write_text(_LOG.replace("[default0]:", "0: "))
    assert measured.read(file, None) == run
    # The output ends in the middle of a number.
    file.write_text(f"{_LOG} iteration 5/ 6 | elapsed time per iteration (ms): .")
    assert measured.read(file, None) == run
    assert measured._steady(run, 0) == [0.4, 0.3005]
    assert measured._steady(run, 2) == [0.3005]
