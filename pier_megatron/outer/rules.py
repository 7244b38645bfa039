"""Outer rules: what a group sends when groups meet, and what it does with what arrives.

A rule is all that distinguishes one outer optimizer from another. When groups meet, which pieces travel, who is left out and
what happens to the progress of a group meanwhile is the business of :mod:`pier_megatron.outer.rounds`, whatever the rule.
"""

import dataclasses
from typing import ClassVar, Protocol

import torch

from pier_megatron.config import PierConfig
from pier_megatron.outer.staging import Staged


class OuterRule(Protocol):
    """One outer step's update, chunk by chunk.

    Attributes:
        has_common_anchor: Whether all groups hold the same anchor afterwards.
    """

    has_common_anchor: ClassVar[bool]

    def send(self, staged: Staged) -> None:
        """Writes what this group sends to ``staged.shared``, given its pseudo-gradient in ``staged.own``."""

    def receive(self, staged: Staged, is_alone: bool) -> None:
        """Updates ``staged.anchor`` and ``staged.momentum``.

        Args:
            staged: With the mean over the groups of what they sent in ``staged.shared``.
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

    def send(self, staged: Staged) -> None:
        """Sends the pseudo-gradient."""
        staged.shared.copy_(staged.own)

    def receive(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step."""
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


def rule_at(config: PierConfig, iteration: int) -> OuterRule:
    """The rule of the outer step that begins after ``iteration`` (1-based)."""
    return Nesterov(config.momentum_at(iteration), config.learning_rate_at(iteration))
