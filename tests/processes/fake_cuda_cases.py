"""The outer loop on a GPU that is not there: what mixes devices, waits or reads garbage, and what an outer step takes."""

import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import te_stand_in
import torch
import torch.distributed as dist
from fake_cuda import FakeGpu, FaultError, fake_ranks
from torch import Tensor

from pier_megatron import PierConfig
from pier_megatron.exchange import coding, encoded
from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.sites import SiteExchange, new_site_communicators
from pier_megatron.integration.inner.precision_aware import FusedAdamMasters
from pier_megatron.integration.startup import Takes
from pier_megatron.outer import OuterLoop, Shards, elastic
from pier_megatron.outer.elastic import ElasticMembership
from pier_megatron.outer.report import OuterStepReports
from pier_megatron.outer.rules import Nesterov
from pier_megatron.outer.staging import Staged, Staging
from pier_megatron.outer.verdicts import GOOD, NOT_FINITE, Verdicts

# Where the host may wait for the device inside an iteration, and why.
_REASONS = {
    "verdicts.py:own_verdict": "whether the parameters are finite decides what the host launches next",
    "verdicts.py:Verdicts.all": "the other groups' verdicts do so too; on a stream of its own",
    "report.py:OuterStepReports.write_arrived": "numbers of a line in the log, which have arrived; on a stream of its own",
    "report.py:OuterStepReports.report_of": "and which groups were restarted inside sites",
    "stopwatch.py:Stopwatch.seconds": "the time of a blocking outer step, for its line in the same iteration",
    "chunks.py:Chunk.copy_parameters_to": "offloaded, the anchor is copied to the host once, as the lazy start begins and ends",
    "staging.py:Staging.synchronize": "before that, what is written there must have arrived",
    "share.py:Share.agree_on_mean": "once, after the last iteration of groups with anchors of their own",
    "elastic.py:ElasticPeers._standing": "islands compare numbers on the host before they meet",
    "elastic.py:ElasticPeers._attempt": "and those of the others",
    "chunks.py:Chunk.set_parameters": "and return to it, bit for bit, also from the host",
    "state.py:OuterState.checksum": "of an offloaded anchor they sum the bits on the host",
}

_MEANT = {f"pier_megatron/outer/{place}": reason for place, reason in _REASONS.items()}

_NUMEL, _CHUNK = 3000, 1024
_INTERVAL = 4


def config_of(**settings: Any) -> PierConfig:
    given = {"train_iters": 13, "groups": 2, "sync_interval": _INTERVAL, "lazy_start_iters": _INTERVAL, "preset": "pier-rising"}
    return PierConfig(**(given | settings))


def shards_on(device: torch.device) -> list[Shards]:
    """Parameters of every kind."""
    weights, copied, averaged, tied = (torch.empty(size, device=device) for size in (_NUMEL, 100, 7, 300))
    return [
        Shards([weights, torch.empty(30, 20, device=device)]),
        Shards([copied], is_copied=True),
        Shards([averaged], is_averaged=True),
        Shards([tied], is_tied=True),
    ]


def halves_on(device: torch.device) -> list[Shards]:
    """Parameters whose lower halves Transformer Engine's FusedAdam keeps."""
    parameters = [torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16, device=device)) for size in (_NUMEL, 600)]
    adam = te_stand_in.FusedAdam(parameters, master_weights=True, store_param_remainders=True, use_decoupled_grad=True)
    for parameter in parameters:
        adam.initialize_state(parameter, True)
    return [Shards(parameters, stored=FusedAdamMasters(adam))]


