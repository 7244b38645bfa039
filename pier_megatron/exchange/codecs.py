"""What a pseudo-gradient looks like on the wire: FP32, BF16, or integers with a scale per block.

Block scaling as in 8-bit optimizers (Dettmers et al., arXiv 2110.02861, section 2.1): the largest magnitude of each block maps
to the largest integer, so one outlier costs precision in its own block only.
"""

import dataclasses

import torch
from torch import Tensor

BLOCK = 128
"""Elements that share a scale. The scale is FP32: 1/32 byte per element, 3 % of INT8's bytes."""

_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Codec:
    """Turns vectors of FP32 into bytes and back.

    Attributes:
        name: As in ``--pier-exchange-dtype``.
        bits: Per element, the scales not counted.
        scaled: Whether each block carries a scale.
    """

    name: str
    bits: int
    scaled: bool

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back what was encoded."""
        return self.bits == 32

    def nbytes(self, numel: int) -> int:
        """Bytes of ``numel`` encoded elements, a multiple of :data:`BLOCK`."""
        return numel * self.bits // 8 + (numel // BLOCK * _SCALE_BYTES if self.scaled else 0)

    def encode(self, vector: Tensor) -> Tensor:
        """Encodes; float32 of shape ``[n]``, n a multiple of :data:`BLOCK`, to uint8 of shape ``[nbytes(n)]``."""
        if not self.scaled:
            return vector.to(torch.bfloat16 if self.bits == 16 else torch.float32).view(torch.uint8)
        blocks = vector.view(-1, BLOCK)
        largest = 2 ** (self.bits - 1) - 1
        scales = blocks.abs().amax(1, keepdim=True) / largest
        # A block of zeros has no scale; what it is divided by does not matter.
        integers = torch.div(blocks, scales.masked_fill(scales == 0, 1.0)).round_().to(torch.int8)
        if self.bits == 4:
            low, high = (integers + 8).view(torch.uint8).view(-1, 2).unbind(1)
            packed = low | (high << 4)
        else:
            packed = integers.view(torch.uint8).flatten()
        return torch.cat([packed, scales.view(torch.uint8).flatten()])

    def decode(self, payload: Tensor) -> Tensor:
        """Decodes; uint8 of shape ``[nbytes(n)]`` to float32 of shape ``[n]``."""
        if not self.scaled:
            return payload.view(torch.bfloat16 if self.bits == 16 else torch.float32).float()
        blocks = len(payload) // (BLOCK * self.bits // 8 + _SCALE_BYTES)
        packed, scales = payload.split([len(payload) - blocks * _SCALE_BYTES, blocks * _SCALE_BYTES])
        if self.bits == 4:
            integers = torch.stack([packed & 15, packed >> 4], 1).view(torch.int8) - 8
        else:
            integers = packed.view(torch.int8)
        # The scales may start at any byte, and a view of another type must not.
        scales = scales.clone().view(torch.float32)
        decoded: Tensor = (integers.view(-1, BLOCK) * scales[:, None]).flatten()
        return decoded


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", bits=32, scaled=False),
        Codec("bf16", bits=16, scaled=False),
        Codec("int8", bits=8, scaled=True),
        Codec("int4", bits=4, scaled=True),
    )
}
