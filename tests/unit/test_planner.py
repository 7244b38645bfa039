"""The planner against published times, and its arithmetic."""

import dataclasses
import math
import statistics
import sys
from pathlib import Path

import pytest

from pier_megatron.commands.plan.model import CLUSTERS, Cluster, Job, predict

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import planner_accuracy

# Round numbers: 1 s of compute, 1 GB/s between nodes, infinitely fast otherwise.
_PLAIN = Cluster(4, 80e9, 1e12, 1e9, math.inf, math.inf, overhead=0.0, latency=0.0)
_FAR = dataclasses.replace(_PLAIN, latency=0.02)
_JOB = Job(flops=8e12, shard=1e9, gpus=8, tensor_parallel=4, replicas=2, groups=2)


def test_published_times_are_met_where_they_were_not_fitted() -> None:
    errors = [abs(point.error) for point in planner_accuracy.points() if not point.is_fitted]
    assert len(errors) > 25
    assert statistics.median(errors) < 0.1


def test_direction_of_every_published_speedup_is_right() -> None:
    # Within 2 % nobody is faster.
    for run, published, predicted in planner_accuracy.directions():
        assert (published > 1.02) == (predicted > 1.02), run


def test_arithmetic() -> None:
    prediction = predict(_JOB, _PLAIN)
    assert prediction.compute == pytest.approx(1)
    # Each node holds 4 shards of 1e9 parameters; 8 bytes of each over half a ring of two.
    assert prediction.synchronous == pytest.approx(1 + 8 * 4 / 2)
    assert prediction.local == pytest.approx(1)
    assert prediction.exchange["fp32"] == pytest.approx(16)
    assert prediction.exchange["int8"] / prediction.exchange["fp32"] == pytest.approx((1 + 4 / 128) / 4)
    assert prediction.mean_iteration(50) == pytest.approx(1 + 16 / 50)
    assert prediction.mean_iteration(50, overlap=10) == pytest.approx(1 + 6 / 50)
    assert prediction.mean_iteration(50, overlap=25) == pytest.approx(1)
    assert prediction.mean_iteration(50, overlap=5, fragments=2) == pytest.approx(1 + 6 / 50)
    assert prediction.break_even_interval(hidden=False) == pytest.approx(1)


def test_pairs_save_latency_and_a_ring_saves_bytes() -> None:
    near, far = (predict(dataclasses.replace(_JOB, gpus=64, replicas=16, groups=16), cluster) for cluster in (_PLAIN, _FAR))
    # All groups send 2 * 15 / 16 of what a node owns, two only once.
    assert near.exchange["fp32"] / near.pairs == pytest.approx(1.875)
    assert far.exchange["fp32"] - near.exchange["fp32"] == pytest.approx(30 * 0.02)
    assert far.pairs - near.pairs == pytest.approx(0.02)
    assert near.mean_iteration_in_pairs(50) == pytest.approx(near.local + 16 / 50)


def test_one_group_has_nothing_to_gain() -> None:
    prediction = predict(dataclasses.replace(_JOB, groups=1), _PLAIN)
    assert prediction.exchange["fp32"] == 0
    assert prediction.local > 10
    assert math.isinf(
        predict(dataclasses.replace(_JOB, gpus=4, replicas=1, groups=1), CLUSTERS["dgx-h100"]).break_even_interval()
    )
