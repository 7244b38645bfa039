"""The planner against published times, its page and its arithmetic; how long outer steps are waited for."""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest import mock

import planner_accuracy
import pytest
import torch

from pier_megatron.commands.plan import fit, model
from pier_megatron.commands.plan.cluster import FLOPS_SPREAD, LINK_SPREAD, Cluster
from pier_megatron.commands.plan.model import Job, achieved, predict
from pier_megatron.commands.planned_sizes import gathered_bytes, largest_matrix
from pier_megatron.config import PierConfig
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.wire import Wire
from pier_megatron.outer.chunks import Chunk, Shards
from pier_megatron.outer.rounds import OuterRound
from pier_megatron.outer.rules import Nesterov
from pier_megatron.outer.staging import Buffers, Staged, Staging
from pier_megatron.outer.state import RESIDUAL, OuterState
from pier_megatron.outer.stopwatch import Stopwatch
from pier_megatron.outer.verdicts import GOOD, Verdicts

_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text()

# Round numbers: 1 s of compute, 1 GB/s between nodes, infinitely fast otherwise.
_PLAIN = Cluster(4, 80e9, 1e12, 1e9, math.inf, math.inf, overhead=0.0, latency=0.0)
_FAR = dataclasses.replace(_PLAIN, latency=0.02)
_JOB = Job(flops=8e12, shard=1e9, gpus=8, tensor_parallel=4, replicas=2, groups=2)


def steps(interval: int, overlap: int = 0, fragments: int = 1, **settings: Any) -> PierConfig:
    """Settings of a run whose first tenth is synchronous."""
    return PierConfig(train_iters=1000, groups=2, sync_interval=interval, overlap=overlap, fragments=fragments, **settings)


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


def test_page_says_what_the_tool_prints() -> None:
    for line in planner_accuracy.summary():
        assert line in _PAGE.splitlines() if line.startswith("|") else line in " ".join(_PAGE.split()), line


def test_spreads_hold_every_published_run_and_no_more() -> None:
    for spread, (low, high) in ((FLOPS_SPREAD, planner_accuracy.flops_spread()), (LINK_SPREAD, planner_accuracy.link_spread())):
        assert spread == (math.floor(low * 100) / 100, math.ceil(high * 100) / 100)
        assert f"{spread[0]} to {spread[1]} x" in _PAGE


def test_arithmetic() -> None:
    prediction = predict(_JOB, _PLAIN)
    assert prediction.compute == pytest.approx(1)
    # Each node holds 4 shards of 1e9 parameters; 8 bytes of each over half a ring of two.
    assert prediction.synchronous == pytest.approx(1 + 8 * 4 / 2)
    assert prediction.local == pytest.approx(1)
    assert prediction.exchange["fp32"] == pytest.approx(16)
    assert prediction.exchange["int8"] / prediction.exchange["fp32"] == pytest.approx((1 + 4 / 128) / 4)
    assert prediction.mean_iteration(steps(50)) == pytest.approx(1 + 16 / 50)
    assert prediction.mean_iteration(steps(50, 10)) == pytest.approx(1 + 6 / 50)
    assert prediction.mean_iteration(steps(50, 25)) == pytest.approx(1)
    assert prediction.mean_iteration(steps(50, 5, 2)) == pytest.approx(1 + 6 / 50)
    # Four fragments on the link at a time do not hide more than an interval has.
    assert prediction.mean_iteration(steps(10, 10, 4)) == prediction.mean_iteration(steps(10, 10)) == pytest.approx(16 / 10)
    # A tenth of the run is synchronous.
    assert prediction.mean_of_run(steps(50), hidden=False) == pytest.approx(0.1 * 17 + 0.9 * (1 + 16 / 50))
    assert achieved(_JOB, _PLAIN, prediction.compute) == pytest.approx(_PLAIN.flops)
    # Efficiency is a share of what leaves a node.
    half = predict(_JOB, dataclasses.replace(_PLAIN, efficiency=0.5))
    assert half.exchange["fp32"] == pytest.approx(2 * 16)
    assert half.synchronous == pytest.approx(1 + 2 * 16)
    alone = predict(dataclasses.replace(_JOB, groups=1), _PLAIN)
    assert alone.exchange["fp32"] == 0
    assert alone.local > 10