@contextlib.contextmanager
def watched(
    config: PierConfig, chunk_numel: int | None = _CHUNK
) -> Iterator[tuple[FakeGpu, GroupExchange, SiteExchange | None]]:
    """A GPU, and collectives between the groups of a run; with the run's own chunks if their length is None."""
    gpu, short = FakeGpu(), contextlib.nullcontext()
    if chunk_numel is not None:
        short = mock.patch.object(PierConfig, "chunk_numel_on", return_value=chunk_numel)
    with short, fake_ranks(config.groups), gpu.watching():
        exchange, sites = GroupExchange(dist.group.WORLD, config.codec), None
        if config.sites is not None:
            communicators = new_site_communicators([range(config.groups)], config.sites)
            sites = SiteExchange(exchange, *communicators)
        yield gpu, exchange, sites


def train(
    config: PierConfig, shards: Callable[[torch.device], list[Shards]] = shards_on, looks_back: bool = False
) -> list[tuple[int, int, int]]:
    """Trains on a GPU that is not there, where a wait that is not meant is an error.

    Returns:
        Waits for what the device computes, waits for another stream alone, and launches, by iteration.
    """
    found, device = [], torch.device("cuda")
    with watched(config) as (gpu, exchange, sites):
        owned = shards(device)
        moments = {id(tensor): torch.empty_like(tensor) for alike in owned for tensor in alike.tensors}
        loop = OuterLoop(
            [owned], config, exchange, sites=sites, inner_state=lambda parameter: {"exp_avg": moments[id(parameter)]}
        )
        loop.rehearse()
        for iteration in range(1, config.train_iters + 1):
            gpu.meant = _MEANT
            gpu.forget()
            loop.begin_iteration(iteration)
            loop.note_training(torch.empty(1, device=device), 1.0)
            loop.end_iteration()
            found.append((gpu.waits.total(), gpu.waits_apart.total(), gpu.launches.total()))
            gpu.meant = None
            if looks_back:
                with loop.anchor_in_model():
                    pass
                snapshot = loop.snapshot()
                # On the device, copies of an exchange under way would take eight bytes a parameter.
                assert {flat.device.type for kept in snapshot.rounds for flat in (kept.own, kept.sum)} <= {"cpu"}
                loop.restore(snapshot)
                loop.checksums()
    return found


# Ways, with the waits in the iterations of an interval: for what the device computes, and for other streams alone.
_WAYS: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "blocking": ({}, [0, 0, 0, 3], [0, 0, 0, 2]),
    "blocking, int1": ({"exchange_dtype": "int1"}, [0, 0, 0, 3], [0, 0, 0, 2]),
    "offloaded, int1": ({"offload": True, "exchange_dtype": "int1"}, [0, 0, 0, 3], [0, 0, 0, 2]),
    "overlapped": ({"overlap": 3}, [0, 0, 0, 1], [0, 0, 2, 0]),
    "overlapped, offloaded, int1": ({"overlap": 3, "offload": True, "exchange_dtype": "int1"}, [0, 0, 0, 1], [0, 0, 2, 0]),
    "fragments": ({"overlap": 1, "fragments": 2}, [0, 1, 0, 1], [2, 0, 2, 0]),
    "pairs, offloaded": ({"preset": "noloco", "groups": 4, "offload": True}, [0, 0, 0, 1], [0, 0, 0, 2]),
    "pairs, overlapped": ({"preset": "noloco", "groups": 4, "overlap": 2}, [0, 0, 0, 1], [0, 2, 0, 0]),
    "sites": ({"groups": 4, "sites": 2, "site_interval": 2}, [0, 1, 0, 4], [0, 1, 0, 4]),
}


@pytest.mark.parametrize("way", _WAYS)
def test_host_waits_only_where_it_is_meant_to(way: str) -> None:
    settings, waits, apart = _WAYS[way]
    trained = train(config_of(**settings))
    # The lazy start has copies to the host, and the last iteration an outer step of its own.
    assert [each[:2] for each in trained[2 * _INTERVAL : 3 * _INTERVAL]] == [*zip(waits, apart, strict=True)]
    if "offload" not in settings:
        assert not any(of_device for of_device, *_ in trained[:_INTERVAL])


