"""The planner against published times, its page, and its arithmetic."""

import dataclasses
import math
import statistics
import sys
from pathlib import Path

import pytest

from pier_megatron.commands.plan.cluster import CLUSTERS, FLOPS_SPREAD, LINK_SPREAD, Cluster
from pier_megatron.commands.plan.compression_gain import savings, savings_of_gradients, table
from pier_megatron.commands.plan.model import Job, Way, achieved, predict

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import planner_accuracy

_REPOSITORY = Path(__file__).resolve().parents[2]

# Round numbers: 1 s of compute, 1 GB/s between nodes, infinitely fast otherwise.
_PLAIN = Cluster(4, 80e9, 1e12, 1e9, math.inf, math.inf, overhead=0.0, latency=0.0)
_FAR = dataclasses.replace(_PLAIN, latency=0.02)
_JOB = Job(flops=8e12, shard=1e9, gpus=8, tensor_parallel=4, replicas=2, groups=2)


def test_published_times_are_met_where_they_were_not_fitted() -> None:
    errors = [abs(point.measured_error) for point in planner_accuracy.points() if not point.is_fitted]
    assert len(errors) > 25
    assert statistics.median(errors) < 0.1


def test_direction_of_published_speedups_between_nodes_is_right() -> None:
    """With and without measured TFLOP/s. The exception trains on one node, where no cause for the published 10 % is known."""
    for predicted in ("plain", "measured"):
        # Within 2 % nobody is faster.
        wrong = [gain.run for gain in planner_accuracy.gains() if (gain.published > 1.02) != (getattr(gain, predicted) > 1.02)]
        assert wrong == ["medium, perlmutter, 4 GPUs, TP 1 PP 1, 4 groups"]


def test_page_says_what_the_benchmark_prints() -> None:
    page = (_REPOSITORY / "docs" / "planner.md").read_text()
    for line in (*planner_accuracy.summary(), *planner_accuracy.table()):
        assert line in page.splitlines() if line.startswith("|") else line in " ".join(page.split()), line


def test_spreads_hold_every_published_run_and_no_more() -> None:
    for spread, (low, high) in (
        (FLOPS_SPREAD, planner_accuracy.flops_spread()),
        (LINK_SPREAD, planner_accuracy.link_spread()),
    ):
        assert spread == (math.floor(low * 100) / 100, math.ceil(high * 100) / 100)
        assert f"{spread[0]} to {spread[1]} x" in (_REPOSITORY / "docs" / "planner.md").read_text()


def test_arithmetic() -> None:
    prediction = predict(_JOB, _PLAIN)
    assert prediction.compute == pytest.approx(1)
    # Each node holds 4 shards of 1e9 parameters; 8 bytes of each over half a ring of two.
    assert prediction.synchronous == pytest.approx(1 + 8 * 4 / 2)
    assert prediction.local == pytest.approx(1)
    assert prediction.exchange["fp32"] == pytest.approx(16)
    assert prediction.exchange["int8"] / prediction.exchange["fp32"] == pytest.approx((1 + 4 / 128) / 4)
    assert prediction.mean_iteration(Way(50)) == pytest.approx(1 + 16 / 50)
    assert prediction.mean_iteration(Way(50, 10)) == pytest.approx(1 + 6 / 50)
    assert prediction.mean_iteration(Way(50, 25)) == pytest.approx(1)
    assert prediction.mean_iteration(Way(50, 5, 2)) == pytest.approx(1 + 6 / 50)
    # Four fragments on the link at a time do not hide more than an interval has.
    assert prediction.mean_iteration(Way(10, 10, 4)) == prediction.mean_iteration(Way(10, 10)) == pytest.approx(16 / 10)
    assert prediction.break_even_interval(hidden=False) == pytest.approx(1)
    # A tenth of the run is synchronous.
    assert prediction.mean_of_run(Way(50), 0.1, hidden=False) == pytest.approx(0.1 * 17 + 0.9 * (1 + 16 / 50))
    assert achieved(_JOB, _PLAIN, prediction.compute) == pytest.approx(_PLAIN.flops)


def test_efficiency_is_a_share_of_what_leaves_a_node() -> None:
    half = predict(_JOB, dataclasses.replace(_PLAIN, efficiency=0.5))
    assert half.exchange["fp32"] == pytest.approx(2 * 16)
    assert half.synchronous == pytest.approx(1 + 2 * 16)


