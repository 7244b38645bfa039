"""What a pseudo-gradient looks like on the wire: FP32, BF16, or integers with a scale per block.

Without PyTorch, so that flags and plans know codecs at once; :mod:`pier_megatron.exchange.coding` encodes and decodes.
"""

import dataclasses

BLOCK = 128
"""Elements that share a scale. The scale is FP32: 1/32 byte per element, 3 % of INT8's bytes."""

SCALE_BYTES = 4
"""Bytes of a scale."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """A format of vectors of FP32 as bytes.

    Attributes:
        name: Name in ``--pier-exchange-dtype``.
        bits: Bits per element, the scales not counted.
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
        return numel * self.bits // 8 + (numel // BLOCK * SCALE_BYTES if self.scaled else 0)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", bits=32, scaled=False),
        Codec("bf16", bits=16, scaled=False),
        Codec("int8", bits=8, scaled=True),
        Codec("int4", bits=4, scaled=True),
    )
}
