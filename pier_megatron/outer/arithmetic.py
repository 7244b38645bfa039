"""What an outer step computes for a chunk: in plain PyTorch, on a CPU by blocks that its cache holds, on a GPU in kernels."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pier_megatron.exchange.coding import needing_a_compiler, runs_kernels
from pier_megatron.outer.rules import Nesterov, OuterRule
from pier_megatron.outer.staging import Part

PRODUCTS = 4
"""Of each chunk, summed over its elements: own * own, own * mean, mean * mean, momentum * momentum."""


def compile_for(device: torch.device) -> None:
    """Compiles the kernels, if there are some for a device."""
    if runs_kernels(device):
        from pier_megatron.outer import kernels

        with needing_a_compiler():
            kernels.compile_for(device)


def subtract(part: Part, counts: bool, rule: OuterRule | None = None, weight: float = 1.0) -> None:
    """Takes the pseudo-gradient, ``own = anchor - parameters``, and writes what is sent.

    Args:
        part: Buffers of a chunk. Where kernels send it at once, ``part.own`` is not written: :func:`descend` does without.
        counts: Whether this group counts; the pseudo-gradient of an excluded one is zero.
        rule: Rule that says what is sent, into ``part.shared``; None to send later.
        weight: Weight of this group's pseudo-gradient in the mean.
    """
    if runs_kernels(part.own.device):
        from pier_megatron.outer import kernels

        if _has_kernels(rule):
            kernels.subtract(part.chunk.pieces, part.anchor, part.shared, counts, weight)
            return
        kernels.subtract(part.chunk.pieces, part.anchor, part.own, counts)
        if rule is not None:
            send(part, rule, weight)
        return
    for block in _blocks(part, rule):
        block.subtract_parameters(block.own)
        if not counts:
            block.own.zero_()  # Not a product with zero, which would keep every nan.
        if rule is not None:
            send(block, rule, weight)


def send(part: Part, rule: OuterRule, weight: float) -> None:
    """Writes what is sent for the pseudo-gradient in ``part.own``; the arguments are those of :func:`subtract`."""
    rule.send(part)
    if weight != 1:
        part.shared.mul_(weight)


def descend(part: Part, rule: OuterRule, size: int, counts: bool, counted: int, keeps_progress: bool) -> Tensor:
    """Takes the step for a sum that has arrived, and writes the parameters.

    Args:
        part: Buffers of a chunk, with the sum in ``part.shared``.
        rule: Rule of the step.
        size: Number of participants.
        counts: Whether this group counts.
        counted: Number of participants that do.
        keeps_progress: Whether the parameters keep what they have moved by since the pseudo-gradient was taken. If not, they
            have not moved, and become the anchor.

    Returns:
        Sums of the :data:`PRODUCTS`, float64 of shape ``[PRODUCTS]``; zeros if the chunk is not counted on this rank.
    """
    is_counted = part.chunk.shards.is_counted
    is_alone = size == 1 and counts and not keeps_progress
    if _has_kernels(rule) and runs_kernels(part.own.device):
        from pier_megatron.outer import kernels

        assert isinstance(rule, Nesterov)
        vectors = (part.anchor, part.momentum, part.own if keeps_progress else None, part.shared)
        sums = kernels.descend(part.chunk.pieces, *vectors, counts, counted, rule.mu, rule.eta, is_alone)
        return sums if is_counted else torch.zeros_like(sums)
    products: list[Tensor] = []
    for block in _blocks(part, rule):
        own, shared, anchor = block.own, block.shared, block.anchor
        rule.combine(block, size, counted)
        # Before the update, which may overwrite what it was computed from.
        pairs = ((own, own), (own, shared), (shared, shared)) if is_counted else ()
        products += [torch.dot(*pair) for pair in pairs]
        if keeps_progress:
            # The old anchor less the pseudo-gradient is where the parameters were: own becomes what they must move by.
            own.sub_(anchor)
        rule.update(block, is_alone)
        if is_counted:
            products.append(torch.dot(block.momentum, block.momentum))
        if keeps_progress:
            block.chunk.move_parameters(own.add_(anchor))
        else:
            block.chunk.set_parameters(anchor)
    if not products:
        return torch.zeros(PRODUCTS, dtype=torch.float64, device=part.own.device)
    return torch.stack(products).view(-1, PRODUCTS).sum(0, dtype=torch.float64)


def warm_up(part: Part, rule: OuterRule) -> None:
    """Takes a step along the own pseudo-gradient, which then is the mean, and moves the anchor to the parameters."""
    for block in _blocks(part, rule):
        block.subtract_parameters(block.shared)
        rule.update(block, is_alone=False)
        block.chunk.copy_parameters_to(block.anchor)


def _has_kernels(rule: OuterRule | None) -> bool:
    # A subclass may take other steps.
    return type(rule) is Nesterov


def _blocks(part: Part, rule: OuterRule | None) -> Iterable[Part]:
    is_cut = part.own.device.type == "cpu" and (rule is None or rule.is_elementwise)
    return part.blocks() if is_cut else (part,)
