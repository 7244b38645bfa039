"""What a pseudo-gradient may look like on the wire: the plugin's codecs, and what was tried in their place.

The latter are not packed into bytes: a coding says what arrives, and how many bits it would take.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pier_megatron.exchange.codecs import BLOCK, CODECS, Codec
from pier_megatron.exchange.coding import decode, encode

_SCALE_BITS = 16
_SPARSE_BLOCK = 4096
# 4096 places, four values, and two scales a block.
_INDEX_BITS, _VALUE_BITS, _SPARSE_SCALES_BITS = 12, 2, 2 * _SCALE_BITS


@dataclasses.dataclass(frozen=True)
class Coding:
    """A lossy way to send vectors.

    Attributes:
        bits: Bits an element, scales included.
        arrives: What arrives of rows; float32 of shape ``[m, n]``.
        feedback: Share of what was dropped that is added to the next vector.
        is_sparse: Whether all groups gather each other's vectors, because a sum of sparse vectors is hardly sparse.
    """

    bits: float
    arrives: Callable[[Tensor], Tensor]
    feedback: float = 1.0
    is_sparse: bool = False

    def bits_sent(self, groups: int) -> float:
        """Bits that a rank sends an element, where an all-reduce in FP32 sends 32: rings, as in the plugin's cost model.

        An all-reduce sends ``2 (G - 1) / G`` vectors, an all-gather ``G - 1``.
        """
        return self.bits * groups / 2 if self.is_sparse else self.bits


def _blocks(arrives: Callable[[Tensor], Tensor], rows: Tensor, block: int) -> Tensor:
    """Applies a function of blocks, of shape ``[m, blocks, block]``, to rows that are filled up with zeros."""
    filled = functional.pad(rows, (0, -rows.shape[1] % block))
    return arrives(filled.view(len(rows), -1, block)).view(len(rows), -1)[:, : rows.shape[1]]


def _of_codec(codec: Codec) -> Coding:
    def arrives(blocks: Tensor) -> Tensor:
        return decode(codec, encode(codec, blocks.view(len(blocks), -1)))

    return Coding(codec.nbytes(BLOCK) * 8 / BLOCK, functools.partial(_blocks, arrives, block=BLOCK))


def _largest(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(2, keepdim=True)


def _mean(blocks: Tensor) -> Tensor:
    return blocks.abs().mean(2, keepdim=True)


def _power(blocks: Tensor) -> Tensor:
    """The power of two that is nearest to the mean, by its logarithm."""
    return torch.exp2(torch.log2(_mean(blocks).clamp(min=1e-30)).round())


def _scaled(bits: int, scale_of: Callable[[Tensor], Tensor], factor: float, scale_bits: int = _SCALE_BITS) -> Coding:
    """Signs times ``factor`` scales, or with two bits times 1/2 and 3/2 of ``factor`` scales."""

    def arrives(blocks: Tensor) -> Tensor:
        scales = factor * scale_of(blocks)
        if scale_bits == _SCALE_BITS:
            scales = scales.bfloat16().float()
        signs = 1 - 2 * blocks.signbit().float()
        if bits == 1:
            return signs * scales
        return signs * torch.where(blocks.abs() < scales, 0.5 * scales, 1.5 * scales)

    return Coding(bits + scale_bits / BLOCK, functools.partial(_blocks, arrives, block=BLOCK))


def _top(number: int, feedback: float) -> Coding:
    """The largest of each block: signs, and two magnitudes at a quarter and three quarters of their range."""

    def arrives(blocks: Tensor) -> Tensor:
        magnitudes, places = blocks.abs().topk(number, dim=2)
        low, high = magnitudes[:, :, -1:], magnitudes[:, :, :1]
        level = torch.where(magnitudes < (low + high) / 2, 0.25, 0.75)
        values = (low + level * (high - low)) * blocks.gather(2, places).sign()
        return torch.zeros_like(blocks).scatter_(2, places, values)

    bits = (number * (_INDEX_BITS + _VALUE_BITS) + _SPARSE_SCALES_BITS) / _SPARSE_BLOCK
    return Coding(bits, functools.partial(_blocks, arrives, block=_SPARSE_BLOCK), feedback, is_sparse=True)


CODINGS = {
    **{name: _of_codec(codec) for name, codec in CODECS.items() if not codec.lossless},
    "1 bit, mean": _scaled(1, _mean, 1.0),
    "1 bit, power of two": _scaled(1, _power, 1.0, scale_bits=8),
    "1 bit, largest / 3": _scaled(1, _largest, 1 / 3),
    "1 bit, 0.7 of the largest": _scaled(1, _largest, 0.7),
    "2 bits, largest / 1.5": _scaled(2, _largest, 1 / 1.5),
    "2 bits, 1.25 means": _scaled(2, _mean, 1.25),
    "SparseLoCo": _top(64, feedback=0.95),
    "MuLoCo": _top(410, feedback=0.9),
}
"""Codings by name; a coding of the plugin's has its codec's name."""
