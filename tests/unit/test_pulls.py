"""What a run that pulls slow weights leaves to one that does not."""

from pier_megatron import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer.participants import DrawnParticipants
from pier_megatron.outer.rules import NoLoCoOfDifferences
from pier_megatron.outer.share import Share


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