def test_sites_share_a_link() -> None:
    """Two sites of one node: a link ten times as slow as a node's carries the rings of all shards."""
    far = dataclasses.replace(_FAR, nodes_per_site=1, site_bandwidth=1e8, site_latency=0.5)
    still = dataclasses.replace(far, latency=0.0, site_latency=0.0)
    prediction = predict(_JOB, far)
    assert prediction.synchronous == pytest.approx(1 + 160)
    # One hop there and back, between sites.
    assert prediction.exchange["fp32"] == pytest.approx(160 + 2 * 0.5)
    # With 4 groups on 2 sites, 2 in each, one in two meets a group of the other site.
    four = dataclasses.replace(_JOB, gpus=16, replicas=4, groups=4)
    pairs = predict(four, dataclasses.replace(far, nodes_per_site=2)).pairs
    assert pairs == pytest.approx(4 * 4 * 1e9 / 1e8 + 0.5)
    # Twice around the ring less one hop; two hops cross between sites.
    ring, near = (predict(four, dataclasses.replace(each, nodes_per_site=2)).exchange["fp32"] for each in (far, still))
    assert ring - near == pytest.approx(2 * (2 * 0.5 + 0.02))
    # A group inside a site does not feel it.
    inside = predict(dataclasses.replace(four, groups=2), dataclasses.replace(far, nodes_per_site=2))
    assert inside.inner == pytest.approx(predict(dataclasses.replace(four, groups=2), _FAR).inner)


