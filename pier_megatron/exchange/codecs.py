"""What a pseudo-gradient looks like on the wire: FP32, BF16, or a few bits with a scale per block.

Without PyTorch, so that flags and plans know codecs at once; :mod:`pier_megatron.exchange.coding` encodes and decodes.
"""

import dataclasses

BLOCK = 128
"""Elements that share a scale."""


def padded(numel: int) -> int:
    """The least number of whole blocks, in elements, that ``numel`` elements fit in."""
    return -(-numel // BLOCK) * BLOCK


@dataclasses.dataclass(frozen=True)
class Codec:
    """A format of vectors of FP32 as bytes.

    Attributes:
        name: Name in ``--pier-exchange-dtype``.
        bits: Bits per element, the scales not counted.
        scale_bytes: Bytes of the scale of each block: 4 for FP32, 2 for BF16, 0 without scales.
    """

    name: str
    bits: int
    scale_bytes: int = 0

    @property
    def scaled(self) -> bool:
        """Whether each block carries a scale."""
        return self.scale_bytes > 0

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back what was encoded."""
        return self.bits == 32

    @property
    def needs_error_feedback(self) -> bool:
        """Whether so much is dropped that training fails unless it is sent later."""
        return self.bits <= 2

    def nbytes(self, numel: int) -> int:
        """Bytes of ``numel`` encoded elements, a multiple of :data:`BLOCK`."""
        return numel * self.bits // 8 + numel // BLOCK * self.scale_bytes


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", bits=32),
        Codec("bf16", bits=16),
        Codec("int12", bits=12, scale_bytes=4),
        Codec("int8", bits=8, scale_bytes=4),
        Codec("int4", bits=4, scale_bytes=4),
        # An FP32 scale would be a fifth of the bytes of one bit.
        Codec("int2", bits=2, scale_bytes=2),
        Codec("int1", bits=1, scale_bytes=2),
    )
}
