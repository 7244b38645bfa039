"""Rank placement: groups and nodes."""

import collections
import dataclasses
import functools
import os
import socket
from collections.abc import Hashable, Iterable, Sequence

import torch.distributed as dist

from pier_megatron.errors import PierConfigError

NAMED = 16
"""Groups, nodes and stretches of ranks that a message names one by one. Of more, it names the first and the last ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """Place of one process. Every rank keeps the places of all ranks, so they hold numbers and no lists of ranks.

    Attributes:
        rank: Rank in the launch.
        node: Name of the node it runs on.
        domain: Name of the fast network it is on, see :func:`domain_name`.
        group: Index of its Pier group.
        tensor_parallel: First rank of its tensor-parallel group.
    """

    rank: int
    node: str
    domain: str
    group: int
    tensor_parallel: int


def node_name() -> str:
    """Names the node of this process, the same for all its processes and for no others.

    The launcher's own number comes first: containers on one node may have different host names, and containers on
    different nodes the same.
    """
    for variable in ("GROUP_RANK", "SLURM_NODEID"):
        if variable in os.environ:
            return f"node {os.environ[variable]}"
    return socket.gethostname()


def domain_name(rank: int, node: str, ranks_per_domain: int | None) -> str:
    """Names the fast network of a rank: its node, or its ``ranks_per_domain`` consecutive ranks."""
    return node if ranks_per_domain is None else f"domain {rank // ranks_per_domain}"


def ranks_by_key[K: Hashable](keys: Iterable[K]) -> dict[K, list[int]]:
    """Ranks by key, given each rank's key in order of rank; keys in order of first appearance."""
    ranks: dict[K, list[int]] = collections.defaultdict(list)
    for rank, key in enumerate(keys):
        ranks[key].append(rank)
    return dict(ranks)


class Topology:
    """The ranks of a run, in order, as every rank knows them."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = list(ranks)
        self._members = dict(sorted(ranks_by_key(rank.group for rank in self.ranks).items()))

    @classmethod
    def gather(cls, own: Rank, between: dist.ProcessGroup | None = None) -> "Topology":
        """Collects the positions of all ranks of a launch; called by all of them.

        Args:
            own: Position of this rank.
            between: Communicator of one rank of each group, in group order; None for one group.
        """
        group: list[Rank] = [own] * dist.get_world_size()
        dist.all_gather_object(group, own)
        groups = [group] * (1 if between is None else between.size())
        if between is not None:
            dist.all_gather_object(groups, group, group=between)
        return cls([rank for of_group in groups for rank in of_group])

    def ranks_beside(self, rank: int) -> int:
        """Number of ranks on the node of a rank, itself included, whatever started them."""
        return sum(other.node == self.ranks[rank].node for other in self.ranks)

    def check(self) -> None:
        """Refuses tensor-parallel groups that leave a fast network.

        Raises:
            PierConfigError: With the ranks of one such group and where they are.
        """
        kind = self._kind_of_domain
        for alike in ranks_by_key(rank.tensor_parallel for rank in self.ranks).values():
            domains = {self.ranks[rank].domain for rank in alike}
            if len(domains) > 1:
                where = ", ".join(f"rank {rank} on {self.ranks[rank].domain}" for rank in alike)
                raise PierConfigError(
                    f"--tensor-model-parallel-size {len(alike)}: a tensor-parallel group crosses {kind}s "
                    f"({where}). Tensor parallelism communicates several times in every layer and belongs inside a {kind}: "
                    f"use at most the number of GPUs per {kind}, place the ranks of a group on one {kind}, or say with "
                    "--pier-ranks-per-domain how many consecutive ranks share a fast network."
                )

    @functools.cached_property
    def _kind_of_domain(self) -> str:
        return "node" if all(rank.domain == rank.node for rank in self.ranks) else "domain"

    def groups(self) -> list[int]:
        """Indices of the groups, in order."""
        return list(self._members)

    def members(self, group: int) -> list[int]:
        """Global ranks of a group, in order."""
        return self._members[group]

    def describe(self) -> list[str]:
        """Draws the groups, their nodes and the fast networks that are not nodes, one line per group; few of many groups."""
        groups = self.groups()
        if len(groups) <= NAMED:
            return [self._drawn(group) for group in groups]
        shown = groups[: NAMED // 2]
        return [
            *(self._drawn(group) for group in shown),
            f"and {len(groups) - len(shown) - 1:,} more, to",
            self._drawn(groups[-1]),
        ]

    def _drawn(self, group: int) -> str:
        members = self.members(group)
        nodes = some_of(dict.fromkeys(self.ranks[rank].node for rank in members))
        domains = some_of(dict.fromkeys(self.ranks[rank].domain for rank in members))
        where = nodes if self._kind_of_domain == "node" else f"{domains} ({nodes})"
        return f"group {group}: {'ranks' if len(members) > 1 else 'rank'} {ranges_of(members)} on {where}"


def some_of(names: Iterable[str]) -> str:
    """Writes names one after the other; the first and the last of many."""
    found = list(names)
    if len(found) <= NAMED:
        return ", ".join(found)
    return f"{', '.join(found[: NAMED // 2])}, ... {found[-1]} ({len(found):,} in all)"


def ranges_of(ranks: Sequence[int]) -> str:
    """Writes sorted numbers as ranges, such as ``0-3, 8-11``; the first and the last of many."""
    known = set(ranks)
    starts = [rank for rank in ranks if rank - 1 not in known]
    ends = [rank for rank in ranks if rank + 1 not in known]
    return some_of(f"{start}-{end}" if end > start else f"{start}" for start, end in zip(starts, ends, strict=True))
