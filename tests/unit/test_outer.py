"""The flat buffers and their updates against the formulas, on one process."""

import pytest
import torch

from pier_megatron.outer import GroupExchange, OuterState, momentum_warmup, nesterov_step

EXCHANGE = GroupExchange()


def shards(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (5, 1, 17)]


def test_starts_at_the_parameters_without_momentum() -> None:
    state = OuterState(shards())
    torch.testing.assert_close(state.anchor, torch.cat(shards()), rtol=0, atol=0)
    assert not state.momentum.any()
    assert (state.numel, state.unique_numel, state.nbytes) == (23, 23, 8 * 23)


def test_duplicates_come_last_and_do_not_count() -> None:
    first, *rest = shards()
    state = OuterState(rest, [first])
    assert (state.numel, state.unique_numel) == (23, 18)
    torch.testing.assert_close(state.anchor[18:], first)


def test_half_precision_shards_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.bfloat16"):
        OuterState([torch.zeros(3, dtype=torch.bfloat16)])


def test_rank_without_parameters() -> None:
    state = OuterState([])
    nesterov_step(state, EXCHANGE, mu=0.9, eta=0.7, contributors=1)
    assert state.numel == 0
    assert state.parameters_are_finite()


def test_momentum_warmup_does_not_move_the_parameters() -> None:
    parameters = shards()
    state = OuterState(parameters)
    state.momentum.fill_(2.0)
    before = state.anchor.clone()
    for parameter in parameters:
        parameter.add_(0.5)
    momentum_warmup(state, mu=0.9)
    torch.testing.assert_close(state.momentum, torch.full_like(before, 0.9 * 2.0 - 0.5))
    torch.testing.assert_close(state.anchor, torch.cat(parameters), rtol=0, atol=0)
    torch.testing.assert_close(state.anchor, before + 0.5)


def test_outer_step_is_nesterov() -> None:
    parameters = shards()
    state = OuterState(parameters)
    anchor, momentum = state.anchor.clone().double(), torch.linspace(-1, 1, 23)
    state.momentum.copy_(momentum)
    for parameter in parameters:
        parameter.mul_(0.9).add_(0.1)
    delta = anchor - torch.cat(parameters).double()
    own, mean = nesterov_step(state, EXCHANGE, mu=0.9, eta=0.7, contributors=1)
    expected_momentum = 0.9 * momentum.double() + delta
    expected = anchor - 0.7 * (delta + 0.9 * expected_momentum)
    torch.testing.assert_close(state.momentum.double(), expected_momentum, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.anchor.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(parameters), state.anchor, rtol=0, atol=0)
    torch.testing.assert_close(own, mean, rtol=0, atol=0)


def test_unit_step_of_a_single_group_is_the_identity_to_the_last_bit() -> None:
    # (anchor - (anchor - p)) == p does not hold in floating point, for example here.
    anchor, parameter = torch.tensor([1e-3]), torch.tensor([-3.1415926e-8])
    assert anchor - (anchor - parameter) != parameter
    shard = anchor.clone()
    state = OuterState([shard])
    shard.copy_(parameter)
    nesterov_step(state, EXCHANGE, mu=0.0, eta=1.0, contributors=1)
    assert shard == parameter
    assert state.anchor == parameter


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_sees_parameters_that_are_not_finite(value: float) -> None:
    parameters = shards()
    state = OuterState(parameters)
    assert state.parameters_are_finite()
    parameters[2][11] = value
    assert not state.parameters_are_finite()


def test_group_left_out_moves_to_the_others_and_poisons_nothing() -> None:
    parameters = shards()
    state = OuterState(parameters)
    anchor = state.anchor.clone()
    parameters[0].fill_(float("nan"))
    nesterov_step(state, EXCHANGE, mu=0.9, eta=0.7, contributors=1, contributes=False)
    torch.testing.assert_close(state.anchor, anchor)
    torch.testing.assert_close(torch.cat(parameters), anchor)
    assert state.momentum.isfinite().all()


def test_bytes_of_a_ring() -> None:
    exchange = GroupExchange()
    assert exchange.all_reduce_bytes(1000) == 0
    exchange.size = 4
    assert exchange.all_reduce_bytes(1000) == 1500
