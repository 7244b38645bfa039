"""Turns vectors of FP32 into a codec's bytes and back: many at once, in as many kernels as one.

Block scaling as in 8-bit optimizers (Dettmers et al., arXiv 2110.02861, section 2.1): the largest magnitude of each block maps
to the largest integer, so one outlier costs precision in its own block only. With one and two bits zero would take a level that
cannot be spared: the levels are the middles between integers, the outer ones half a step below the largest magnitude.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, Codec

# Codes of at most this many bits have no level at zero.
_FEW_BITS = 2

_SCALE_TYPES = {2: torch.bfloat16, 4: torch.float32}

# Codecs that kernels encode on a GPU, by name: others are encoded in plain PyTorch there too.
_WITH_KERNELS = ("bf16", "int12", "int8", "int4", "int2", "int1")


def encode(codec: Codec, rows: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Encodes each row, and what was dropped of earlier ones with them.

    Reference: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv 1901.09847.

    Args:
        codec: Codec of the payloads.
        rows: float32 of shape ``[m, n]``, n a multiple of :data:`BLOCK`; with ``dropped`` contiguous, and it may change.
        dropped: What the codec has dropped of earlier rows, replaced by what it drops now; float32 of shape ``[k]``, of the
            first k elements, behind which there is only padding. None for no error feedback.

    Returns:
        Payloads, uint8 of shape ``[m, codec.nbytes(n)]``.
    """
    if codec.name in _WITH_KERNELS and runs_kernels(rows.device):
        from pier_megatron.exchange import kernels

        return kernels.encode(codec, rows, dropped)
    return encode_plainly(codec, rows, dropped)


def decode(codec: Codec, payloads: Tensor) -> Tensor:
    """Decodes each row; uint8 of shape ``[m, nbytes(n)]``, contiguous, to float32 of shape ``[m, n]``."""
    if codec.name in _WITH_KERNELS and codec.scaled and runs_kernels(payloads.device):
        from pier_megatron.exchange import kernels

        return kernels.decode(codec, payloads)
    return decode_plainly(codec, payloads)


@functools.cache
def runs_kernels(device: torch.device) -> bool:
    """Whether kernels in Triton take the place of plain PyTorch on a device: on a GPU, unless Triton is missing."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def compile_for(codec: Codec, device: torch.device) -> None:
    """Compiles a codec's kernels, if it has some for a device."""
    if codec.name not in _WITH_KERNELS or not runs_kernels(device):
        return
    rows = torch.zeros(1, BLOCK, device=device)
    try:
        for dropped in (None, torch.zeros(BLOCK, device=device)):
            decode(codec, encode(codec, rows, dropped))
    except Exception as error:
        error.add_note(
            "Pier: this was Triton, which compiled Pier's kernels. It needs a C compiler (gcc or clang on the PATH, or in CC) "
            "and Python's headers (Python.h, in packages such as python3-dev) on every node."
        )
        raise


def encode_plainly(codec: Codec, rows: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Encodes in PyTorch's operators, the reference of the kernels; see :func:`encode`."""
    if dropped is not None:
        exact = rows.view(-1)[: len(dropped)]
        exact += dropped
        payloads = encode_plainly(codec, rows)
        torch.sub(exact, decode_plainly(codec, payloads).view(-1)[: len(dropped)], out=dropped)
        return payloads
    if not codec.scaled:
        return rows.to(torch.bfloat16 if codec.bits == 16 else torch.float32).contiguous().view(torch.uint8)
    payloads = torch.empty(len(rows), codec.nbytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
    for part, encoded in zip(_parts(codec, payloads), _quantise(rows, codec.bits), strict=True):
        part.copy_(encoded)
    return payloads


def decode_plainly(codec: Codec, payloads: Tensor) -> Tensor:
    """Decodes in PyTorch's operators, the reference of the kernels; see :func:`decode`."""
    if not codec.scaled:
        return payloads.view(torch.bfloat16 if codec.bits == 16 else torch.float32).float()
    return _dequantise(*_parts(codec, payloads), codec.bits)


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
        integers = torch.div(blocks, _or_one(scales)[:, :, None]).round_().to(torch.int16 if bits > 8 else torch.int8)
    if bits == 8:
        return integers.view(torch.uint8).view(len(rows), -1), scales
    integers += half
    if bits < 8:
        return _packed(integers.view(torch.uint8), bits).view(len(rows), -1), scales
    # The low bytes of a block, then the remaining high bits of its integers.
    parts = ((integers & 255).to(torch.uint8), _packed((integers >> 8).to(torch.uint8), bits - 8))
    return torch.cat([part.view(*largest.shape, -1) for part in parts], dim=2).view(len(rows), -1), scales


def _packed(integers: Tensor, bits: int) -> Tensor:
    """Packs integers of few bits, uint8, into bytes, the first one into the lowest bits."""
    while bits < 8:
        low, high = integers.view(-1, 2).unbind(1)
        integers, bits = low | (high << bits), 2 * bits
    return integers


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Integers of few bits in the bytes of each row, uint8, in a dimension of their own."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    integers: Tensor = (packed[..., None] >> places) & (2**bits - 1)
    return integers


def _dequantise(integers: Tensor, scales: Tensor, bits: int) -> Tensor:
    half = 2 ** (bits - 1)
    if bits > 8:
        low, high = integers.view(*scales.shape, -1).split([BLOCK, BLOCK * (bits - 8) // 8], dim=2)
        signed = low.to(torch.int16) + (_unpacked(high, bits - 8).to(torch.int16) << 8).view(low.shape) - half
    elif bits < 8:
        signed = _unpacked(integers, bits).view(torch.int8) - half
    else:
        signed = integers.view(torch.int8)
    blocks = signed.reshape(len(integers), -1, BLOCK)
    levels = blocks + 0.5 if bits <= _FEW_BITS else blocks
    decoded: Tensor = (levels * scales[:, :, None]).view(len(integers), -1)
    return decoded


def _or_one(scales: Tensor) -> Tensor:
    """Scales to divide by: a block of zeros has none, and what it is divided by does not matter."""
    return scales.masked_fill(scales == 0, 1.0)
