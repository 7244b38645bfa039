"""Which island this rank is in, where groups are separate Megatron worlds: its place, and the groups that reach beyond it.

Nothing of PyTorch's or Megatron's is replaced here; that is :mod:`pier_megatron.integration.island_world`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate

import torch.distributed as dist

from pier_megatron.exchange.topology import DESCRIPTION


@dataclasses.dataclass(frozen=True)
class Island:
    """The island of this rank, and the process groups that reach beyond it.

    Attributes:
        index: Number of the island.
        count: Number of islands.
        launch: All ranks of the launch, numbered as the launcher does: those of all islands, or of this one alone.
        world: The ranks of this island, consecutive ones of the launch.
        between: Within a launch, the ranks that stand where this one does, one of each island, in order.
        dense: Likewise, the ranks of all islands that hold the same part of the model as this one, experts aside.
        expert: The same for experts.
    """

    index: int
    count: int
    launch: dist.ProcessGroup
    world: dist.ProcessGroup
    between: dist.ProcessGroup | None = None
    dense: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None

    @property
    def is_job(self) -> bool:
        """Whether it is a launch of its own."""
        return self.launch is self.world

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Inside, the first island is alone, the others follow; called by all ranks, where files are made for all."""
        if self.index > 0:
            dist.barrier(self.launch)
        yield
        if self.index == 0:
            dist.barrier(self.launch)


_island: Island | None = None


def set_own(island: Island | None) -> None:
    """Names the island of this rank from now on; None where groups are not islands."""
    global _island
    _island = island


def own() -> Island | None:
    """The island of this rank; None where groups are not islands."""
    return _island


def rank_in_launch() -> int:
    """The number that the launcher gave this rank."""
    return dist.get_rank() if _island is None else _island.launch.rank()


def is_job() -> bool:
    """Whether this rank's island is a launch of its own."""
    return _island is not None and _island.is_job


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The numbers that the launcher gave the ranks of a process group, Megatron's or the plugin's."""
    ranks = dist.get_process_group_ranks(group)
    if _island is None or group is _island.launch or group.group_desc.startswith(DESCRIPTION):
        return tuple(ranks)
    first = _island.launch.rank() - _island.world.rank()
    return tuple(first + rank for rank in ranks)


def in_islands[**P, R](
    around: Callable[Concatenate[Callable[..., R], Island, P], R],
) -> Callable[Concatenate[Callable[..., R], P], R]:
    """For what is put around a function of Megatron: calls it where groups are islands, and the function alone elsewhere.

    Args:
        around: Called with the function, the island, and the function's arguments.
    """

    @functools.wraps(around)
    def choose(function: Callable[..., R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs) if _island is None else around(function, _island, *args, **kwargs)

    return choose