def test_sites_share_a_link() -> None:
    """Two sites of one node: a link ten times as slow as a node's carries the rings of all shards."""
    far = dataclasses.replace(_FAR, nodes_per_site=1, site_bandwidth=1e8, site_latency=0.5)
    prediction = predict(_JOB, far)
    assert prediction.synchronous == pytest.approx(1 + 160)
    # One hop there and back, between sites.
    assert prediction.exchange["fp32"] == pytest.approx(160 + 2 * 0.5)
    # Of 4 groups on 2 sites, 2 in each, one in two meets a group elsewhere.
    four = dataclasses.replace(_JOB, gpus=16, replicas=4, groups=4)
    pairs = predict(four, dataclasses.replace(far, nodes_per_site=2)).pairs
    assert pairs == pytest.approx(4 * 4 * 1e9 / 1e8 + 0.5)
    ring = predict(four, dataclasses.replace(far, nodes_per_site=2)).ring_latency
    assert ring == pytest.approx(2 * (2 * 0.5 + 0.02))
    # A group inside a site does not feel it.
    inside = predict(dataclasses.replace(four, groups=2), dataclasses.replace(far, nodes_per_site=2))
    assert inside.inner == pytest.approx(predict(dataclasses.replace(four, groups=2), _FAR).inner)


def test_pairs_save_latency_and_a_ring_saves_bytes() -> None:
    near, far = (predict(dataclasses.replace(_JOB, gpus=64, replicas=16, groups=16), cluster) for cluster in (_PLAIN, _FAR))
    # All groups send 2 * 15 / 16 of what a node owns, two only once.
    assert near.exchange["fp32"] / near.pairs == pytest.approx(1.875)
    assert far.exchange["fp32"] - near.exchange["fp32"] == pytest.approx(30 * 0.02)
    assert far.pairs - near.pairs == pytest.approx(0.02)
    assert near.mean_iteration(Way(50, in_pairs=True)) == pytest.approx(near.local + 16 / 50)


def test_compressed_gradients() -> None:
    inside, between = dataclasses.replace(_JOB, gpus=16, replicas=4), dataclasses.replace(_PLAIN, memory_bandwidth=2e9)
    found = {(saving.what, saving.policy): saving for saving in savings(inside, between, compute=1.0)}
    in_group = found["gradients inside a group", "dp=int8"]
    # 4 shards on a node, half a ring of two: FP32 gradients there, bf16 parameters back.
    assert in_group.wire == pytest.approx(4 * (4 + 2) / 2)
    assert in_group.compressed == pytest.approx(4 * (1 + 4 / 128 + 2) / 2)
    assert in_group.coding == pytest.approx(16 / 2)
    assert in_group.gain == pytest.approx(in_group.wire - in_group.compressed - 8)
    assert in_group.gain_behind_compute == pytest.approx(in_group.gain)
    assert found["gradients inside a group", "dp=int4"].gain > in_group.gain
    lazy = found["gradients of all groups, in the lazy start", "dp=int8"]
    assert lazy.wire == pytest.approx(4 * 8 * 3 / 4)
    assert "costs 2,062.5 ms of an iteration more than it saves" in table([in_group])[0]
    assert "pp=int8" not in {policy for _, policy in found}


def test_compression_saves_nothing_behind_compute_that_hides_the_wire() -> None:
    cluster = dataclasses.replace(_PLAIN, memory_bandwidth=8e9)
    [saving, _, _, _] = savings(dataclasses.replace(_JOB, gpus=16, replicas=4), cluster, compute=30.0)
    assert saving.gain > 0 > saving.gain_behind_compute
    assert "but nothing where the overlap flags hide the wire" in table([saving])[0]


def test_compressed_activations() -> None:
    job = dataclasses.replace(_JOB, sent_between_stages=1e9)
    [*_, between] = savings(job, _PLAIN, compute=1.0)
    # Four GPUs share the network of a node.
    assert (between.wire, between.policy, between.hidden) == (pytest.approx(8), "pp=int8", 0.0)
    assert between.compressed == pytest.approx(8 * (1 + 4 / 128) / 2)
    assert "saves" in table([between])[0]


def test_one_group_has_nothing_to_gain() -> None:
    prediction = predict(dataclasses.replace(_JOB, groups=1), _PLAIN)
    assert prediction.exchange["fp32"] == 0
    assert prediction.local > 10
    assert math.isinf(
        predict(dataclasses.replace(_JOB, gpus=4, replicas=1, groups=1), CLUSTERS["dgx-h100"]).break_even_interval()
    )


def test_whole_gradients_are_reduced_twice_as_far() -> None:
    """Without the distributed optimizer nothing is gathered: FP32 gradients there and back, both of them compressed."""
    alone = dataclasses.replace(_JOB, gpus=16, replicas=4, groups=1, is_shared_out=False)
    [saving] = savings_of_gradients(alone, _PLAIN, 1.0, "int8")
    assert saving.wire == pytest.approx(predict(alone, _PLAIN).synchronous - predict(alone, _PLAIN).compute)
    assert saving.compressed / saving.wire == pytest.approx((1 + 4 / 128) / 4)
