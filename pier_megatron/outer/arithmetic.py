"""What an outer step computes for a chunk, in plain PyTorch."""

import torch
from torch import Tensor

from pier_megatron.outer.rules import OuterRule
from pier_megatron.outer.staging import Staged

PRODUCTS = 4
"""Sums over the elements of each chunk: own * own, own * mean, mean * mean, momentum * momentum."""


def subtract(staged: Staged, counts: bool) -> None:
    """Takes the pseudo-gradient, ``own = anchor - parameters``; zero if this group does not count."""
    staged.subtract_parameters(staged.own)
    if not counts:
        staged.own.zero_()  # Not a product with zero, which would keep every nan.


def send(staged: Staged, rule: OuterRule, weight: float) -> None:
    """Writes what is sent for the pseudo-gradient in ``staged.own``, with this group's ``weight`` in the mean."""
    rule.send(staged)
    if weight != 1:
        staged.shared.mul_(weight)


def descend(staged: Staged, rule: OuterRule, size: int, counts: bool, counted: int, keeps_progress: bool) -> Tensor:
    """Takes the step for a sum that has arrived, and writes the parameters.

    Args:
        staged: Buffers of a chunk, with the sum in ``staged.shared``.
        rule: Rule of the step.
        size: Number of participants.
        counts: Whether this group counts.
        counted: Number of participants that do.
        keeps_progress: Whether the parameters keep what they have moved by since the pseudo-gradient was taken. If not, they
            have not moved, and become the anchor.

    Returns:
        Sums of the :data:`PRODUCTS`, float64 of shape ``[PRODUCTS]``.
    """
    own, shared, anchor, momentum = staged.own, staged.shared, staged.anchor, staged.momentum
    rule.combine(staged, size, counted)
    # Before the update, which may overwrite what it was computed from.
    products = [torch.dot(*pair) for pair in ((own, own), (own, shared), (shared, shared))]
    if keeps_progress:
        # The old anchor less the pseudo-gradient is where the parameters were: own becomes what they must move by.
        own.sub_(anchor)
    rule.update(staged, is_alone=size == 1 and counts and not keeps_progress)
    if keeps_progress:
        staged.chunk.move_parameters(own.add_(anchor))
    else:
        staged.chunk.set_parameters(anchor)
    return torch.stack([*products, torch.dot(momentum, momentum)]).double()


def warm_up(staged: Staged, rule: OuterRule) -> None:
    """Takes a step along the own pseudo-gradient, which then is the mean, and moves the anchor to the parameters."""
    staged.subtract_parameters(staged.shared)
    rule.update(staged, is_alone=False)
    staged.chunk.copy_parameters_to(staged.anchor)
