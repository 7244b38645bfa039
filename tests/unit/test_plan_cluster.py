"""Clusters of the planner: by name, from a file, with single figures in place of theirs."""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from pier_megatron.commands.plan import routes
from pier_megatron.commands.plan.cluster import (
    CLUSTERS,
    FIGURES,
    TCP_EFFICIENCY,
    Cluster,
    Figure,
    add_arguments,
    chosen,
    named_or_file,
)
from pier_megatron.commands.plan.hosts import SiteLink
from pier_megatron.errors import PierConfigError
from pier_megatron.pipeline.play import Link

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import interconnect

_REPOSITORY = Path(__file__).resolve().parents[2]
_BLOCKING = ("Pier, blocking", "Pier, blocking, overlap flags")
_EXAMPLE, _UNEQUAL = (_REPOSITORY / "examples" / f"{name}.yaml" for name in ("cluster", "unequal-cluster"))
_NODES = _UNEQUAL.read_text().partition("nodes:")[0]


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


def test_example_of_unequal_nodes() -> None:
    cluster = parsed("--cluster", str(_UNEQUAL))
    assert [(host.name, host.site, host.speed) for host in cluster.hosts] == [
        ("a", "east", 1.0),
        ("b", "east", 1.0),
        ("c", "west", 1.0),
        ("d", "west", 0.7),
    ]
    assert cluster.site_links == {frozenset(("east", "west")): SiteLink(2e7, 0.02)}


