"""Which pseudo-gradients can be used: each group judges its own, and all groups learn all verdicts."""

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import Exchange
from pier_megatron.exchange.topology import NAMED
from pier_megatron.outer.outliers import OutlierDetector
from pier_megatron.outer.share import Share
from pier_megatron.outer.staging import one_ahead
from pier_megatron.outer.state import ANCHOR

GOOD, NOT_FINITE, OUTLIER, ABSENT = 1, 0, -1, -2
"""Verdicts on a group's pseudo-gradient; an absent one has none, for it was not there to train."""


class DivergedError(RuntimeError):
    """No group has a pseudo-gradient that can be used: no group to continue from."""


class Verdicts:
    """Verdicts of the participants of one round on their pseudo-gradients.

    Attributes:
        own: Verdict on this group, the same on all its ranks.
    """

    def __init__(self, exchange: Exchange, own: int, device: torch.device) -> None:
        """Begins to collect the verdicts, of which this rank gives its ``own``; waits for none."""
        self._exchange, self.own = exchange, own
        self._under_way = exchange.gather(torch.tensor([own], device=device))
        self._known: tuple[int, ...] | None = None

    def all(self) -> tuple[int, ...]:
        """The verdicts in group order. Waits for all participants."""
        if self._known is None:
            self._known = tuple(self._under_way.result().flatten().tolist())
        return self._known

    def counted(self) -> list[bool]:
        """Which groups count in the mean. Waits for all participants.

        What is unusual in every group alike (a batch that all found hard) is unusual in none: where nobody is good,
        outliers count.
        """
        return self._counted

    @functools.cached_property
    def _counted(self) -> list[bool]:
        # Asked for with every chunk.
        found = self.all()
        accepted = GOOD if GOOD in found else OUTLIER
        return [verdict == accepted for verdict in found]

    def own_counts(self) -> bool:
        """Whether this group counts. Waits for the others only if this group is an outlier."""
        return self.own == GOOD or (self.own == OUTLIER and self.counted()[self._exchange.rank])

    def check(self, iteration: int) -> None:
        """Stops a run in which no group can continue after ``iteration``. Waits for all participants.

        Raises:
            DivergedError: If no group counts.
        """
        if any(self.counted()):
            return
        groups = self._exchange.groups
        said = (
            ", ".join(f"group {group} not finite" for group in groups)
            if len(groups) <= NAMED
            else f"all {len(groups):,} groups not finite"
        )
        raise DivergedError(
            f"After iteration {iteration} no group has a pseudo-gradient that can be used ({said}): the run has diverged and "
            "nothing was synchronised. The last checkpoint is untouched: restart from it, with a lower learning rate or other "
            "data."
        )


class KnownVerdicts(Verdicts):
    """Verdicts that were exchanged before the run was stopped."""

    def __init__(self, exchange: Exchange, of_groups: Sequence[int]) -> None:
        """Takes the verdicts of all groups, in group order, also of those that do not meet."""
        self._exchange, self.own = exchange, of_groups[exchange.groups[exchange.rank]]
        self._known = tuple(of_groups[group] for group in exchange.groups)


class Judge:
    """Finds parameters that are not finite and, if the user wants that, pseudo-gradients that are too long.

    It judges the pseudo-gradients of this group, alike on all ranks that share its parameters.

    Attributes:
        outliers: The history of this group's norms, or None.
    """

    def __init__(self, config: PierConfig, share: Share) -> None:
        """Begins without a history, over the ``share`` of this rank."""
        self.outliers = OutlierDetector(config.outlier_zscore) if config.outlier_zscore is not None else None
        self._share = share

    def verdicts(self, fragments: Sequence[int], exchange: Exchange) -> Verdicts:
        """Judges the pseudo-gradient of some fragments, and begins to collect the verdicts of the groups that are met."""
        own, norms = self.judge(fragments)
        verdicts = Verdicts(exchange, own, self._share.device)
        if self.outliers is not None and norms and verdicts.own_counts():
            for fragment, norm in zip(fragments, norms, strict=True):
                self.outliers.add(norm, fragment)
        return verdicts

    def judge(self, fragments: Sequence[int]) -> tuple[int, list[float]]:
        """The own verdict on the pseudo-gradient of some fragments, and the norms by fragment if they were looked at."""
        finite = torch.ones((), dtype=torch.int32, device=self._share.device)
        for state in self._share.states:
            finite *= state.parameters_are_finite()
        self._share.over_group(finite, dist.ReduceOp.MIN)
        if not finite.item():
            return NOT_FINITE, []
        if self.outliers is None:
            return GOOD, []
        squares = torch.zeros(len(fragments), dtype=torch.float64, device=self._share.device)
        for staged in one_ahead(staging.lend(chunk, (ANCHOR,)) for staging, chunk in self._share.chunks(fragments)):
            staged.subtract_parameters(staged.own)
            if staged.chunk.shards.is_counted:
                squares[fragments.index(staged.chunk.fragment)] += torch.dot(staged.own, staged.own).double()
            staged.give_back()
        self._share.over_group(squares)
        norms: list[float] = squares.sqrt().tolist()
        # Each fragment by its own history, also after the last iteration, when all are due at once.
        found = any(self.outliers.is_outlier(norm, fragment) for norm, fragment in zip(norms, fragments, strict=True))
        return (OUTLIER if found else GOOD), norms
