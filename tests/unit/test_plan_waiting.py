"""How long outer steps are waited for with their state on the device and on the host."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from pier_megatron.commands.plan import model
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, predict
from pier_megatron.config import PierConfig
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.wire import Wire
from pier_megatron.outer.rounds import OuterRound, Stopwatch
from pier_megatron.outer.rules import Nesterov
from pier_megatron.outer.staging import Buffers, Staged, Staging
from pier_megatron.outer.state import Chunk, OuterState, Shards
from pier_megatron.outer.verdicts import GOOD, Verdicts

_STEP = PierConfig(train_iters=100_000, groups=16)
_PAIRS = dataclasses.replace(_STEP, preset="noloco", offload=True)
# 7B on 64 A100 with TP 4, four to a node; a fast link of 80 GB/s. Iterations of 4 s.
_JOB = Job(flops=64 * 4e14, shard=1.75e9, gpus=64, tensor_parallel=4, replicas=16, groups=16)
_A100 = Cluster(4, 40e9, 1e14, 80e9, 30e9, 1.4e12, 20e9, overhead=0.0, latency=0.0)

# Half a ring of 16 for FP32, 4 shards a node: 52.5 GB at 80 GB/s; 26 passes over 7 GB, or 33; 32 bytes a parameter for a codec.
_WIRE, _BLOCKING_PASSES, _OVERLAPPED_PASSES, _CODING = 0.65625, 0.13, 0.165, 0.04
# A vector of FP32 at 20 GB/s. An overlapped step waits for five, in addition to its passes.
_VECTOR = 0.35
_OVERLAPPED = 5 * _VECTOR


def with_settings(**settings: Any) -> PierConfig:
    return dataclasses.replace(_STEP, **settings)


def test_blocking_step_hides_copies_or_is_hidden_behind_them() -> None:
    found = predict(_JOB, _A100)
    assert found.exposed(_STEP) == pytest.approx(_WIRE + _BLOCKING_PASSES)
    # Anchor and momentum take as long as two vectors, 0.7 s, which is less than wire and passes together.
    assert found.exposed(with_settings(offload=True)) == pytest.approx(_WIRE + _BLOCKING_PASSES)
    hosted = predict(_JOB, dataclasses.replace(_A100, host_bandwidth=10e9))
    assert hosted.exposed(with_settings(offload=True)) == pytest.approx(4 * _VECTOR)
    slow = predict(_JOB, dataclasses.replace(_A100, node_bandwidth=40e9))
    assert slow.exposed(with_settings(offload=True)) == slow.exposed(_STEP) == pytest.approx(2 * _WIRE + _BLOCKING_PASSES)
    # In int8 the residual goes along.
    assert found.exposed(with_settings(exchange_dtype="int8", offload=True)) == pytest.approx(3 * _VECTOR)
    assert found.exposed(_PAIRS) == pytest.approx(2 * _VECTOR)
    assert found.mean_iteration(_PAIRS) == pytest.approx(4 + 2 * _VECTOR / 50)


def test_overlapped_step_waits_for_all_copies() -> None:
    found = predict(_JOB, _A100)
    assert found.exposed(with_settings(overlap=25)) == pytest.approx(_OVERLAPPED_PASSES)
    for overlap in (2, 25):
        assert found.exposed(with_settings(overlap=overlap, offload=True)) == pytest.approx(_OVERLAPPED)
        # The residual is waited for, too.
        assert found.exposed(with_settings(overlap=overlap, exchange_dtype="int8", offload=True)) == pytest.approx(6 * _VECTOR)
    quick = predict(_JOB, dataclasses.replace(_A100, host_bandwidth=1e12))
    assert quick.exposed(with_settings(overlap=25, offload=True)) == pytest.approx(_OVERLAPPED_PASSES)


@dataclasses.dataclass
class _Copied:
    """Bytes a parameter that a round has copied to the device."""

    inward: float = 0.0


@pytest.fixture(name="copied")
def _copied() -> Iterator[_Copied]:
    found, lend = _Copied(), Staging.lend

    def counting(staging: Staging, chunk: Chunk, reads: Collection[str], kept: Buffers | None = None) -> Staged:
        staged = lend(staging, chunk, reads, kept)
        found.inward += 4 * chunk.numel * len(set(reads) & staged.homes.keys()) / staging.state.numel
        return staged

    with mock.patch.object(Staging, "lend", counting):
        yield found


def _round(dtype: str) -> OuterRound:
    exchange, device = GroupExchange(codec=CODECS[dtype]), torch.device("cpu")
    exchange.wire = Wire(exchange.codec, 2)
    segment = None if exchange.codec.lossless else exchange.wire.segment_numel
    state = OuterState([Shards([torch.randn(48)])], chunk_numel=1, offload=True, segment_numel=segment)
    verdicts = Verdicts(exchange, GOOD, device)
    return OuterRound([Staging(state)], exchange, (0,), Nesterov(0.9, 0.7), verdicts, 1, Stopwatch(device), device)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("span", [1, 2, 3, 26])
def test_bytes_are_those_that_rounds_copy(copied: _Copied, dtype: str, span: int) -> None:
    _round(dtype).run()
    assert copied.inward == pytest.approx(model.copied_by_blocking(dtype))
    copied.inward, overlapped = 0.0, _round(dtype)
    overlapped.begin()
    for age in range(span):
        overlapped.proceed(age, span)
    overlapped.finish()
    assert copied.inward == pytest.approx(model.copied_by_overlapped(dtype))