def test_sites_without_a_link_have_that_of_all_others(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(_UNEQUAL.read_text().partition("links:")[0] + "site-bandwidth: 0.5\nsite-latency: 10")
    cluster = named_or_file(str(file))
    layout = routes._Layout(_job(), cluster)
    assert layout._link(cluster.hosts[0], cluster.hosts[2]) == Link(2 * 1024 * 4 * 1024 / (0.5e9 * cluster.efficiency), 0.01)


def test_job_is_laid_over_the_nodes_that_are_listed() -> None:
    cluster = parsed("--cluster", str(_UNEQUAL))
    assert routes._Layout(_job(), cluster)._hosts_of_group(0) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert routes._Layout(_job(use_tp_pp_dp_mapping=True), cluster)._hosts_of_group(0) == [0, 2, 0, 2, 1, 3, 1, 3]
    with pytest.raises(PierConfigError, match=r"file has 4 nodes, and the job has 16 ranks on 2 GPUs per node = 8"):
        routes._Layout(_job(world_size=16, data_parallel_size=4), cluster)
    with pytest.raises(PierConfigError, match=r"4 tensor-parallel x 1 context-parallel ranks = 4, on nodes of 2 GPUs"):
        routes._Layout(_job(tensor_model_parallel_size=4, data_parallel_size=1, world_size=16), cluster)


def _job(**changes: Any) -> argparse.Namespace:
    """Of four stages and two replicas on eight ranks, as far as it matters where they are."""
    sizes = {"seq_length": 1024, "micro_batch_size": 4, "hidden_size": 1024, "world_size": 8, "data_parallel_size": 2}
    parallel = dict.fromkeys(("tensor_model_parallel_size", "context_parallel_size"), 1) | {"pipeline_model_parallel_size": 4}
    return argparse.Namespace(**sizes | parallel | {"sequence_parallel": False, "use_tp_pp_dp_mapping": False} | changes)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_flag_wins_over_a_name_and_over_a_file(figure: Figure) -> None:
    value = 1 if figure.key == "efficiency" else 3
    words = [f"--{figure.key}", str(value)]
    if figure.key in ("nodes-per-site", "site-bandwidth"):
        words += ["--site-bandwidth", "3", "--nodes-per-site", "3"]
    for where in ("perlmutter", str(_EXAMPLE)):
        assert getattr(parsed("--cluster", where, *words), figure.field) == pytest.approx(value * figure.unit)
    assert parsed("--cluster", "perlmutter") == CLUSTERS["perlmutter"]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
@pytest.mark.parametrize("value", ["-5", "nan", "inf", "1e300", "many", ""])
def test_figures_out_of_range_are_refused_by_flag_and_by_key(
    figure: Figure, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("--cluster", "vista", f"--{figure.key}={value}")
    said = capsys.readouterr().err
    assert f"argument --{figure.key}: {value or '(empty)'}: must be a" in said
    lines = [line for line in _EXAMPLE.read_text().splitlines() if not line.startswith(figure.key)]
    file = tmp_path / "mine.yaml"
    file.write_text("\n".join([*lines, f"{figure.key}: '{value}'"]))
    with pytest.raises(argparse.ArgumentTypeError, match=f"mine.yaml: {figure.key}: {value or '.empty.'}: must be a"):
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
        ("gpus-per-node: 8\nmemory: 80", "tflops, gpu-bandwidth, node-bandwidth missing; see examples/cluster.yaml"),
        ("just words", "must be lines of KEY: NUMBER"),
        ("memory: [", "no YAML"),
        ("memory: 2026-13-45", "no YAML"),
        ("memory: true", "memory: True: must be a number"),
        (_NODES + "nodes: a", "nodes: must be a list"),
        (_NODES + "nodes: [a]", "nodes: 0: must be {name, site, speed}"),
        (_NODES + "nodes: [{name: a, sped: 2}]", "nodes: 0: sped: no such key. Did you mean speed?"),
        (_NODES + "nodes: [{site: east}]", "nodes: 0: name missing"),
        (_NODES + "nodes: [{name: a, speed: 0}]", "nodes: 0: speed: 0: must be a number in (0, 1000]"),
        (_NODES + "nodes: [{name: a}, {name: a}]", "nodes: a name comes twice: a"),
        (_NODES + "nodes: [{name: a, site: east}, {name: b, site: west}]", "links: nothing between east and west. Add it, or"),
        (_NODES + "nodes: [{name: a}]\nlinks: [{sites: [east], bandwidth: 1}]", "links: 0: sites: must be two, as in [east,"),
        (_NODES + "nodes: [{name: a}]\nlinks: [{sites: [x, y], bandwidth: 1}]", "links: no node is at x"),
        (_NODES + "links: [{sites: [x, y]}]", "links: 0: bandwidth missing"),
        (_NODES + "nodes: [{name: on}]", "nodes: 0: name: True is no name; put quotes around it"),
        (_NODES + "nodes: [{name: a}]\nlinks: [{sites: [x, y, x], bandwidth: 1}]", "links: 0: sites: must be two"),
        (_UNEQUAL.read_text() + "  - {sites: [west, east], bandwidth: 1}", "links: a pair of sites comes twice"),
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
    """The median over all blocking FP32 outer steps of the emulated network."""
    times: list[float] = []
    for measured in json.loads((_REPOSITORY / "docs" / "interconnect.json").read_text()).values():
        for rate in interconnect.rates(measured):
            found = [row for row in interconnect.rows(measured, rate) if row["name"] in _BLOCKING]
            times += [wire for row in found if (wire := interconnect.times_wire(row, rate)) is not None]
    assert len(times) == 9
    assert round(1 / statistics.median(times), 2) == TCP_EFFICIENCY
    said = f"{min(times):.2f} to {max(times):.2f} x the time that its bytes take at the link's rate"
    assert said in " ".join(_page("planner").split())


def test_page_of_the_network_shows_what_was_measured() -> None:
    """Its tables are those that the benchmark makes of the raw file beside it."""
    series = json.loads((_REPOSITORY / "docs" / "interconnect.json").read_text())
    three = series["200 Mbit/s, three"] | series["80 and 1000 Mbit/s, three"]
    page = _page("performance")
    for table in (interconnect.headline(three), interconnect.summary(series["one repetition"]), interconnect.summary(three)):
        assert table in page, table


def _page(name: str) -> str:
    return (_REPOSITORY / "docs" / f"{name}.md").read_text()


def test_a_scaled_cluster_keeps_what_is_not_a_rate() -> None:
    cluster = named_or_file(str(_EXAMPLE))
    scaled = cluster.scaled(2.0, 0.5)
    assert (scaled.flops, scaled.node_bandwidth, scaled.site_bandwidth) == (700e12, 6.25e9, 0.625e9)
    assert dataclasses.replace(scaled, flops=350e12, node_bandwidth=12.5e9, site_bandwidth=1.25e9) == cluster
