"""Which pseudo-gradients can be used: each group judges its own, and all groups learn all verdicts."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import Exchange
from pier_megatron.outer.outliers import OutlierDetector
from pier_megatron.outer.staging import Staging, chunks_of, one_ahead
from pier_megatron.outer.state import ANCHOR

OverGroup = Callable[[Tensor, "dist.ReduceOp.RedOpType"], None]
"""Reduces a tensor in place over the ranks that share the parameters of this group."""

GOOD, NOT_FINITE, OUTLIER, ABSENT = 1, 0, -1, -2
"""Verdicts on a group's pseudo-gradient; an absent one has none, for it was not there to train."""


class DivergedError(RuntimeError):
    """No group has a pseudo-gradient that can be used: nothing to go on from."""


class Verdicts:
    """What the groups that meet say of their pseudo-gradients of one round.

    Attributes:
        own: That on this group, the same on all its ranks.
    """

    def __init__(self, meeting: Exchange, own: int, device: torch.device) -> None:
        """Begins to collect the verdicts, of which this rank gives its ``own``; waits for none."""
        self._meeting, self.own = meeting, own
        self._under_way = meeting.gather(torch.tensor([own], device=device))
        self._known: tuple[int, ...] | None = None

    def all(self) -> tuple[int, ...]:
        """The verdicts in group order. Waits for all groups that meet."""
        if self._known is None:
            self._known = tuple(self._under_way.result().flatten().tolist())
        return self._known

    def counted(self) -> list[bool]:
        """Which groups count in the mean. Waits for all that meet.

        What is unusual in every group alike (a batch that all found hard) is unusual in none: where nobody is good,
        outliers count.
        """
        found = self.all()
        accepted = GOOD if GOOD in found else OUTLIER
        return [verdict == accepted for verdict in found]

    def own_counts(self) -> bool:
        """Whether this group counts. Waits for the others only if this group is an outlier."""
        return self.own == GOOD or (self.own == OUTLIER and self.counted()[self._meeting.rank])

    def check(self, iteration: int) -> None:
        """Stops a run of which nothing is left after ``iteration``. Waits for all groups that meet.

        Raises:
            DivergedError: If no group counts.
        """
        if any(self.counted()):
            return
        said = ", ".join(f"group {group} not finite" for group in self._meeting.groups)
        raise DivergedError(
            f"After iteration {iteration} no group has a pseudo-gradient that can be used ({said}): the run has diverged and "
            "nothing was synchronised. The last checkpoint is untouched: restart from it, with a lower learning rate or other "
            "data."
        )


class KnownVerdicts(Verdicts):
    """Verdicts that were exchanged before the run was stopped."""

    def __init__(self, meeting: Exchange, of_groups: Sequence[int]) -> None:
        """Takes the verdicts of all groups, in group order, also of those that do not meet."""
        self._meeting, self.own = meeting, of_groups[meeting.groups[meeting.rank]]
        self._known = tuple(of_groups[group] for group in meeting.groups)


class Judge:
    """Finds parameters that are not finite and, if the user wants that, pseudo-gradients that are too long.

    It judges the pseudo-gradients of this group, alike on all ranks that share its parameters.

    Attributes:
        outliers: The history of this group's norms, or None.
    """

    def __init__(
        self,
        config: PierConfig,
        stagings: Sequence[Staging],
        over_group: OverGroup,
        device: torch.device,
    ) -> None:
        """Begins without a history; ``device`` is for its collectives."""
        self.outliers = OutlierDetector(config.outlier_zscore) if config.outlier_zscore is not None else None
        self._stagings, self._over_group, self._device = stagings, over_group, device

    def verdicts(self, fragments: Sequence[int], meeting: Exchange) -> Verdicts:
        """Judges the pseudo-gradient of some fragments, and begins to collect the verdicts of the groups that are met."""
        own, norms = self.judge(fragments)
        verdicts = Verdicts(meeting, own, self._device)
        if self.outliers is not None and norms and verdicts.own_counts():
            for fragment, norm in zip(fragments, norms, strict=True):
                self.outliers.add(norm, fragment)
        return verdicts

    def judge(self, fragments: Sequence[int]) -> tuple[int, list[float]]:
        """The own verdict on the pseudo-gradient of some fragments, and the norms by fragment if they were looked at."""
        finite = torch.ones((), dtype=torch.int32, device=self._device)
        for staging in self._stagings:
            finite *= staging.state.parameters_are_finite()
        self._over_group(finite, dist.ReduceOp.MIN)
        if not finite.item():
            return NOT_FINITE, []
        if self.outliers is None:
            return GOOD, []
        squares = torch.zeros(len(fragments), dtype=torch.float64, device=self._device)
        for staged in one_ahead(staging.lend(chunk, (ANCHOR,)) for staging, chunk in chunks_of(self._stagings, fragments)):
            staged.subtract_parameters()
            if staged.chunk.shards.is_counted:
                squares[fragments.index(staged.chunk.fragment)] += torch.dot(staged.own, staged.own).double()
            staged.give_back()
        self._over_group(squares, dist.ReduceOp.SUM)
        norms: list[float] = squares.sqrt().tolist()
        # Each fragment by its own history, also after the last iteration, when all are due at once.
        found = any(self.outliers.is_outlier(norm, fragment) for norm, fragment in zip(norms, fragments, strict=True))
        return (OUTLIER if found else GOOD), norms
