"""Turns vectors of FP32 into a codec's bytes and back: many at once, in as many kernels as one.

Block scaling as in 8-bit optimizers (Dettmers et al., arXiv 2110.02861, section 2.1): the largest magnitude of each block maps
to the largest integer, so one outlier costs precision in its own block only. With one and two bits zero would take a level that
cannot be spared: the levels are the middles between integers, the outer ones half a step below the largest magnitude.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, Codec

# Up to so many bits no level is zero.
_FEW_BITS = 2

_SCALE_TYPES = {2: torch.bfloat16, 4: torch.float32}


def encode(codec: Codec, rows: Tensor) -> Tensor:
    """Encodes each row; float32 of shape ``[m, n]``, n a multiple of :data:`BLOCK`, to uint8 of ``[m, nbytes(n)]``."""
    if not codec.scaled:
        return rows.to(torch.bfloat16 if codec.bits == 16 else torch.float32).contiguous().view(torch.uint8)
    payloads = torch.empty(len(rows), codec.nbytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
    for part, encoded in zip(_parts(codec, payloads), _fused_on_gpu(_quantise, rows.is_cuda)(rows, codec.bits), strict=True):
        part.copy_(encoded)
    return payloads


def decode(codec: Codec, payloads: Tensor) -> Tensor:
    """Decodes each row; uint8 of shape ``[m, nbytes(n)]``, contiguous, to float32 of shape ``[m, n]``."""
    if not codec.scaled:
        return payloads.view(torch.bfloat16 if codec.bits == 16 else torch.float32).float()
    integers, scales = _parts(codec, payloads)
    decoded: Tensor = _fused_on_gpu(_dequantise, payloads.is_cuda)(integers, scales, codec.bits)
    return decoded


def compile_for(codec: Codec, groups: int, device: torch.device) -> None:
    """Compiles, on a GPU, what sums over ``groups`` need: before training, so that it does not end where that fails."""
    for rows in (groups, 1) if codec.scaled and device.type == "cuda" else ():
        decode(codec, encode(codec, torch.zeros(rows, 2 * BLOCK, device=device)))


def _parts(codec: Codec, payloads: Tensor) -> tuple[Tensor, Tensor]:
    """The integers in payloads, uint8, and the scales behind them, as views."""
    blocks = payloads.shape[1] // codec.nbytes(BLOCK)
    integers, scales = payloads.split([blocks * BLOCK * codec.bits // 8, blocks * codec.scale_bytes], dim=1)
    return integers, scales.view(_SCALE_TYPES[codec.scale_bytes])


def _quantise(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    blocks = rows.view(len(rows), -1, BLOCK)
    largest, half = blocks.abs().amax(2), 2 ** (bits - 1)
    if bits <= _FEW_BITS:
        scales = (largest / half).to(torch.bfloat16).float()
        # Rounded to bf16 a scale may be too small for the largest number.
        integers = torch.div(blocks, _or_one(scales)[:, :, None]).floor_().clamp_(-half, half - 1).to(torch.int8)
    else:
        scales = largest / (half - 1)
        integers = torch.div(blocks, _or_one(scales)[:, :, None]).round_().to(torch.int8)
    if bits == 8:
        return integers.view(torch.uint8).view(len(rows), -1), scales
    packed = (integers + half).view(torch.uint8)
    while bits < 8:
        low, high = packed.view(len(rows), -1, 2).unbind(2)
        packed, bits = low | (high << bits), 2 * bits
    return packed, scales


def _dequantise(integers: Tensor, scales: Tensor, bits: int) -> Tensor:
    if bits < 8:
        places = torch.arange(0, 8, bits, dtype=torch.uint8, device=integers.device)
        signed = ((integers[:, :, None] >> places) & (2**bits - 1)).view(torch.int8) - 2 ** (bits - 1)
    else:
        signed = integers.view(torch.int8)
    blocks = signed.reshape(len(integers), -1, BLOCK)
    levels = blocks + 0.5 if bits <= _FEW_BITS else blocks
    decoded: Tensor = (levels * scales[:, :, None]).view(len(integers), -1)
    return decoded


def _or_one(scales: Tensor) -> Tensor:
    """Scales to divide by: a block of zeros has none, and what it is divided by does not matter."""
    return scales.masked_fill(scales == 0, 1.0)


@functools.cache
def _fused_on_gpu[**P, R](function: Callable[P, R], on_gpu: bool) -> Callable[P, R]:
    """A dozen kernels of a pass over memory each become one or two; what the function says is the reference for them."""
    # Otherwise a fused kernel leaves the rounding to bf16 out: integers would be of another scale than the one that is sent.
    return torch.compile(function, dynamic=True, options={"emulate_precision_casts": True}) if on_gpu else function
