"""Which groups have to be restarted from their anchor because they were excluded from a round.

A group is *healthy*, or it is *excluded*: its parameters are not finite. It stays excluded until the round that saw this ends.
It is then restarted as a whole (every fragment of its parameters becomes the anchor, and it copies the moments of a
participant) and is healthy again. The groups of that round know all of this; others need not.
"""

from collections.abc import Sequence

import torch

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer.rounds import OuterRound
from pier_megatron.outer.share import Moments, Share
from pier_megatron.outer.verdicts import ABSENT

NEVER = -1
"""Iteration of the last restart of a group that has had none."""


class Restarts:
    """Restarts excluded groups, and stops a run in which no group is left to continue from.

    Attributes:
        last: Iteration at whose end this rank's group was restarted last, or :data:`NEVER`.
    """

    def __init__(self, config: PierConfig, groups: int, share: Share) -> None:
        """Begins with a healthy group of ``groups``; ``share`` has the moments of its inner optimizer."""
        self.last = NEVER
        self._interval, self._groups, self._share = config.sync_interval, groups, share

    def check(self, round_: OuterRound, iteration: int) -> None:
        """Stops a run in which no group can continue after ``iteration``. Waits for all participants.

        A subgroup does not know the verdicts of others. If none of its groups is good it restarts, but not twice in a row.

        Raises:
            DivergedError: If no group counts.
        """
        # A round may begin in the iteration of a restart, after it.
        has_tried = self.last != NEVER and 0 <= round_.begun - self.last <= self._interval
        if round_.exchange.size == self._groups or has_tried:
            round_.verdicts.check(iteration)

    def restart_excluded(self, round_: OuterRound, iteration: int) -> list[int]:
        """Hands moments over to groups that were excluded from a round; called by all participants, after each.

        What made the parameters of a group useless is in its moments too, and would make the next ones useless.

        Returns:
            Groups that have to return to their anchor now, by their index among the participants; none in nearly all rounds.
        """
        exchange, counted = round_.exchange, round_.verdicts.counted()
        if all(counted):
            return []
        # Absent groups keep their own moments, and already took the anchor when they joined.
        joined = [group for group, verdict in enumerate(round_.verdicts.all()) if verdict == ABSENT]
        last = exchange.gather(torch.tensor([self.last], device=self._share.device)).result().flatten().tolist()
        # A verdict does not apply to a group that has restarted since its round began.
        restarted = [
            group for group, counts in enumerate(counted) if not counts and group not in joined and last[group] <= round_.begun
        ]
        if restarted:
            source = counted.index(True) if any(counted) else None
            hand_over(self._share.moments, exchange, restarted, source, self._share.device)
        if exchange.rank in restarted:
            self.last = iteration
        return restarted


def hand_over(
    moments: Moments, exchange: GroupExchange, groups: Sequence[int], source: int | None, device: torch.device
) -> None:
    """Gives ``groups`` the inner optimizer's moments of the ``source``; called by all groups of the exchange.

    Args:
        moments: Moments of this group; changed in ``groups``.
        exchange: Collectives between the groups.
        groups: Groups that take over moments, by their index in the exchange.
        source: Group whose moments are copied, or None to restart them at zero.
        device: Device of the collective.
    """
    numbers, is_changed = exchange.gather(torch.tensor([len(moments)], device=device)).result(), exchange.rank in groups
    # A group that has skipped all its steps so far has no moments to give or to take.
    source = source if len(numbers.unique()) == 1 else None
    for moment in moments.each(is_changed) if is_changed or source is not None else ():
        if source is None:
            moment.zero_()
        else:
            exchange.broadcast(moment, source, groups)
