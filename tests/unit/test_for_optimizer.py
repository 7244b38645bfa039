"""The outer loop over the parameters of a PyTorch optimizer."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pier_megatron import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer import OuterLoop


def _config() -> PierConfig:
    return PierConfig(train_iters=8, groups=1, preset="pier", sync_interval=2, lazy_start_iters=2)


def test_moments_are_handed_over_and_the_count_of_steps_is_not() -> None:
    # A scalar, of the shape that AdamW's count of its steps has.
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([scale])
    loop = OuterLoop.for_optimizer(optimizer, _config(), GroupExchange())
    assert not list(loop.share.moments.each())
    scale.square().backward()
    optimizer.step()
    state = optimizer.state[scale]
    assert [id(moment) for moment in loop.share.moments.each()] == [id(state["exp_avg"]), id(state["exp_avg_sq"])]


@pytest.mark.parametrize(("rank", "size", "counted"), [(0, 2, 3), (1, 2, 0), (0, 1, 3)])
def test_copies_on_the_ranks_of_a_group_count_once(rank: int, size: int, counted: int) -> None:
    group = mock.Mock(spec=dist.ProcessGroup)
    group.rank.return_value, group.size.return_value = rank, size
    loop = OuterLoop.for_optimizer(torch.optim.SGD([torch.ones(3)]), _config(), GroupExchange(), group=group)
    assert loop.states[0].counted == counted
    assert all(chunk.shards.is_copied is (size > 1) for chunk in loop.states[0].chunks)


def test_parameters_that_are_not_whole_are_refused() -> None:
    class Part(torch.Tensor):
        pass

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3).as_subclass(Part))])
    with pytest.raises(TypeError, match=r"takes whole parameters, but one is a Part.*Shards.*to_local"):
        OuterLoop.for_optimizer(optimizer, _config(), GroupExchange())
