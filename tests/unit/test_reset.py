"""A loop that is reset or restored while an outer step is under way."""

from typing import Any

import pytest
import torch

from pier_megatron import PierConfig
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer import OuterLoop, Shards

_OVERLAPPED: dict[str, dict[str, Any]] = {
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


def _loop(settings: dict[str, Any], parameter: torch.Tensor) -> OuterLoop:
    config = PierConfig(24, groups=1, preset="pier", sync_interval=4, lazy_start_iters=4, overlap=3, **settings)
    return OuterLoop([[Shards([parameter])]], config, GroupExchange(codec=CODECS[config.exchange_dtype]))


@pytest.mark.parametrize("settings", _OVERLAPPED.values(), ids=_OVERLAPPED)
def test_reset_forgets_an_outer_step_under_way(settings: dict[str, Any]) -> None:
    parameter = torch.randn(40)
    loop = _trained(parameter, _loop(settings, parameter), 9)
    loop.reset()
    _trained(parameter, loop, 2)
    [state] = loop.states
    assert not state.momentum.any()
    # As a loop that begins with the same parameters.
    again = parameter.clone()
    other = _loop(settings, again)
    other.reset(loop.iteration)
    other.progress.is_local = True
    loop.reset()
    for trained, of in ((parameter, loop), (again, other)):
        _trained(trained, of, 8)
    torch.testing.assert_close(again, parameter, rtol=0, atol=0)
    assert all(torch.equal(mine, state.flats[name]) for name, mine in other.states[0].flats.items())


@pytest.mark.parametrize("settings", _OVERLAPPED.values(), ids=_OVERLAPPED)
def test_buffers_of_a_forgotten_outer_step_are_used_again(settings: dict[str, Any]) -> None:
    parameter = torch.randn(40)
    loop = _loop(settings, parameter)
    loop.rehearse()
    [staging] = loop.share.stagings
    lent = {id(buffers) for buffers in (*staging.work, *staging.kept)}
    _trained(parameter, loop, 9)
    loop.reset()
    staging.synchronize()
    assert {id(buffers) for buffers in (*staging.work, *staging.kept)} == lent
