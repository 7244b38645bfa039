"""The codecs on a GPU, in Triton: encoding with its error feedback in one kernel, decoding in another.

:mod:`pier_megatron.exchange.coding` is their reference. Nothing is specialised by length or alignment, so that what one call
has compiled fits all others. Products are not fused with sums, which would round once where the reference rounds twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, Codec

_BLOCK = tl.constexpr(BLOCK)

# Blocks of one program: 2048 elements.
_BLOCKS = 16

# What integers and scales are stored as. BF16 is stored as its bits.
_INTEGERS = {16: torch.int16}
_SCALES = {2: torch.int16, 4: torch.float32}

# Added and taken away again, it leaves the nearest integer, of two the even one, where numbers are below 2^22.
_ROUNDS = tl.constexpr(1.5 * 2**23)


def encode(codec: Codec, rows: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Encodes rows; the arguments and the result are those of :func:`pier_megatron.exchange.coding.encode`."""
    rows = rows.contiguous()
    payloads = torch.empty(len(rows), codec.nbytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
    blocks = rows.numel() // BLOCK
    if blocks:
        _encode[_programs(blocks)](
            rows,
            *_views(codec, payloads),
            dropped,
            0 if dropped is None else len(dropped),
            blocks,
            rows.shape[1] // BLOCK,
            BITS=codec.bits,
            SCALE_BYTES=codec.scale_bytes,
            BLOCKS=_BLOCKS,
            enable_fp_fusion=False,
        )
    return payloads


def decode(codec: Codec, payloads: Tensor) -> Tensor:
    """Decodes rows of integers with scales; see :func:`pier_megatron.exchange.coding.decode`."""
    blocks_of_row = payloads.shape[1] // codec.nbytes(BLOCK)
    rows = torch.empty(len(payloads), blocks_of_row * BLOCK, dtype=torch.float32, device=payloads.device)
    blocks = rows.numel() // BLOCK
    if blocks:
        _decode[_programs(blocks)](
            rows,
            *_views(codec, payloads),
            blocks,
            blocks_of_row,
            BITS=codec.bits,
            SCALE_BYTES=codec.scale_bytes,
            BLOCKS=_BLOCKS,
            enable_fp_fusion=False,
        )
    return rows


def _programs(blocks: int) -> tuple[int]:
    return (triton.cdiv(blocks, _BLOCKS),)


def _views(codec: Codec, payloads: Tensor) -> tuple[Tensor, Tensor | None]:
    """Payloads as integers and as scales, from their beginning."""
    flat = payloads.view(-1)
    return flat.view(_INTEGERS.get(codec.bits, torch.uint8)), flat.view(_SCALES[codec.scale_bytes]) if codec.scaled else None


@triton.jit(
    do_not_specialize=("kept", "blocks", "blocks_of_row"),
    do_not_specialize_on_alignment=("rows", "integers", "scales", "dropped"),
)
def _encode(
    rows,
    integers,
    scales,
    dropped,
    kept: tl.int64,
    blocks: tl.int64,
    blocks_of_row: tl.int64,
    BITS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < blocks
    place = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    exact = tl.load(rows + place, mask=is_block[:, None], other=0.0)
    if dropped is not None:
        exact += tl.load(dropped + place, mask=is_block[:, None] & (place < kept), other=0.0)
    if BITS == 16:
        rounded = _bf16(exact)
        tl.store(integers + place, rounded.to(tl.int16), mask=is_block[:, None])
        decoded = _from_bf16(rounded)
    else:
        HALF: tl.constexpr = 2 ** (BITS - 1)
        # Compared as integers, nan is above all numbers.
        largest = tl.max(exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
        if BITS <= 2:
            # A half and a whole are exact.
            stored = _bf16(largest * (1.0 / HALF))
            scale = _from_bf16(stored)
        else:
            scale = tl.div_rn(largest, HALF - 1.0)
            stored = scale
        levels = tl.div_rn(exact, tl.where(scale == 0, 1.0, scale)[:, None] + tl.zeros_like(exact))
        # Nan becomes 0, and its block is still not finite by its scale.
        levels = tl.where(levels == levels, levels, 0.0)
        if BITS <= 2:
            levels = tl.minimum(tl.maximum(tl.floor(levels), -1.0 * HALF), HALF - 1.0)
            decoded = (levels + 0.5) * scale[:, None]
        else:
            levels = (levels + _ROUNDS) - _ROUNDS
            decoded = levels * scale[:, None]
        BYTES: tl.constexpr = _BLOCK * BITS // 8
        # Eight bits are stored as a signed integer, others with half their range added.
        whole = levels.to(tl.int32) + (0 if BITS == 8 else HALF)
        row, column = block // blocks_of_row, block % blocks_of_row
        begin = row * blocks_of_row * (BYTES + SCALE_BYTES)
        byte = (begin + column * BYTES)[:, None]
        if BITS > 8:
            # The low bytes of the block before the bits that are left.
            tl.store(integers + byte + tl.arange(0, _BLOCK)[None, :], whole.to(tl.uint8), mask=is_block[:, None])
            byte += _BLOCK
            whole >>= 8
        PACKED: tl.constexpr = BITS - 8 if BITS > 8 else BITS
        if PACKED < 8:
            parts = tl.reshape(whole, (BLOCKS, _BLOCK * PACKED // 8, 8 // PACKED))
            whole = tl.sum(parts << (tl.arange(0, 8 // PACKED) * PACKED)[None, None, :], axis=2)
        byte += tl.arange(0, _BLOCK * PACKED // 8)[None, :]
        tl.store(integers + byte, whole.to(tl.uint8), mask=is_block[:, None])
        behind = (begin + blocks_of_row * BYTES) // SCALE_BYTES + column
        tl.store(scales + behind, stored.to(scales.dtype.element_ty), mask=is_block)
    if dropped is not None:
        tl.store(dropped + place, exact - decoded, mask=is_block[:, None] & (place < kept))


@triton.jit(do_not_specialize=("blocks", "blocks_of_row"), do_not_specialize_on_alignment=("rows", "integers", "scales"))
def _decode(
    rows,
    integers,
    scales,
    blocks: tl.int64,
    blocks_of_row: tl.int64,
    BITS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    HALF: tl.constexpr = 2 ** (BITS - 1)
    BYTES: tl.constexpr = _BLOCK * BITS // 8
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < blocks
    row, column = block // blocks_of_row, block % blocks_of_row
    begin = row * blocks_of_row * (BYTES + SCALE_BYTES)
    element = tl.arange(0, _BLOCK)
    byte = (begin + column * BYTES)[:, None]
    PACKED: tl.constexpr = BITS - 8 if BITS > 8 else BITS
    behind = (_BLOCK if BITS > 8 else 0) + element * PACKED // 8
    packed = tl.load(integers + byte + behind[None, :], mask=is_block[:, None], other=0).to(tl.int32)
    whole = (packed ^ 128) if BITS == 8 else (packed >> (element * PACKED % 8)[None, :]) & ((1 << PACKED) - 1)
    if BITS > 8:
        whole = (whole << 8) + tl.load(integers + byte + element[None, :], mask=is_block[:, None], other=0).to(tl.int32)
    levels = whole - HALF
    scale = tl.load(scales + (begin + blocks_of_row * BYTES) // SCALE_BYTES + column, mask=is_block, other=0)
    if BITS <= 2:
        decoded = (levels.to(tl.float32) + 0.5) * _from_bf16(scale.to(tl.int32))[:, None]
    else:
        decoded = levels.to(tl.float32) * scale[:, None]
    place = block[:, None] * _BLOCK + element[None, :]
    tl.store(rows + place, decoded, mask=is_block[:, None])


@triton.jit
def _bf16(exact):
    """Bits of the nearest BF16, of two the even one, in int32: Triton's interpreter rounds otherwise."""
    bits = exact.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(exact == exact, rounded, 0x7FC0)


@triton.jit
def _from_bf16(bits):
    return (bits << 16).to(tl.float32, bitcast=True)
