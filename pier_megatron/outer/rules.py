"""Outer rules: what a group sends when groups meet, and what it does with what arrives.

A rule is all that distinguishes one outer optimizer from another. When groups meet, which pieces travel, who is left out and
what happens to the progress of a group meanwhile is the business of :mod:`pier_megatron.outer.rounds`, whatever the rule.
"""

import dataclasses
from typing import ClassVar, Protocol

import torch

from pier_megatron.outer.staging import OWN, Staged
from pier_megatron.outer.state import ANCHOR


class OuterRule(Protocol):
    """One outer step's update, chunk by chunk.

    Attributes:
        has_common_anchor: Whether all groups hold the same anchor afterwards.
        sent_of: Names of what :meth:`send` reads.
    """

    has_common_anchor: ClassVar[bool]
    sent_of: ClassVar[tuple[str, ...]]

    def send(self, staged: Staged) -> None:
        """Writes what this group sends to ``staged.shared``.

        Args:
            staged: Buffers, with this group's pseudo-gradient in ``staged.own``; zero if the group is excluded.
        """

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Turns the sum in ``staged.shared`` into the direction that this group descends along.

        Args:
            staged: Buffers, with the sum over the participants of what they sent in ``staged.shared``.
            size: Number of participants.
            counted: Number of participants that are not excluded.
        """

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Updates ``staged.anchor`` and ``staged.momentum``.

        Args:
            staged: Buffers, with what :meth:`combine` has left in ``staged.shared``.
            is_alone: Whether that is what this group sent, and the parameters have not moved since.
        """


@dataclasses.dataclass(frozen=True)
class Nesterov:
    """Nesterov momentum in PyTorch's form on the mean pseudo-gradient; arXiv 2311.08105, section 2.

    ``momentum = mu * momentum + delta``, ``anchor = anchor - eta * (delta + mu * momentum)`` with
    ``delta = mean(anchor - parameters)``.

    Attributes:
        mu: Outer momentum coefficient.
        eta: Outer learning rate.
    """

    mu: float
    eta: float
    has_common_anchor: ClassVar[bool] = True
    sent_of: ClassVar[tuple[str, ...]] = (OWN,)

    def send(self, staged: Staged) -> None:
        """Sends the pseudo-gradient; see :meth:`OuterRule.send`."""
        staged.shared.copy_(staged.own)

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Takes the mean over groups that are not excluded; see :meth:`OuterRule.combine`."""
        staged.shared.div_(counted)

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step; see :meth:`OuterRule.update`."""
        delta, anchor, momentum = staged.shared, staged.anchor, staged.momentum
        torch.add(delta, momentum, alpha=self.mu, out=momentum)
        if is_alone:
            # A single group knows the mean of the parameters exactly. anchor - (anchor - parameters) loses its last bits,
            # and eta = 1, mu = 0 must be the identity.
            staged.chunk.copy_parameters_to(anchor)
            anchor.add_(delta, alpha=1 - self.eta)
        else:
            anchor.add_(delta, alpha=-self.eta)
        anchor.add_(momentum, alpha=-self.eta * self.mu)


@dataclasses.dataclass(frozen=True)
class NoLoCo:
    """Heavy-ball momentum among a few participants; arXiv 2506.10911, equations 2 and 3 with the sign of its equation 32.

    ``momentum = alpha * momentum + anchor - mean(parameters)``, ``anchor = anchor - beta * momentum``: the paper's ``delta``
    is ``-beta * momentum``, and its gamma is beta, so that pseudo-gradients and anchors need not cross apart. A group that does
    not count is taken for one that has not moved.

    Attributes:
        alpha: Outer momentum coefficient.
        beta: Outer learning rate.
    """

    alpha: float
    beta: float
    has_common_anchor: ClassVar[bool] = False
    sent_of: ClassVar[tuple[str, ...]] = (OWN, ANCHOR)

    def send(self, staged: Staged) -> None:
        """Sends the parameters."""
        torch.sub(staged.anchor, staged.own, out=staged.shared)

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Takes the distance to the mean of the parameters."""
        torch.sub(staged.anchor, staged.shared, alpha=1 / size, out=staged.shared)

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step."""
        torch.add(staged.shared, staged.momentum, alpha=self.alpha, out=staged.momentum)
        staged.anchor.add_(staged.momentum, alpha=-self.beta)


@dataclasses.dataclass(frozen=True)
class NoLoCoOfDifferences(NoLoCo):
    """The same with any gamma, or in few bits, which only differences survive: pseudo-gradients cross, and slow weights ahead.

    ``momentum = alpha * momentum + gamma / beta * (anchor - mean(anchor)) + mean(anchor - parameters)``; what the slow weights
    say has been taken into the momentum by :class:`pier_megatron.outer.pulls.Pull` before.

    Attributes:
        pulled: Fragments for which it has been, alpha included.
    """

    pulled: frozenset[int]
    sent_of: ClassVar[tuple[str, ...]] = (OWN,)

    def send(self, staged: Staged) -> None:
        """Sends the pseudo-gradient."""
        staged.shared.copy_(staged.own)

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Takes the mean over the groups that met."""
        staged.shared.div_(size)

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step."""
        alpha = 1.0 if staged.chunk.fragment in self.pulled else self.alpha
        torch.add(staged.shared, staged.momentum, alpha=alpha, out=staged.momentum)
        staged.anchor.add_(staged.momentum, alpha=-self.beta)
