"""Which pseudo-gradients can be used, and how far they reach: each group judges its own, and all groups learn of all."""

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.topology import NAMED
from pier_megatron.outer.share import Share

GOOD, NOT_FINITE, ABSENT, NOT_MET = 1, 0, -1, -2
"""Verdicts on a group's pseudo-gradient; an absent one has none, for it was not there to train, nor one that was not met."""


class DivergedError(RuntimeError):
    """No group has a pseudo-gradient that can be used: no group to continue from."""


class Verdicts:
    """What the participants of one round say of their pseudo-gradients.

    Attributes:
        weights: What each pseudo-gradient weighs in the mean, 1 on average of those that count; None if all weigh the same.
    """

    weights: Sequence[float] | None = None

    def __init__(self, exchange: GroupExchange, own: int, lengths: Tensor, known: tuple[int, ...] | None = None) -> None:
        """Sends what this group says, and begins to collect the others; waits for none.

        Args:
            exchange: Collectives between the participants.
            own: Verdict of this group.
            lengths: Those of its matrices, see :attr:`lengths`.
            known: Verdicts of all, of a round whose sum has arrived: nothing is sent, and ``lengths`` are those of all.
        """
        self._exchange, self._known = exchange, known
        if known is None:
            # In one vector: two collectives would wait for each other.
            self._under_way = exchange.gather(torch.nn.functional.pad(lengths, (1, 0), value=own))
        if known is not None or not len(lengths):
            self.lengths = lengths  # There is nothing to wait for.

    def all(self) -> tuple[int, ...]:
        """The verdicts in group order. Waits for all participants."""
        if self._known is None:
            self._known = tuple(map(int, self._under_way.on_host()[:, 0].tolist()))
        return self._known

    @functools.cached_property
    def lengths(self) -> Tensor:
        """How far the groups that count have moved each matrix, weighted root mean square; float32, shape ``[matrices]``.

        Waits for all participants if there are any matrices.
        """
        squares = self._under_way.result()[:, 1:].double().square()
        if self.weights is not None:
            squares *= squares.new_tensor(self.weights).unsqueeze(1)
        return squares.sum(0).div(sum(self.counted)).sqrt().float()

    @functools.cached_property
    def counted(self) -> list[bool]:
        """Which groups count in the mean. Waits for all participants."""
        return [verdict == GOOD for verdict in self.all()]

    def check(self, iteration: int) -> None:
        """Stops a run in which no group can continue after ``iteration``. Waits for all participants.

        Raises:
            DivergedError: If no group counts.
        """
        if any(self.counted):
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


def own_verdict(share: Share) -> int:
    """Returns the verdict on this group's pseudo-gradient, the same on all ranks that share its parameters."""
    finite = torch.ones((), dtype=torch.int32, device=share.device)
    for state in share.states:
        finite *= state.parameters_are_finite()
    share.over_group(finite, dist.ReduceOp.MIN)
    return GOOD if finite.item() else NOT_FINITE
