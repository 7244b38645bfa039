"""Worlds of 16,384 ranks and 1,024 groups: how much is looked at, kept and said, counted and not timed."""

import dataclasses
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pier_megatron import PierConfig
from pier_megatron.exchange.collectives import Gathered, GroupExchange
from pier_megatron.exchange.topology import NAMED, Rank, Topology
from pier_megatron.integration import cautions, copies, samples
from pier_megatron.integration.checkpoint.description import Description
from pier_megatron.integration.copies import Copies, CopiesDifferError, Domain, Parameter
from pier_megatron.outer import OuterLoop, Shards
from pier_megatron.outer.report import AnchorsDifferError, OuterStepReport, check_anchors
from pier_megatron.outer.standings import refusals_of, those_present
from pier_megatron.outer.verdicts import NOT_FINITE, DivergedError, Verdicts

pytestmark = pytest.mark.slow

_RANKS, _GROUPS, _TENSOR = 16384, 1024, 4

# Times that each element may be looked at, whatever for.
_LOOKS = 40


class Counted(tuple[Any, ...]):
    """A tuple that counts how many of its elements are looked at, of all of its kind together."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            Counted.looks += 1
            yield element

    def __getitem__(self, index: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(index)

    def __contains__(self, element: object) -> bool:
        Counted.looks += len(self)
        return super().__contains__(element)


@pytest.fixture(autouse=True)
def count_again() -> None:
    Counted.looks = 0


def topology() -> Topology:
    """Megatron's layout: a group is 16 ranks in order."""
    size = _RANKS // _GROUPS
    return Topology(
        [Rank(rank, f"node {rank // 8}", f"node {rank // 8}", rank // size, rank - rank % _TENSOR) for rank in range(_RANKS)]
    )


def test_ranks_are_not_looked_at_once_for_each_group_and_few_are_drawn() -> None:
    drawn = topology()
    drawn.ranks = Counted(drawn.ranks)
    drawn.check()
    lines = drawn.describe()
    assert [len(drawn.members(group)) for group in drawn.groups()] == [_RANKS // _GROUPS] * _GROUPS
    assert 0 < Counted.looks <= _LOOKS * _RANKS
    assert lines[0] == "group 0: ranks 0-15 on node 0, node 1"
    assert lines[-2:] == ["and 1,015 more, to", "group 1023: ranks 16368-16383 on node 2046, node 2047"]
    assert len(lines) == NAMED // 2 + 2


class CountedFloat(float):
    """A number that counts how often it is compared."""

    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return float(self) == other


def test_samples_of_groups_are_not_compared_pair_by_pair() -> None:
    found = SimpleNamespace(tolist=lambda: [CountedFloat(number) for number in range(_GROUPS)])
    gathered = SimpleNamespace(result=lambda: SimpleNamespace(flatten=lambda: found))
    exchange: Any = SimpleNamespace(gather=lambda own: gathered)
    samples.check_groups_read_different_samples(None, exchange, torch.device("cpu"))
    assert Counted.looks <= _LOOKS * _GROUPS


def test_samples_with_one_checksum_of_32_bits_are_told_apart() -> None:
    # Two words that are known for it. Of 16,384 groups, two have that in common once in thirty starts.
    words = (torch.tensor([*word], dtype=torch.uint8) for word in (b"plumless", b"buckeroo"))
    first, second = (samples.fingerprint_of({"text": word}) for word in words)
    assert first != second


@pytest.fixture
def fake_world() -> Iterator[None]:
    """A world with this process as its only live rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"overlap": 2, "fragments": 2}, {"exchange_dtype": "int8"}])
def test_calls_of_an_outer_step_do_not_grow_with_the_groups(fake_world: None, options: dict[str, Any]) -> None:
    few, many = (_calls_of_outer_steps(groups, options) for groups in (8, _GROUPS))
    assert 0 < many <= few


def _calls_of_outer_steps(groups: int, options: dict[str, Any]) -> int:
    """Calls of Python and C functions in two sync intervals."""
    config = PierConfig(train_iters=40, groups=groups, preset="diloco", sync_interval=4, lazy_start_iters=0, **options)
    reports: list[str] = []
    loop = OuterLoop(
        [[Shards([torch.ones(2 * 1024 * 512)])]],
        config,
        GroupExchange(dist.new_group(list(range(groups))), config.codec),
        report=lambda report: reports.append(report.line()),
    )
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for iteration in range(1, 13):
        if iteration == 5:
            sys.setprofile(count)
        loop.begin_iteration(iteration)
        loop.end_iteration()
        # Collectives of this world never say that they are done.
        loop.reports.write_arrived(waits=True)
    sys.setprofile(None)
    assert reports
    return calls


def test_ranks_that_hold_copies_are_not_written_out_unless_they_differ(
    fake_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.new_group(list(range(_GROUPS)))
    parameters = [Parameter(f"layer {number}", torch.ones(4), False, False) for number in range(100)]
    monkeypatch.setattr(copies, "_domains", lambda chunks: [Domain(parameters, group, group, None)])
    compared = Copies([], [], torch.device("cpu"))
    asked = mock.Mock(side_effect=dist.get_process_group_ranks)
    monkeypatch.setattr(dist, "get_process_group_ranks", asked)
    compared.compare(4)
    compared.check(waits=True)
    assert not asked.called
    monkeypatch.setattr(copies, "_differ", lambda sums, group: torch.ones(sums.shape[1], dtype=torch.bool))
    compared.compare(4)
    with pytest.raises(CopiesDifferError, match=r"layer \d+ on data-parallel ranks \[0, 1, 2, .* and 197 more"):
        compared.check(waits=True)
    assert asked.call_count == 3


def test_report_names_many_excluded_groups_together() -> None:
    report = OuterStepReport(8, 1.0, 1.0, 0.5, 0.5, 0.9, 0.7, 1, 1.0)
    few = dataclasses.replace(report, not_finite=(3, 5), restarted=(5,)).line()
    assert few.endswith(" NOT FINITE, LEFT OUT: group 3 | NOT FINITE, LEFT OUT AND RESTARTED: group 5 |")
    many = dataclasses.replace(report, not_finite=tuple(range(500)), restarted=tuple(range(20))).line()
    assert many.endswith("| NOT FINITE, LEFT OUT: 500 groups (0-499), 20 of them RESTARTED |")
    assert dataclasses.replace(report, not_finite=tuple(range(500))).scalars()["pier/groups-left-out"] == 500


def test_errors_name_few_of_many_groups() -> None:
    with pytest.raises(AnchorsDifferError, match=r"groups 7 are not group 0's \(checksums .*, by group: \{0: 1, 7: 2\}\)"):
        check_anchors(4, dict(enumerate([1.0] * 7 + [2.0] + [1.0] * 1000)))
    gathered = Gathered(torch.full((_GROUPS, 1), NOT_FINITE))
    exchange: Any = SimpleNamespace(groups=range(_GROUPS), rank=0, gather=lambda own: gathered)
    with pytest.raises(DivergedError, match="all 1,024 groups not finite"):
        Verdicts(exchange, NOT_FINITE, torch.zeros(0)).check(4)


@pytest.mark.parametrize("preset", ["diloco", "noloco"])
def test_sources_of_a_resume_are_not_looked_up_among_all_groups(preset: str) -> None:
    config = PierConfig(train_iters=1000, groups=_GROUPS, preset=preset, lazy_start_iters=0)
    own: Any = Counted(range(_GROUPS))
    saved = present = Description.of_run(config, 400, {}, "cpu", own_inner_state=own, is_local=True)
    Counted.looks = 0
    for group in range(_GROUPS):
        assert saved.sources(group, _GROUPS, "mean") == [group]
        assert saved.outer_sources(group, present, "mean") == [None if preset == "diloco" else group]
        assert saved.is_apart(group)
    assert 0 < Counted.looks <= _LOOKS * _GROUPS


def test_checkpoint_of_many_groups_gets_a_warning() -> None:
    args: Any = SimpleNamespace(
        **dict.fromkeys(("save", "load", "save_interval", "no_save_optim", "fp16"), None),
        data_parallel_size=4096,
        log_interval=100,
        bf16=True,
        use_distributed_optimizer=True,
    )

    def warned(groups: int, **options: Any) -> list[str]:
        return cautions.warnings(args, PierConfig(train_iters=1000, groups=groups, **options))

    assert warned(_GROUPS) == []
    args.save = "folder"
    [warning] = warned(_GROUPS)
    assert "--save with 1,024 groups: each stores an inner state of its own, 12,276 of 12,298 bytes per parameter." in warning
    assert warned(NAMED) == warned(_GROUPS, save_inner_state="first") == []


def test_islands_of_a_quorum_are_not_compared_pair_by_pair() -> None:
    # Half of a thousand join.
    numbers: list[Any] = [CountedFloat(island) for island in range(1000)]
    standings = [Counted((island, 4 * (int(island) % 2), 8, *[int(island) % 2] * 2, 4, 1, -1)) for island in numbers]
    present = those_present(standings)
    assert present == list(range(1, 1000, 2))
    assert not refusals_of(standings, Counted(present))  # type: ignore[arg-type]
    assert Counted.looks <= 2 * _LOOKS * len(standings)
