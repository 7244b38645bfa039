"""An outer step's arithmetic on a GPU, in Triton: what is sent in one kernel, what is made of what arrives in another.

:mod:`pier_megatron.outer.arithmetic` is their reference. They read and write the parameters where these are, one launch for
each piece. As in :mod:`pier_megatron.exchange.kernels` nothing is specialised by length or alignment, and no product is fused
with a sum.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of one program.
_ELEMENTS = 1024

# Where the new anchor starts from.
_STAYS, _FROM_ANCHOR, _FROM_PARAMETERS = (tl.constexpr(start) for start in range(3))

_PRODUCTS = tl.constexpr(4)


def subtract(pieces: Sequence[Tensor], anchor: Tensor, into: Tensor, counts: bool, weight: float = 1.0) -> None:
    """Computes ``weight * (anchor - parameters)``, or zero for an excluded group.

    Args:
        pieces: Parameters of a chunk in order, float32, of any lengths.
        anchor: Anchor of the chunk, float32 of shape ``[numel]``.
        into: Result, like the anchor.
        counts: Whether the group counts.
        weight: Weight of the group in the mean.
    """
    for piece, begin, _ in _launches(pieces):
        _subtract[_programs(piece)](
            piece,
            anchor,
            into,
            begin,
            len(piece),
            int(counts),
            float(weight),
            ELEMENTS=_ELEMENTS,
            enable_fp_fusion=False,
        )


def descend(
    pieces: Sequence[Tensor],
    anchor: Tensor,
    momentum: Tensor,
    own: Tensor | None,
    shared: Tensor,
    counts: bool,
    counted: int,
    mu: float,
    eta: float,
    is_alone: bool,
) -> Tensor:
    """Takes a step of :class:`pier_megatron.outer.rules.Nesterov`, and writes the parameters.

    Args:
        pieces: Parameters of a chunk in order, float32, of any lengths; changed in place.
        anchor: Anchor of the chunk, float32 of shape ``[numel]``; changed in place.
        momentum: Momentum, like the anchor; changed in place.
        own: Pseudo-gradient of this group, like the anchor, if the parameters keep what they have moved by since it was taken.
            None if they have not moved since: it is computed again, and they become the anchor.
        shared: Sum of what the groups sent, like the anchor.
        counts: Whether this group counts.
        counted: Number of groups in the sum.
        mu: Outer momentum coefficient.
        eta: Outer learning rate.
        is_alone: Whether the sum is what this group sent, and the parameters have not moved since.

    Returns:
        Sums of products over the chunk, float64, as :func:`pier_megatron.outer.arithmetic.descend`.
    """
    launches = list(_launches(pieces))
    rows = sum(triton.cdiv(len(piece), _ELEMENTS) for piece, *_ in launches)
    sums = torch.empty(rows, _PRODUCTS.value, dtype=torch.float32, device=anchor.device)
    start = _STAYS if eta == 0 else _FROM_PARAMETERS if is_alone else _FROM_ANCHOR
    for piece, begin, first in launches:
        _descend[_programs(piece)](
            piece,
            anchor,
            momentum,
            own,
            shared,
            sums,
            begin,
            len(piece),
            first,
            int(counts),
            start.value,
            float(counted),
            float(mu),
            float(1 - eta if is_alone else -eta),
            float(-eta * mu),
            ELEMENTS=_ELEMENTS,
            enable_fp_fusion=False,
        )
    return sums.sum(0, dtype=torch.float64)


def compile_for(device: torch.device) -> None:
    """Compiles every variant of the kernels, by running it."""
    piece, anchor, momentum, own, shared = torch.zeros(5, 1, device=device)
    subtract([piece], anchor, own, counts=True)
    for kept in (None, own):
        descend([piece], anchor, momentum, kept, shared, counts=True, counted=1, mu=0.0, eta=0.0, is_alone=False)


def _launches(pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, int]]:
    """Pieces that are not empty, each with where it begins in the chunk and with the number of programs before it."""
    pieces = [piece for piece in pieces if len(piece)]
    begins = itertools.accumulate(map(len, pieces), initial=0)
    firsts = itertools.accumulate((triton.cdiv(len(piece), _ELEMENTS) for piece in pieces), initial=0)
    return zip(pieces, begins, firsts, strict=False)


def _programs(piece: Tensor) -> tuple[int]:
    return (triton.cdiv(len(piece), _ELEMENTS),)


@triton.jit(do_not_specialize=("begin", "numel", "counts"), do_not_specialize_on_alignment=("parameters", "anchor", "into"))
def _subtract(parameters, anchor, into, begin: tl.int64, numel: tl.int64, counts: tl.int32, weight, ELEMENTS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = place < numel
    difference = tl.load(anchor + begin + place, mask=mask) - tl.load(parameters + place, mask=mask)
    # Not a product with zero, which would keep every nan.
    tl.store(into + begin + place, tl.where(counts != 0, difference * weight, 0.0), mask=mask)


@triton.jit(
    do_not_specialize=("begin", "numel", "first", "counts", "start"),
    do_not_specialize_on_alignment=("parameters", "anchor", "momentum", "own", "shared", "sums"),
)
def _descend(
    parameters,
    anchor,
    momentum,
    own,
    shared,
    sums,
    begin: tl.int64,
    numel: tl.int64,
    first: tl.int64,
    counts: tl.int32,
    start: tl.int32,
    counted,
    mu,
    step,
    momentum_step,
    ELEMENTS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    place = program * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = place < numel
    here = tl.load(parameters + place, mask=mask, other=0.0)
    old = tl.load(anchor + begin + place, mask=mask, other=0.0)
    old_momentum = tl.load(momentum + begin + place, mask=mask, other=0.0)
    total = tl.load(shared + begin + place, mask=mask, other=0.0)
    mean = tl.div_rn(total, tl.zeros_like(total) + counted)
    new_momentum = mean + mu * old_momentum
    base = tl.where(start == _FROM_PARAMETERS, here, old)
    new = tl.where(start == _STAYS, old, base + step * mean + momentum_step * new_momentum)
    if own is None:
        gradient = tl.where(counts != 0, old - here, 0.0)
        here = new
    else:
        gradient = tl.load(own + begin + place, mask=mask, other=0.0)
        # The old anchor less the pseudo-gradient is where the parameters were.
        here += (gradient - old) + new
    tl.store(momentum + begin + place, new_momentum, mask=mask)
    tl.store(anchor + begin + place, new, mask=mask)
    tl.store(parameters + place, here, mask=mask)
    row = sums + (first + program) * _PRODUCTS
    tl.store(row, tl.sum(gradient * gradient))
    tl.store(row + 1, tl.sum(gradient * mean))
    tl.store(row + 2, tl.sum(mean * mean))
    tl.store(row + 3, tl.sum(new_momentum * new_momentum))
