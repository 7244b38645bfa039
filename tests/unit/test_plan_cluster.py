"""Clusters of the planner: by name, from a file, with figures that flags override."""

import argparse
import re
import statistics
from pathlib import Path

import pytest

from pier_megatron.commands.plan.cluster import (
    CLUSTERS,
    FIGURES,
    TCP_EFFICIENCY,
    Cluster,
    add_arguments,
    chosen,
    named_or_file,
)

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


def test_efficiency_of_tcp_is_what_was_measured() -> None:
    """The median over all blocking FP32 outer steps of the emulated network, in the columns "x wire" of its page."""
    page, planner = ((_REPOSITORY / "docs" / f"{name}.md").read_text() for name in ("performance", "planner"))
    rows = re.findall(r"^\| Pier, blocking(?:, overlap flags)? \| 0\.26 \|(.*)\|$", page, re.MULTILINE)
    times = [float(cell) for row in rows for cell in row.split("|")[1::2]]
    assert len(times) == 9
    assert round(1 / statistics.median(times), 2) == TCP_EFFICIENCY
    assert f"{min(times):.2f} to {max(times):.2f} x the time that its bytes take at the link's rate" in " ".join(
        planner.split()
    )