def test_main_parameters_in_halves_stay_on_the_device() -> None:
    trained = train(config_of(exchange_dtype="int8"), shards=halves_on)
    assert [of_device for of_device, *_ in trained[2 * _INTERVAL : 3 * _INTERVAL]] == [0, 0, 0, 3]


@pytest.mark.parametrize(
    "settings", [{}, {"overlap": 3}, {"overlap": 3, "offload": True, "fragments": 2, "exchange_dtype": "int1"}]
)
def test_excluded_groups_and_snapshots_mix_no_devices(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verdicts, "all", lambda verdicts: (NOT_FINITE, GOOD))
    rare = ("pier_megatron/outer/static.py:StaticPeers.restart", "pier_megatron/outer/share.py:Moments.hand_over")
    monkeypatch.setattr(f"{__name__}._MEANT", _MEANT | dict.fromkeys(rare, "a group is excluded"))
    train(config_of(**{"train_iters": 9} | settings), looks_back=True)


@pytest.mark.parametrize("offload", [False, True])
def test_elastic_islands(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At iteration 1, with two islands of number 1, since all numbers that come back are ones."""
    monkeypatch.setattr(elastic, "refusals_of", lambda standings, present: {})
    config = config_of(sync_interval=1, lazy_start_iters=0, preset="diloco", lighthouse="http://other", offload=offload)
    with watched(config) as (gpu, exchange, _):
        meets = mock.Mock(**{"meet.return_value": exchange}, agree=lambda exchange, outcome: outcome, sum_inside=lambda n: n)
        islands = ElasticMembership(meets, own=0, wait_seconds=60)
        loop = OuterLoop([shards_on(torch.device("cuda"))], config, GroupExchange(codec=config.codec), islands=islands)
        loop.rehearse()
        loop.begin_iteration(1)
        gpu.forget()
        gpu.meant = _MEANT
        loop.end_iteration()
    # Offloaded, the sum of the anchor's bits comes from the host.
    assert (gpu.waits.total(), gpu.waits_apart.total()) == ((7 + 1, 3) if offload else (7, 2))


def _read_the_loss(reports: OuterStepReports, loss: Tensor, grad_norm: float) -> None:
    assert loss.item()


def _divide_by_a_tensor_on_the_host(rule: Nesterov, staged: Staged, size: int, counted: int) -> None:
    staged.shared.div_(torch.full((len(staged.shared),), counted))


_encode = coding.encode


def _encode_with_gaps(codec: Codec, rows: Tensor, dropped: Tensor | None = None) -> Tensor:
    return _encode(codec, rows, dropped if dropped is None else dropped.repeat_interleave(2)[::2])


_allocate = Staging.allocate


def _allocate_pageable(staging: Staging, names: Sequence[str], **place: Any) -> dict[str, Tensor]:
    return _allocate(staging, names, **place | {"pin_memory": False})


# What is planted: owner, name, the bug, settings under which it runs, and what the error says.
_BUGS: dict[str, tuple[Any, str, Any, dict[str, Any], str]] = {
    "host read": (
        OuterStepReports,
        "note_training",
        _read_the_loss,
        {},
        r"aten\._local_scalar_dense\.default waits for the device",
    ),
    "devices mixed": (Nesterov, "combine", _divide_by_a_tensor_on_the_host, {}, "tensors in host memory and on the device"),
    "gaps at a kernel": (encoded, "encode", _encode_with_gaps, {"exchange_dtype": "int1"}, "_encode: dropped is .*False"),
    "not pinned": (Staging, "allocate", _allocate_pageable, {"overlap": 2, "offload": True}, "memory that is not pinned"),
}


@pytest.mark.parametrize("bug", _BUGS)
def test_planted_bugs_are_seen_with_their_line(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, planted, settings, message = _BUGS[bug]
    monkeypatch.setattr(owner, attribute, planted)
    place = r"^(tests/processes/fake_cuda_cases|pier_megatron/(outer|exchange)/\w+)\.py:\S+, line \d+: "
    with pytest.raises(FaultError, match=f"{place}.*{message}"):
        train(config_of(**settings))


# A rank's parameters of matrices and of norms; 7B on four tensor-parallel ranks, which copy the norms.
_GPT2_XL, _7B = (1_556_480_000, 153_600), (1_643_380_736, 262_144)
_LARGE: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "blocking, int1": (_7B, {"exchange_dtype": "int1"}),
    "overlapped fragments, int8": (_GPT2_XL, {"overlap": 2, "fragments": 2, "exchange_dtype": "int8"}),
    "overlapped, offloaded, int1": (_GPT2_XL, {"overlap": 2, "offload": True, "exchange_dtype": "int1"}),
    "pairs": (_7B, {"preset": "noloco", "groups": 4}),
}


# Launches of an outer step, collectives included: for each chunk, and once.
_LAUNCHES = {"fp32": (18, 25), "int1": (27, 25)}


@pytest.mark.parametrize("dtype", _LAUNCHES)
def test_launches_of_a_blocking_outer_step(dtype: str) -> None:
    def launches(chunks: int) -> int:
        trained = train(config_of(exchange_dtype=dtype), lambda device: [Shards([torch.empty(chunks * _CHUNK, device=device)])])
        return trained[2 * _INTERVAL - 1][2]

    # Up to sixteen of them are as many parts, and one is compared.
    few, many = launches(4), launches(8)
    assert ((many - few) / 4, 2 * few - many) == _LAUNCHES[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("way", _LARGE)
def test_device_memory_of_large_models_is_as_planned(way: str) -> None:
    sizes, settings = _LARGE[way]
    # In few long chunks.
    config = config_of(**{"train_iters": 4, "sync_interval": 2, "lazy_start_iters": 0, "chunk_mib": 512} | settings)
    with watched(config, None) as (gpu, exchange, _):
        split, copied = (torch.empty(size, device="cuda") for size in sizes)
        shards = [Shards([split]), Shards([copied], is_copied=sizes is _7B)]
        before = gpu.peak = gpu.taken
        loop = OuterLoop([shards], config, exchange)
        loop.rehearse()
        for _ in range(config.train_iters):
            loop.skip_iteration()
    takes = Takes.planned(config, (*sizes, 0), sizes is _7B, "cuda")
    kept = takes.residuals if config.offload else takes.state
    assert gpu.peak - before == pytest.approx(kept + takes.work, rel=0.05)


Counted = tuple[dict[str, int], dict[str, int], int]
"""Waits by place, waits for other streams and launches of an iteration."""


def counted(*trainings: str) -> list[list[Counted]]:
    """What the iterations of trainings by Megatron do, which run at the same time."""
    command = [sys.executable, Path(__file__).with_name("fake_training.py")]
    processes = [subprocess.Popen([*command, *argv.split()], stdout=subprocess.PIPE, text=True) for argv in trainings]
    printed = [process.communicate()[0].splitlines() for process in processes]
    return [[tuple(json.loads(line[7:])) for line in lines if line.startswith("counted")] for lines in printed]


@pytest.mark.slow
def test_megatron_waits_between_outer_steps_as_often_as_stock() -> None:
    stock, pier = counted(
        "--num-distributed-optimizer-instances 2",
        "--optimizer pier --pier-groups 2 --pier-preset pier --pier-sync-interval 2 --pier-lazy-start-iters 2",
    )
    assert (pier[4][0], pier[4][1]) == (stock[4][0], stock[4][1])
    # Without the reduction over the instances.
    assert pier[4][2] <= stock[4][2]
    waits = Counter(pier[5][0])
    waits.subtract(stock[5][0])
    assert {place: number for place, number in waits.items() if number} == {
        "pier_megatron/outer/verdicts.py:own_verdict": 1,
        "pier_megatron/outer/stopwatch.py:Stopwatch.seconds": 2,
        # What was computed an interval ago.
        "pier_megatron/integration/copies.py:Copies.check": 1,
    }
