"""Which pseudo-gradients can be used: each group judges its own, and all groups learn all verdicts."""

from collections.abc import Sequence

import torch

from pier_megatron.exchange.collectives import GroupExchange

GOOD, NOT_FINITE, OUTLIER = 1, 0, -1
"""Verdicts on a group's pseudo-gradient."""


class DivergedError(RuntimeError):
    """No group has a pseudo-gradient that can be used: nothing to go on from."""


class Verdicts:
    """What all groups say of their pseudo-gradients of one round."""

    def __init__(self, exchange: GroupExchange, own: int, device: torch.device) -> None:
        """Begins to collect the verdicts, without waiting for them.

        Args:
            exchange: Collectives between the groups.
            own: On this group's pseudo-gradient, the same on all its ranks.
            device: For the collective.
        """
        self._rank, self._own = exchange.rank, own
        self._under_way = exchange.gather(torch.tensor([own], device=device))
        self._known: tuple[int, ...] | None = None

    def all(self) -> tuple[int, ...]:
        """The verdicts in group order. Waits for all groups."""
        if self._known is None:
            self._known = tuple(self._under_way.result().flatten().tolist())
        return self._known

    def counted(self) -> list[bool]:
        """Which groups count in the mean. Waits for all groups.

        What is unusual in every group alike (a batch that all found hard) is unusual in none: where nobody is good,
        outliers count.
        """
        found = self.all()
        accepted = GOOD if GOOD in found else OUTLIER
        return [verdict == accepted for verdict in found]

    def own_counts(self) -> bool:
        """Whether this group counts. Waits for the others only if this group is an outlier."""
        return self._own == GOOD or (self._own == OUTLIER and self.counted()[self._rank])

    def check(self, iteration: int) -> None:
        """Stops a run of which nothing is left. Waits for all groups.

        Args:
            iteration: Iterations completed.

        Raises:
            DivergedError: If no group counts.
        """
        if any(self.counted()):
            return
        said = ", ".join(f"group {group} not finite" for group in range(len(self.all())))
        raise DivergedError(
            f"After iteration {iteration} no group has a pseudo-gradient that can be used ({said}): the run has diverged and "
            "nothing was synchronised. The last checkpoint is untouched: restart from it, with a lower learning rate or other "
            "data."
        )


class KnownVerdicts(Verdicts):
    """Verdicts that were exchanged before the run was stopped."""

    def __init__(self, exchange: GroupExchange, verdicts: Sequence[int]) -> None:
        """Takes the verdicts of all groups, in group order."""
        self._rank, self._own, self._known = exchange.rank, verdicts[exchange.rank], tuple(verdicts)
