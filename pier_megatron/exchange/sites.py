"""Sites: groups that share a good network meet often inside their site, and all sites rarely over a slow link.

When sites meet, the groups of a site hold the same parameters. Each of them carries an equal part of the sum over the slow
link, and they put the parts together inside the site: a site sends what one group would.
"""

import datetime
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.collectives import GroupExchange, Residual, Sum, SumOfParts
from pier_megatron.exchange.wire import Wire


class SiteExchange(GroupExchange):
    """Collectives between sites; every group of a site sends and receives its part of the parameters.

    Attributes:
        inside: Collectives between the groups of this site, in FP32.
    """

    def __init__(self, everyone: GroupExchange, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
        """Takes communicators, see :func:`new_site_communicators`; ``everyone`` has the codec of sums over sites."""
        super().__init__(across, everyone.codec, range(inside.rank(), everyone.size, inside.size()))
        first = everyone.rank - inside.rank()
        self.inside = GroupExchange(inside, groups=range(first, first + inside.size()))
        self.wire = Wire(self.codec, self.size, groups_in_site=self.inside.size)

    def sum(self, vectors: Sequence[Tensor], residuals: Sequence[Residual | None] = (), exactly: bool = False) -> Sum:
        """Begins to sum vectors, the same in all groups of a site, over the sites; see :meth:`GroupExchange.sum`."""
        assert self.inside.process_group is not None
        return SumOfParts(super().sum, self.inside.process_group, vectors, residuals, exactly)


def new_site_communicators(
    enumeration: Sequence[Sequence[int]],
    sites: int,
    timeout: datetime.timedelta | None = None,
    description: str | None = None,
    options: tuple[object, object] = (None, None),
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Makes communicators inside and across sites, which are consecutive groups; called by all ranks.

    The enumeration has the ranks that own the same parameters, one of each group in group order, for all parameters. Messages
    call the communicators by their description.
    """
    size = len(enumeration[0]) // sites
    inside = [list(peers[begin : begin + size]) for peers in enumeration for begin in range(0, len(peers), size)]
    across = [list(peers[begin::size]) for peers in enumeration for begin in range(size)]
    own: list[dist.ProcessGroup] = []
    for ranks, where, of_backend in zip((inside, across), ("INSIDE_SITES", "BETWEEN_SITES"), options, strict=True):
        label = None if description is None else f"{description}{where}"
        own.append(dist.new_subgroups_by_enumeration(ranks, timeout=timeout, pg_options=of_backend, group_desc=label)[0])
    return own[0], own[1]
