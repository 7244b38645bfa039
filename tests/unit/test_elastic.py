"""An island that takes over from another one which is lost before both have taken the outer step."""

import datetime
from collections.abc import Sequence

import pytest
import torch

from pier_megatron import PierConfig, PierConfigError
from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import Gathered, GroupExchange, Residual, Sum
from pier_megatron.exchange.membership import Outcome
from pier_megatron.outer import OuterLoop, Shards
from pier_megatron.outer.elastic import ElasticMembership, LeftBehindError
from pier_megatron.outer.verdicts import GOOD


class _Lost(GroupExchange):
    """Two islands, of which the other is due to take an outer step, hands over all of its state and then dies."""

    def __init__(self) -> None:
        super().__init__(codec=CODECS["fp32"])
        self.size, self.groups = 2, (0, 1)

    def gather(self, vector: torch.Tensor) -> Gathered:
        standing = torch.tensor([1, 4, 8, 1, 0, 4, 0])
        return Gathered(torch.stack([vector, standing if len(vector) == len(standing) else torch.full_like(vector, GOOD)]))

    def broadcast(self, tensor: torch.Tensor, source: int, targets: Sequence[int]) -> None:
        tensor.fill_(1.0)

    def sum(self, vectors: Sequence[torch.Tensor], residuals: Sequence[Residual | None] = (), exactly: bool = False) -> Sum:
        raise RuntimeError("the other island died")


class _Membership:
    """The other island is there once."""

    def __init__(self) -> None:
        self.quorums: list[GroupExchange] = []

    def meet(self, within: datetime.timedelta) -> GroupExchange:
        self.quorums.append(GroupExchange(codec=CODECS["fp32"]) if self.quorums else _Lost())
        return self.quorums[-1]

    def agree(self, exchange: GroupExchange | None, outcome: Outcome) -> Outcome:
        return outcome


def test_anchor_of_an_island_that_was_lost_is_not_taken_for_the_own_one() -> None:
    config = PierConfig(
        train_iters=20, groups=2, sync_interval=4, lazy_start_iters=0, preset="diloco", lighthouse="http://other"
    )
    membership = _Membership()
    joins = OuterLoop(
        [[Shards([torch.randn(10)])]], config, GroupExchange(), islands=ElasticMembership(membership, own=0, wait_seconds=60)
    )
    with pytest.raises(LeftBehindError, match="Island 0 lost those whose anchor it was to take over"):
        joins.join()
    assert len(membership.quorums) == 2


def test_loop_without_islands_has_nobody_to_join() -> None:
    config = PierConfig(train_iters=20, groups=1, sync_interval=4, lazy_start_iters=0)
    alone = OuterLoop([[Shards([torch.randn(10)])]], config, GroupExchange())
    with pytest.raises(PierConfigError, match=r"join\(\) meets elastic islands.*without them.*islands=ElasticMembership"):
        alone.join()
    assert alone.iteration == 0
