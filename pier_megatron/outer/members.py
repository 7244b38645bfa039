"""Which groups have to be restarted from their anchor because they were left out of a round.

A group is *healthy*, or it is *left out*: its parameters are not finite, or its pseudo-gradient is too long to be trusted.
It stays left out until the round in which that was seen has ended, is then restarted as a whole (every fragment of its
parameters becomes the anchor, its moments those of a group that counted) and is healthy again. The groups of that round know
all of this; others need not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pier_megatron.exchange.collectives import Exchange

NEVER = -1
"""Iteration of the last restart of a group that has had none."""


def to_restart(meeting: Exchange, counted: Sequence[bool], begun: int, last: int, device: torch.device) -> list[int]:
    """Groups to restart at the end of a round, by their index in the meeting; empty in nearly all. Called by all of them.

    Args:
        meeting: The groups of the round.
        counted: Which of them count in it.
        begun: Iteration after which it began. A group that was restarted since is another one than was judged then.
        last: Iteration at whose end this rank's group was restarted last.
        device: For the collective.
    """
    if all(counted):
        return []
    restarted = meeting.gather(torch.tensor([last], device=device)).result().flatten().tolist()
    return [group for group, counts in enumerate(counted) if not counts and restarted[group] <= begun]


def hand_over(
    moments: Sequence[Tensor], meeting: Exchange, groups: Sequence[int], source: int | None, device: torch.device
) -> None:
    """Gives ``groups`` the inner optimizer's moments of the ``source``; called by all groups of the meeting.

    Args:
        moments: This group's, in the same order in all groups; changed in place in ``groups``.
        meeting: The groups.
        groups: Which take over moments, by their index in the meeting.
        source: Whose; None if there is nobody to take them from, so that moments begin anew.
        device: For the collective.
    """
    numbers = meeting.gather(torch.tensor([len(moments)], device=device)).result()
    if source is None or len(numbers.unique()) > 1:
        # A group that has skipped all its steps so far has no moments to give or to take.
        for moment in moments if meeting.rank in groups else ():
            moment.zero_()
        return
    for moment in moments:
        meeting.broadcast(moment, source, groups)
