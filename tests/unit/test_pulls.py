"""Slow weights that cross ahead: what a run that pulls leaves to one that does not, and memory."""

from unittest import mock

import pytest
import torch

from pier_megatron import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer import OuterLoop, Shards
from pier_megatron.outer.memory import wire_of
from pier_megatron.outer.participants import DrawnParticipants, Participants
from pier_megatron.outer.rules import NoLoCoOfDifferences
from pier_megatron.outer.share import Share
from pier_megatron.outer.staging import Staging


def test_momentum_that_was_pulled_is_decayed_again_where_nothing_pulls() -> None:
    config = PierConfig(
        train_iters=24, groups=4, sync_interval=4, lazy_start_iters=4, preset="noloco", subgroup_gamma=0.0, fragments=2
    )
    participants = DrawnParticipants(config, Share([], config), GroupExchange(groups=(0,)))
    participants.pulls.restart((0, 1))
    for begun, pulled in ((6, {0, 1}), (8, {1}), (10, set()), (12, set())):
        rule = participants.rule_at(begun)
        assert isinstance(rule, NoLoCoOfDifferences)
        assert rule.pulled == pulled
        participants.pulls.begin(begun, begun)


@pytest.mark.parametrize("left", range(1, 8))
def test_a_short_last_interval_takes_no_more_memory(left: int) -> None:
    """Slow weights that have fewer iterations for their way than others: no more of them are on it at a time."""
    config = PierConfig(
        train_iters=24 + left, groups=2, sync_interval=8, lazy_start_iters=8, preset="noloco", subgroup_gamma=0.9
    )
    with (
        mock.patch.object(PierConfig, "chunk_numel_on", return_value=4),
        mock.patch.object(DrawnParticipants, "at", Participants.at),
    ):
        exchange = GroupExchange()
        exchange.wire = wire_of(config)
        loop = OuterLoop([[Shards([torch.randn(120)])]], config, exchange)
        loop.rehearse()
        with mock.patch.object(Staging, "_new", side_effect=AssertionError("a buffer is taken late")):
            for _ in range(config.train_iters):
                loop.skip_iteration()
