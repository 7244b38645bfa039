"""A loop that is restored, as from a checkpoint, or reset while an outer step is under way."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pier_megatron import PierConfig
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import Gathered, GroupExchange
from pier_megatron.outer import OuterLoop, Shards, Snapshot
from pier_megatron.outer.snapshot import Progress
from pier_megatron.outer.state import ANCHOR, MOMENTUM


class _Deaf(GroupExchange):
    """Two groups; the other never joins a collective."""

    def __init__(self) -> None:
        super().__init__(codec=CODECS["int8"], groups=(0, 1))
        self.size = 2

    def gather(self, vector: torch.Tensor) -> Gathered:
        raise AssertionError("a collective")


class _Copies(TorchFunctionMode):
    """Notes where tensors are copied to, and finds copies onto themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[int] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            assert args[0].data_ptr() != args[1].data_ptr(), "a copy onto itself"
            self.targets.add(args[0].data_ptr())
        return function(*args, **(kwargs or {}))


def _loop(exchange: GroupExchange | None = None, outer_rule: str | None = None) -> OuterLoop:
    settings: dict[str, Any] = {"exchange_dtype": "int8", "offload": True, "outer_rule": outer_rule}
    config = PierConfig(20, groups=2, preset="pier", sync_interval=4, lazy_start_iters=4, **settings)
    return OuterLoop([[Shards([torch.randn(10), torch.randn(4, 5)])]], config, exchange or _Deaf())


def test_buffers_are_the_loops_own_and_talk_to_nobody() -> None:
    loop = _loop()
    snapshot = loop.empty_snapshot(Progress(6, is_local=True, is_synchronised=False, last_common_step=4, trained=2), {})
    snapshot.states[0][MOMENTUM].fill_(3.0)
    with _Copies() as copies:
        loop.restore(snapshot)
    assert not copies.targets
    assert loop.states[0].momentum.eq(3.0).all()
    assert (loop.iteration, loop.is_local, loop.is_synchronised, loop.progress.last_common_step) == (6, True, False, 4)


@pytest.mark.parametrize("has_residuals", [True, False])
def test_foreign_buffers_are_copied(has_residuals: bool) -> None:
    loop, other = _loop(), _loop()
    progress = Progress(6, is_local=True)
    [own], [saved] = (of.empty_snapshot(progress, {}).states for of in (loop, other))
    residuals = saved.keys() - {ANCHOR, MOMENTUM}
    for name in (MOMENTUM, *residuals):
        saved[name].fill_(3.0)
    if not has_residuals:
        saved = {name: saved[name] for name in (ANCHOR, MOMENTUM)}
    with _Copies() as copies:
        loop.restore(Snapshot(progress, [saved]))
    assert copies.targets >= {own[ANCHOR].data_ptr(), own[MOMENTUM].data_ptr()}
    torch.testing.assert_close(own[ANCHOR], saved[ANCHOR], rtol=0, atol=0)
    assert residuals
    assert all(bool(own[name].eq(3.0).all()) is has_residuals for name in residuals if own[name].numel())
    # The snapshot stays what it was.
    loop.states[0].anchor.zero_()
    assert saved[ANCHOR].any()


def test_room_for_a_round_is_as_long_as_its_chunks() -> None:
    [buffers] = _loop().empty_snapshot(Progress(9, is_local=True), {8: (1, 1)}).rounds
    assert (buffers.begun, buffers.verdicts) == (8, (1, 1))
    assert len(buffers.own) == len(buffers.sum) == 30


class _Handed(_Deaf):
    """Two groups; the other hands out ones. Notes the memory of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.memory = 1, set[int]()

    def broadcast(self, tensor: torch.Tensor, source: int, targets: Sequence[int]) -> None:
        assert (source, [*targets]) == (0, [1])
        self.memory.add(tensor.untyped_storage().data_ptr())
        tensor.fill_(1.0)


def test_offloaded_state_is_handed_out_by_way_of_the_device() -> None:
    """NCCL takes no host tensors: what crosses must be none of the flat buffers, which are in host memory."""
    exchange = _Handed()
    loop = _loop(exchange, "own_rules:Aside")
    loop.share.hand_over(exchange, 0, [1])
    [state] = loop.states
    assert exchange.memory
    assert exchange.memory.isdisjoint(flat.untyped_storage().data_ptr() for flat in state.flats.values())
    assert state.anchor.eq(1.0).all()
    assert state.momentum.eq(1.0).all()
    assert state.flats["aside"].eq(1.0).all()


def test_outer_steps_before_a_snapshot_are_reported_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gathered, "is_complete", lambda gathered: False)
    config = PierConfig(20, groups=1, preset="diloco", sync_interval=4, lazy_start_iters=0, fragments=2)
    reported = list[int]()
    loop = OuterLoop(
        [[Shards([torch.randn(10)])]], config, GroupExchange(), report=lambda report: reported.append(report.iteration)
    )
    for _ in range(4):
        loop.skip_iteration()
    assert reported == []
    loop.snapshot()
    assert reported == [2, 4]


_WAYS: dict[str, dict[str, Any]] = {
    "in place": {},
    "offloaded": {"offload": True},
    "fragments": {"fragments": 2},
    "few bits": {"exchange_dtype": "int8"},
}


def _trained(parameter: torch.Tensor, loop: OuterLoop, iterations: int) -> OuterLoop:
    for iteration in range(loop.iteration + 1, loop.iteration + 1 + iterations):
        loop.begin_iteration(iteration)
        parameter += 0.1 * torch.sin(torch.arange(len(parameter)) + iteration)
        loop.end_iteration()
    return loop


def _overlapped(settings: dict[str, Any], parameter: torch.Tensor) -> OuterLoop:
    config = PierConfig(24, groups=1, preset="pier", sync_interval=4, lazy_start_iters=4, overlap=3, **settings)
    return OuterLoop([[Shards([parameter])]], config, GroupExchange(codec=CODECS[config.exchange_dtype]))


@pytest.mark.parametrize("settings", _WAYS.values(), ids=_WAYS)
def test_reset_forgets_an_outer_step_under_way(settings: dict[str, Any]) -> None:
    parameter = torch.randn(40)
    loop = _trained(parameter, _overlapped(settings, parameter), 9)
    loop.reset()
    _trained(parameter, loop, 2)
    [state] = loop.states
    assert not state.momentum.any()
    # As a loop that begins with the same parameters.
    again = parameter.clone()
    other = _overlapped(settings, again)
    other.reset(loop.iteration)
    other.progress.is_local = True
    loop.reset()
    for trained, of in ((parameter, loop), (again, other)):
        _trained(trained, of, 8)
    torch.testing.assert_close(again, parameter, rtol=0, atol=0)
    assert all(torch.equal(mine, state.flats[name]) for name, mine in other.states[0].flats.items())


@pytest.mark.parametrize("settings", _WAYS.values(), ids=_WAYS)
def test_buffers_of_a_forgotten_outer_step_are_used_again(settings: dict[str, Any]) -> None:
    parameter = torch.randn(40)
    loop = _overlapped(settings, parameter)
    loop.rehearse()
    [staging] = loop.share.stagings
    lent = {id(buffers) for buffers in (*staging.work, *staging.kept)}
    _trained(parameter, loop, 9)
    loop.reset()
    staging.synchronize()
    assert {id(buffers) for buffers in (*staging.work, *staging.kept)} == lent
