"""A launch of several groups. To PyTorch each group is a separate world, which knows its own ranks and no others.

Whatever reduces over all ranks reduces over the group, in any script and on any release. What crosses the groups crosses by
the communicators that are made here, outside of PyTorch's default group.
"""

import contextlib
import datetime
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

DESCRIPTION = "PIER_"
"""Prefix of the descriptions of the plugin's own communicators."""

_LONGEST = datetime.timedelta(days=365)


class Launch:
    """The ranks that one launcher has started, divided into groups of consecutive ranks.

    Attributes:
        rank: Rank of this process in the launch.
        size: Number of ranks in the launch.
        groups: Number of groups in it.
    """

    def __init__(self, rank: int, size: int, groups: int = 1, store: Store | None = None) -> None:
        """Takes a place in a launch whose size is a multiple of the number of groups.

        By the ``store`` ranks of different groups find each other; None for one group.
        """
        self.rank, self.size, self.groups, self._store = rank, size, groups, store

    @property
    def ranks_of_group(self) -> int:
        """Number of ranks in a group."""
        return self.size // self.groups

    @property
    def group(self) -> int:
        """Index of the group of this process."""
        return self.rank // self.ranks_of_group

    @property
    def first_of_group(self) -> int:
        """First rank of the group of this process."""
        return self.group * self.ranks_of_group

    @property
    def rank_in_group(self) -> int:
        """Rank of this process in the world of its group."""
        return self.rank % self.ranks_of_group

    @property
    def speaks(self) -> bool:
        """Whether the group prints, and writes what a run has once. Megatron gives the last rank of all its writers."""
        return self.group == self.groups - 1

    @property
    def store(self) -> Store:
        """Store of the launch, which has several groups."""
        assert self._store is not None
        return self._store

    @property
    def store_of_group(self) -> Store:
        """Keys of this group alone; with the launch's, worlds would read each other's."""
        return PrefixStore(f"pier/group_{self.group}", self.store)

    def connect(
        self, name: str, timeout: datetime.timedelta, options: object = None, groups: Sequence[int] | None = None
    ) -> dist.ProcessGroup | None:
        """Connects this rank with the same rank of other groups; called by all of these.

        Args:
            name: Name of the communicator, in messages too.
            timeout: Timeout of its collectives.
            options: ``ProcessGroupNCCL.Options``, or None.
            groups: Indices of the groups, in order; by default, all.

        Returns:
            The communicator; None if there is one group.
        """
        joined = range(self.groups) if groups is None else groups
        if len(joined) == 1:
            return None
        ranks = [group * self.ranks_of_group + self.rank_in_group for group in joined]
        return self._communicator(f"{name}/{ranks[0]}", name, ranks, timeout, options)

    def widened(self, group: dist.ProcessGroup, timeout: datetime.timedelta) -> dist.ProcessGroup:
        """Connects the ranks of a process group with those in their places in all groups, group after group.

        The order is that of a single world of all ranks, so that a sum has the same bits.
        """
        inside = dist.get_process_group_ranks(group)
        ranks = [number * self.ranks_of_group + rank for number in range(self.groups) for rank in inside]
        return self._communicator(f"wide/{zlib.crc32(repr(inside).encode())}", "OVER_GROUPS", ranks, timeout)

    @contextlib.contextmanager
    def first_group_first(self, what: str) -> Iterator[None]:
        """Inside, the first group does something, such as to write files that all read, while the others wait."""
        if self.groups > 1 and self.group:
            self.store.wait([f"pier/{what}"], _LONGEST)
        yield
        if self.groups > 1 and self.rank == 0:
            self.store.set(f"pier/{what}", "done")

    def _communicator(
        self, key: str, name: str, ranks: Sequence[int], timeout: datetime.timedelta, options: Any = None
    ) -> dist.ProcessGroup:
        keys = PrefixStore(f"pier/{key}", self.store)
        place = ranks.index(self.rank), len(ranks)
        group, kinds = dist.ProcessGroup(keys, *place), dist.ProcessGroup.BackendType
        if "nccl" in dist.get_backend():
            options = options or dist.ProcessGroupNCCL.Options()
            options._timeout, options.global_ranks_in_group, options.group_name = timeout, list(ranks), f"pier/{key}"
            backend: Any = dist.ProcessGroupNCCL(keys, *place, options)
            kind, devices = kinds.NCCL, ["cuda"]
        else:
            # By its present name: what stands in for a GPU replaces it.
            backend = distributed_c10d.ProcessGroupGloo(keys, *place, timeout=timeout)
            kind, devices = kinds.GLOO, ["cpu", "cuda"]
        backend._set_sequence_number_for_group()
        group._set_default_backend(kind)
        for device in devices:
            group._register_backend(torch.device(device), kind, backend)
        # PyTorch numbers by the world of this group, in which ranks of others are below zero or beyond its end.
        in_group = [rank - self.first_of_group for rank in ranks]
        _make_known(group, f"pier/{key}", f"{DESCRIPTION}{name}", in_group, keys)
        return group


def _make_known(group: dist.ProcessGroup, name: str, description: str, ranks: Sequence[int], store: Store) -> None:
    """Enters a communicator in PyTorch's tables: errors name it, what lists ranks lists it, and it ends with the others."""
    known = distributed_c10d.GroupName(name)
    group._set_group_name(known)
    group._set_group_desc(description)
    _distributed_c10d._register_process_group(known, group)
    world, backend = distributed_c10d._world, dist.get_backend()
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = known
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(distributed_c10d.Backend(backend)))
    world.pg_to_tag[group] = name
    world.tags_to_pg[name] = [group]
