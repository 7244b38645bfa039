"""Which groups count in a round, and which have to be restarted from what the others agree on.

A group is *healthy*, or it is *left out*: its parameters are not finite, or its pseudo-gradient is too long to be trusted.
It stays left out until the round in which that was seen has ended, is then restarted as a whole (every fragment of its
parameters becomes the anchor, its moments those of a group that counted) and is healthy again. All of it follows from the
verdicts that all groups exchange, so every rank knows the same without further talking.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.collectives import GroupExchange


class Members:
    """The groups' recoveries so far: by group, the last iteration at whose end it was ``restarted``."""

    def __init__(self, restarted: Mapping[int, int] | None = None) -> None:
        """Begins with healthy groups, or where a saved run was."""
        self.restarted = dict(restarted or {})

    def to_restart(self, counted: Sequence[bool], begun: int) -> list[int]:
        """Groups to restart at the end of a round; empty in nearly all.

        Args:
            counted: Which groups count in it.
            begun: Iteration after which it began. A group that was restarted since is another one than was judged then.
        """
        return [group for group, counts in enumerate(counted) if not counts and self.restarted.get(group, -1) <= begun]

    def restart(self, groups: Sequence[int], iteration: int) -> None:
        """Takes note of groups that were restarted at the end of ``iteration``."""
        self.restarted |= dict.fromkeys(groups, iteration)


def hand_over(
    moments: Sequence[Tensor], exchange: GroupExchange, groups: Sequence[int], source: int, device: torch.device
) -> None:
    """Gives ``groups`` the inner optimizer's moments of the ``source``; called by all groups.

    Args:
        moments: This group's, in the same order in all groups; changed in place in ``groups``.
        exchange: Between the groups.
        groups: Which take over moments.
        source: Whose.
        device: For the collective.
    """
    numbers = exchange.gather(torch.tensor([len(moments)], device=device)).result()
    if len(numbers.unique()) > 1:
        # A group that has skipped all its steps so far has no moments to give or to take.
        for moment in moments if exchange.rank in groups else ():
            moment.zero_()
        return
    for moment in moments:
        received = moment if exchange.rank in (*groups, source) else torch.empty_like(moment)
        dist.broadcast(received, group=exchange.process_group, group_src=source)
