"""Launches and memory of an outer step between up to 64 fake groups: as predicted at the start."""

from collections.abc import Iterator
from unittest import mock

import device_memory
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pier_megatron import PierConfig
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.integration.census import CollectiveCensus
from pier_megatron.outer import OuterLoop, Shards

pytestmark = pytest.mark.slow

_INTERVAL, _ROUNDS = 12, 3
_CHUNK = 2**14
_NUMEL = 15 * _CHUNK // 2
_CHUNKS = 8

# Collectives by which a sum travels.
_COLLECTIVES = {"fp32": 1, "int4": 2}

_OVERLAPS = [0, 5]


@pytest.fixture(params=[2, 64], scope="module")
def group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """One rank of each group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def short_chunks() -> Iterator[None]:
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=_CHUNK):
        yield


def config_of(group: dist.ProcessGroup, dtype: str, overlap: int, offload: bool = False) -> PierConfig:
    return PierConfig(
        _ROUNDS * _INTERVAL,
        groups=group.size(),
        sync_interval=_INTERVAL,
        overlap=overlap,
        exchange_dtype=dtype,
        offload=offload,
        lazy_start_iters=0,
        preset="diloco",
    )


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("dtype", "overlap"), [("fp32", 11), ("int8", 1), ("int4", 0)])
def test_memory_is_what_the_start_says(group: dist.ProcessGroup, dtype: str, overlap: int, offload: bool) -> None:
    config = config_of(group, dtype, overlap, offload)
    used, said = device_memory.used_and_said(config, GroupExchange(group, CODECS[dtype]), _NUMEL)
    assert abs(used - said) <= 0.05 * said, (used, said)


@pytest.mark.parametrize("overlap", _OVERLAPS)
@pytest.mark.parametrize("dtype", list(_COLLECTIVES))
def test_collectives_of_a_hidden_exchange_have_iterations_of_their_own(
    group: dist.ProcessGroup, dtype: str, overlap: int
) -> None:
    exchange = GroupExchange(group, CODECS[dtype])
    loop = OuterLoop([[Shards([torch.zeros(_NUMEL)])]], config_of(group, dtype, overlap), exchange)
    found = []
    for _ in range(2 * _INTERVAL):
        with CollectiveCensus() as census:
            loop.skip_iteration()
        found.append(len(census.collectives))
    assert not any(found[: _INTERVAL - 1])
    of_round = found[_INTERVAL - 1 : 2 * _INTERVAL - 1]
    # Verdicts, before anything is sent, and what is logged, after everything has arrived.
    of_round[0] -= 1
    of_round[overlap] -= 1
    launches = _COLLECTIVES[dtype]
    # Hidden, all encoded chunks are one launch; others are one over NCCL.
    at_once = 1 if dtype != "fp32" else _CHUNKS
    assert sum(of_round) == (at_once if overlap else _CHUNKS) * launches
    assert max(of_round) == (at_once if overlap else sum(of_round))


@pytest.mark.parametrize("coalesces", [False, True])
def test_vectors_are_summed_in_one_launch_where_the_backend_can(coalesces: bool) -> None:
    """Gloo copies all vectors into one, which no estimate counts, and refuses those on a GPU. NCCL has several names."""
    between = mock.Mock()
    between.size.return_value, between._get_backend.return_value.supports_coalescing = 2, coalesces
    between._get_backend.return_value.name.return_value = "nccl2"
    vectors = [torch.empty(3, device="meta") for _ in range(2)]
    with mock.patch.object(dist, "all_reduce") as summed, mock.patch.object(dist, "_coalescing_manager") as together:
        GroupExchange(between).sum(vectors).finish()
    assert (summed.call_count, together.call_count) == (2, int(coalesces))
    of_vectors, of_all = summed.return_value.wait, together.return_value.__enter__.return_value.wait
    assert (of_vectors.call_count, of_all.call_count) == ((0, 1) if coalesces else (2, 0))