@pytest.mark.parametrize(
    ("flags", "nbytes"),
    [
        ({}, 2),
        ({"fp8_param_gather": True}, 1),
        ({"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}, 2),
        ({"fp4_param_gather": True}, 0.5),
    ],
)
def test_quantised_parameters_are_gathered_in_fewer_bytes(flags: dict[str, bool], nbytes: float) -> None:
    assert gathered_bytes(argparse.Namespace(**flags)) == nbytes
    job = dataclasses.replace(_JOB, gpus=16, replicas=4)
    quantised = predict(dataclasses.replace(job, parameter_bytes=nbytes), _PLAIN).inner
    assert quantised / predict(job, _PLAIN).inner == pytest.approx((4 + nbytes) / (4 + 2))


def test_pairs_save_latency_and_a_ring_saves_bytes() -> None:
    near, far = (predict(dataclasses.replace(_JOB, gpus=64, replicas=16, groups=16), cluster) for cluster in (_PLAIN, _FAR))
    # All groups send 2 * 15 / 16 of what a node owns, two only once.
    assert near.exchange["fp32"] / near.pairs == pytest.approx(1.875)
    assert far.exchange["fp32"] - near.exchange["fp32"] == pytest.approx(30 * 0.02)
    assert far.pairs - near.pairs == pytest.approx(0.02)
    assert near.mean_iteration(steps(50, preset="noloco")) == pytest.approx(near.local + 16 / 50)
    # In a node only the latency is left of a link without limit.
    assert predict(_JOB, dataclasses.replace(_FAR, gpus_per_node=_JOB.gpus)).pairs == pytest.approx(0.02)


_SIXTEEN = PierConfig(train_iters=100_000, groups=16)
_PAIRS = dataclasses.replace(_SIXTEEN, preset="noloco", offload=True)
# 7B on 64 A100 with TP 4, four to a node; a fast link of 80 GB/s. Iterations of 4 s.
_7B = Job(flops=64 * 4e14, shard=1.75e9, gpus=64, tensor_parallel=4, replicas=16, groups=16)
_A100 = Cluster(4, 40e9, 1e14, 80e9, 30e9, 1.4e12, 20e9, overhead=0.0, latency=0.0)

# Half a ring of 16 for FP32, 4 shards a node: 52.5 GB at 80 GB/s; 26 passes over 7 GB, or 33; 32 bytes a parameter for a codec.
_WIRE, _BLOCKING_PASSES, _OVERLAPPED_PASSES, _CODING = 0.65625, 0.13, 0.165, 0.04
# A vector of FP32 at 20 GB/s. An overlapped step waits for five, in addition to its passes.
_VECTOR = 0.35
_OVERLAPPED = 5 * _VECTOR


def with_settings(**settings: Any) -> PierConfig:
    return dataclasses.replace(_SIXTEEN, **settings)


def test_blocking_step_hides_copies_or_is_hidden_behind_them() -> None:
    found = predict(_7B, _A100)
    assert found.exposed(_SIXTEEN) == pytest.approx(_WIRE + _BLOCKING_PASSES)
    # Anchor and momentum take as long as two vectors, 0.7 s, which is less than wire and passes together.
    assert found.exposed(with_settings(offload=True)) == pytest.approx(_WIRE + _BLOCKING_PASSES)
    hosted = predict(_7B, dataclasses.replace(_A100, host_bandwidth=10e9))
    assert hosted.exposed(with_settings(offload=True)) == pytest.approx(4 * _VECTOR)
    slow = predict(_7B, dataclasses.replace(_A100, node_bandwidth=40e9))
    assert slow.exposed(with_settings(offload=True)) == slow.exposed(_SIXTEEN) == pytest.approx(2 * _WIRE + _BLOCKING_PASSES)
    # In int8 the residual goes along.
    assert found.exposed(with_settings(exchange_dtype="int8", offload=True)) == pytest.approx(3 * _VECTOR)
    assert found.exposed(_PAIRS) == pytest.approx(2 * _VECTOR)
    assert found.mean_iteration(_PAIRS) == pytest.approx(4 + 2 * _VECTOR / 50)


@pytest.mark.parametrize("overlap", [0, 25])
def test_groups_wait_for_orthogonal_steps(overlap: int) -> None:
    found = predict(dataclasses.replace(_7B, matrix_side=4096), _A100)
    # Five iterations of six operations for each number and each element of the shorter side, at an eighth of the rate.
    seconds = 5 * 6 * 4096 * _7B.owned / (_A100.flops / 8)
    assert found.orthogonalising == pytest.approx(seconds)
    waits = {
        rule: found.exposed(PierConfig(train_iters=80_000, groups=_7B.groups, overlap=overlap, outer_rule=rule))
        for rule in ("nesterov", "muon")
    }
    # Before anything is sent the parameters are read and written, subtracted from the anchor, and measured.
    measuring = 6 * 4 * _7B.owned / _A100.memory_bandwidth
    assert waits["muon"] - waits["nesterov"] == pytest.approx(seconds + measuring)


def test_quality_is_given_up_last() -> None:
    job = argparse.Namespace(micro_batch_size=4, recompute_granularity=None)
    settings = PierConfig(train_iters=1000, groups=2, sync_interval=20, overlap=5, marks_embeddings=True)
    with mock.patch.object(fit.refusals, "check_sizes_and_intervals"):
        flags = [" ".join(added) for added, _, _ in fit.changes(job, settings)]
    assert settings.preset == "pier-orthogonal"
    without = ["--pier-outer-rule nesterov" in added for added in flags]
    assert without == sorted(without)
    assert any(without)
    assert "--micro-batch-size 2" in flags


def test_overlapped_step_waits_for_all_copies() -> None:
    found = predict(_7B, _A100)
    assert found.exposed(with_settings(overlap=25)) == pytest.approx(_OVERLAPPED_PASSES)
    for overlap in (2, 25):
        assert found.exposed(with_settings(overlap=overlap, offload=True)) == pytest.approx(_OVERLAPPED)
        # The residual is waited for, too.
        assert found.exposed(with_settings(overlap=overlap, exchange_dtype="int8", offload=True)) == pytest.approx(6 * _VECTOR)
    quick = predict(_7B, dataclasses.replace(_A100, host_bandwidth=1e12))
    assert quick.exposed(with_settings(overlap=25, offload=True)) == pytest.approx(_OVERLAPPED_PASSES)


def _round(dtype: str) -> OuterRound:
    exchange, device = GroupExchange(codec=CODECS[dtype]), torch.device("cpu")
    exchange.wire = Wire(exchange.codec, 2)
    segment = None if exchange.codec.lossless else exchange.wire.segment_numel
    residuals = () if segment is None else (RESIDUAL,)
    state = OuterState([Shards([torch.randn(48)])], chunk_numel=1, offload=True, segment_numel=segment, residuals=residuals)
    round_ = OuterRound([Staging(state)], (0,), Nesterov(0.9, 0.7), 1, GOOD, Stopwatch(device), device)
    round_.meet(exchange, Verdicts(exchange, GOOD, round_.lengths))
    return round_


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("span", [1, 2, 3, 26])
def test_bytes_are_those_that_rounds_copy(dtype: str, span: int) -> None:
    """Bytes a parameter that a round copies to the device."""
    inward, lend = list[float](), Staging.lend

    def counting(staging: Staging, chunk: Chunk, reads: Collection[str], kept: Buffers | None = None) -> Staged:
        staged = lend(staging, chunk, reads, kept)
        inward.append(4 * chunk.numel * len(set(reads) & staged.homes.keys()) / staging.state.numel)
        return staged

    with mock.patch.object(Staging, "lend", counting):
        _round(dtype).run()
        assert sum(inward) == pytest.approx(model.copied_by_blocking(dtype))
        inward.clear()
        overlapped = _round(dtype)
        overlapped.begin()
        for age in range(span):
            overlapped.proceed(age, span)
        overlapped.finish()
    assert sum(inward) == pytest.approx(model.copied_by_overlapped(dtype))


@pytest.mark.parametrize(
    ("changes", "numel"),
    [
        ({}, 64 * 256 // 2),
        ({"swiglu": True}, 64 * 512 // 2),
        ({"ffn_hidden_size": 64}, 64 * 3 * 64 // 2),
        ({"ffn_hidden_size": 64, "group_query_attention": True, "num_query_groups": 1}, 64 * (4 + 2) * 16 // 2),
        ({"num_experts": 8}, 64 * 200),
        ({"max_position_embeddings": 1024}, 64 * 256 // 2),
        ({"max_position_embeddings": 1024, "position_embedding_type": "learned_absolute"}, 64 * 1024),
    ],
)
def test_largest_matrix_is_that_of_a_rank(changes: dict[str, Any], numel: int) -> None:
    args = argparse.Namespace(
        **{"hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16, "ffn_hidden_size": 256, "swiglu": False}
        | {"group_query_attention": False, "num_query_groups": 1, "num_experts": None, "moe_ffn_hidden_size": 200}
        | {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
        | {"max_position_embeddings": 32, "position_embedding_type": "rope"}
        | changes
    )
    assert largest_matrix(args) == numel
