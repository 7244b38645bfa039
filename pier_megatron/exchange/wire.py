"""What a sum over groups costs, without any of them."""

import dataclasses

from pier_megatron.exchange.codecs import Codec, padded

_FP32 = 4


@dataclasses.dataclass(frozen=True)
class Wire:
    """Bytes and memory of a sum, for each rank.

    Attributes:
        codec: What sums look like on the wire.
        groups: Number of groups that sum, or of sites.
        groups_in_site: Number of groups of each site, which hold the same vectors and carry a part of the sum each.
        is_direct: Whether every group sends all it has to each of the others, in FP32, and sums for itself.
    """

    codec: Codec
    groups: int
    groups_in_site: int = 1
    is_direct: bool = False

    def part_numel(self, numel: int) -> int:
        """Number of elements, out of ``numel``, whose sum each group of a site sends to the other sites."""
        return -(-numel // self.groups_in_site)

    def segment_numel(self, numel: int) -> int:
        """Number of elements, out of ``numel``, that each rank sums for others: whole blocks."""
        return padded(-(-self.part_numel(numel) // self.groups))

    def bytes_between_sites(self, numel: int, exactly: bool = False) -> int:
        """Bytes that each rank sends to other sites; without sites, to other groups.

        A collective is counted by the cost model of a ring: reduce-scatter and all-gather.

        Args:
            numel: Number of elements.
            exactly: Whether they are summed in FP32 and in group order, whatever the codec.
        """
        part, others = self.part_numel(numel), self.groups - 1
        if not others:
            return 0
        if self.is_direct:
            return others * _FP32 * part
        if self.codec.lossless and not exactly:
            return round(2 * others * part * _FP32 / self.groups)
        segment = self.segment_numel(numel)
        return 2 * others * (_FP32 * segment if exactly else self.codec.nbytes(segment))

    def bytes_of_sum(self, numel: int, exactly: bool = False) -> int:
        """Bytes that each rank sends, inside its site too, where the sum is gathered in FP32."""
        return self.bytes_between_sites(numel, exactly) + (self.groups_in_site - 1) * _FP32 * self.part_numel(numel)

    def payload_bytes(self, numel: int) -> int:
        """Memory of a sum of ``numel`` elements while it is under way: sent and received, and the own part in a site."""
        part = self.part_numel(numel)
        own = _FP32 * part if self.groups_in_site > 1 else 0
        if self.groups == 1:
            return own
        if self.is_direct:
            return own + (self.groups - 1) * _FP32 * part
        return own if self.codec.lossless else own + 2 * self.groups * self.codec.nbytes(self.segment_numel(numel))

    def coding_bytes(self, numel: int) -> int:
        """Memory for a moment: a padded copy and what is made of it, to encode or decode, or all parts of a site."""
        part = self.part_numel(numel)
        gathered = self.groups_in_site * _FP32 * part if self.groups_in_site > 1 else 0
        if self.groups == 1 or self.codec.lossless:
            return gathered
        return max(gathered, 2 * _FP32 * self.groups * self.segment_numel(numel))
