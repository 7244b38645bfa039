"""Sites: groups that share a good network meet often inside their site, and all sites rarely over a slow link.

When sites meet, the groups of a site hold the same parameters. Each of them carries an equal part of the sum over the slow
link, and they put the parts together inside the site: a site sends what one group would.
"""

import dataclasses
import datetime
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import CODECS, Codec
from pier_megatron.exchange.collectives import Exchange, Gathered, GroupExchange, Residual, Sum, Wire
from pier_megatron.exchange.encoded import gather_into

_FP32 = 4


@dataclasses.dataclass(frozen=True)
class SiteWire(Wire):
    """What a sum over sites costs; ``groups`` is the number of sites.

    Attributes:
        groups_in_site: Number of groups of each site.
    """

    groups_in_site: int

    @property
    def across(self) -> Wire:
        """What a group of each site sums over the sites, of its part."""
        return Wire(self.codec, self.groups)

    def part_numel(self, numel: int) -> int:
        """Elements of which each group of a site carries the sum, of ``numel`` in all."""
        return -(-numel // self.groups_in_site)

    def bytes_between_sites(self, numel: int, exactly: bool = False) -> int:
        """Bytes that each rank sends over the slow link."""
        return self.across.bytes_of_sum(self.part_numel(numel), exactly)

    def bytes_of_sum(self, numel: int, exactly: bool = False) -> int:
        """Bytes that each rank sends, inside its site too, where the sum is gathered in FP32."""
        return self.bytes_between_sites(numel, exactly) + (self.groups_in_site - 1) * _FP32 * self.part_numel(numel)

    def segment_numel(self, numel: int) -> int:
        """Elements of which each rank computes the sum."""
        return self.across.segment_numel(self.part_numel(numel))

    def payload_bytes(self, numel: int) -> int:
        """Memory of a sum under way: the own part and its payloads."""
        part = self.part_numel(numel)
        return _FP32 * part + self.across.payload_bytes(part)

    def coding_bytes(self, numel: int) -> int:
        """Memory that encoding or decoding the own part takes for a moment, or gathering all parts."""
        part = self.part_numel(numel)
        return max(self.groups_in_site * _FP32 * part, self.across.coding_bytes(part))


class SiteExchange(Exchange):
    """Collectives between sites, each of which is represented by every one of its groups, for a part of the parameters."""

    def __init__(self, across: GroupExchange, inside: GroupExchange) -> None:
        """Takes collectives between one group of each site, and between the groups of this site."""
        super().__init__(across.codec, across.groups, across.rank, SiteWire(across.codec, across.size, inside.size))
        self.across, self.inside = across, inside

    def sum(self, vectors: Sequence[Tensor], residuals: Sequence[Residual | None] = (), exactly: bool = False) -> Sum:
        """Begins to sum vectors, the same in all groups of a site, over the sites; see :meth:`Exchange.sum`."""
        return _SumOfParts(self, vectors, residuals, exactly)

    def gather(self, vector: Tensor) -> Gathered:
        """Begins to collect a short vector of each site."""
        return self.across.gather(vector)

    def broadcast(self, tensor: Tensor, source: int, targets: Sequence[int]) -> None:
        """Copies a tensor of one site to others, each group to its like; see :meth:`Exchange.broadcast`."""
        self.across.broadcast(tensor, source, targets)


class _SumOfParts(Sum):
    def __init__(
        self, exchange: SiteExchange, vectors: Sequence[Tensor], residuals: Sequence[Residual | None], exactly: bool
    ) -> None:
        assert isinstance(exchange.wire, SiteWire)
        self._vectors, self._inside = vectors, exchange.inside
        self._parts = [vector.new_zeros(exchange.wire.part_numel(len(vector))) for vector in vectors]
        rank = self._inside.rank
        carried = [slice(rank * len(part), (rank + 1) * len(part)) for part in self._parts]
        for part, vector, place in zip(self._parts, vectors, carried, strict=True):
            part[: len(vector[place])].copy_(vector[place])
        dropped = [
            residual and Residual(residual.sent[place], residual.reduced)
            for residual, place in zip(residuals, carried, strict=False)
        ]
        self._sum = exchange.across.sum(self._parts, dropped, exactly)

    def advance(self) -> None:
        self._sum.advance()

    def finish(self) -> None:
        self._sum.finish()
        # One after the other: what all of them take at once would be more than the vectors.
        for vector, part in zip(self._vectors, self._parts, strict=True):
            gathered = part.new_empty(self._inside.size, len(part))
            gather_into(gathered, part[None], self._inside.process_group).wait()
            vector.copy_(gathered.view(-1)[: len(vector)])


class SitedExchange(GroupExchange):
    """Collectives between all groups, between those of this site, and between the sites.

    Attributes:
        inside: Collectives between the groups of this site, in FP32.
        between: Collectives between the sites.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, codec: Codec, inside: dist.ProcessGroup, across: dist.ProcessGroup
    ) -> None:
        """Wraps communicators.

        Args:
            process_group: Communicator of one rank of each group, in group order.
            codec: Codec of sums over sites.
            inside: Communicator of those of this site, see :func:`new_site_communicators`.
            across: Communicator of one of each site.
        """
        super().__init__(process_group, codec)
        first = self.rank - inside.rank()
        own_site = range(first, first + inside.size())
        self.inside = GroupExchange(inside, CODECS["fp32"], own_site)
        alike = range(inside.rank(), self.size, inside.size())
        self.between = SiteExchange(GroupExchange(across, codec, alike), self.inside)


def new_site_communicators(
    enumeration: Sequence[Sequence[int]],
    sites: int,
    timeout: datetime.timedelta | None = None,
    description: str | None = None,
    options: tuple[object, object] = (None, None),
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Makes communicators inside and across sites, which are consecutive groups; called by all ranks.

    Args:
        enumeration: Ranks that own the same parameters, one of each group in group order, for all parameters.
        sites: Number of sites.
        timeout: Timeout of their collectives.
        description: What they are called, for messages.
        options: Options of their backends.
    """
    size = len(enumeration[0]) // sites
    inside = [list(peers[begin : begin + size]) for peers in enumeration for begin in range(0, len(peers), size)]
    across = [list(peers[begin::size]) for peers in enumeration for begin in range(size)]
    own: list[dist.ProcessGroup] = []
    for ranks, where, of_backend in zip((inside, across), ("INSIDE_SITES", "BETWEEN_SITES"), options, strict=True):
        label = None if description is None else f"{description}{where}"
        own.append(dist.new_subgroups_by_enumeration(ranks, timeout=timeout, pg_options=of_backend, group_desc=label)[0])
    return own[0], own[1]
