"""What a run that pulls slow weights leaves to one that does not."""

import torch

from pier_megatron import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer.pulls import Pulls
from pier_megatron.outer.rules import NoLoCoOfDifferences, rule_at


def test_momentum_that_was_pulled_is_decayed_again_where_nothing_pulls() -> None:
    config = PierConfig(
        train_iters=24, groups=4, sync_interval=4, lazy_start_iters=4, preset="noloco", subgroup_gamma=0.0, fragments=2
    )
    pulls = Pulls(config, [], GroupExchange(), torch.device("cpu"))
    pulls.restart((0, 1))
    for begun, pulled in ((6, {0, 1}), (8, {1}), (10, set()), (12, set())):
        rule = rule_at(config, begun, frozenset(pulls.done))
        assert isinstance(rule, NoLoCoOfDifferences)
        assert rule.pulled == pulled
        pulls.begin(begun, begun)
