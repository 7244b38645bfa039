"""The Megatron world of this rank, which answers whatever depends on how groups are formed.

One world has all groups of a run: they are instances of its distributed optimizer (:class:`World`). Or each group is a separate
world: one of several in the launch (:class:`Island`), or the only one (``elastic_island.ElasticIsland``). The choice is made
once, where Megatron forms its process groups (:func:`pier_megatron.integration.island_world.form_islands`).
"""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate

import torch
import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.topology import DESCRIPTION, Topology
from pier_megatron.outer import Shards
from pier_megatron.outer.elastic import ElasticMembership

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# Below the --save folder of a job: a folder for each island but the first.
ISLANDS = "islands"


class World:
    """One world with all groups of the run.

    Attributes:
        over_all: Dense and expert data-parallel ranks of all groups; None where Megatron's own groups span them.
        may_leave: Whether the groups of this launch may save and end in any iteration, without others of the run.
    """

    over_all: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    may_leave = False

    @property
    def is_whole_launch(self) -> bool:
        """Whether Megatron asks all ranks of the launch where it asks all of its own."""
        return True

    def rank_in_launch(self) -> int:
        """The number that the launcher gave this rank."""
        return dist.get_rank()

    def ranks_of(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """The numbers that the launcher gave the ranks of a process group, Megatron's or the plugin's."""
        return tuple(dist.get_process_group_ranks(group))

    def own_group(self, optimizer: "ChainedOptimizer") -> dist.ProcessGroup:
        """All ranks of this rank's Pier group; ``optimizer`` is Megatron's."""
        found: dist.ProcessGroup = optimizer.get_grad_stats_parallel_group()
        return found

    def in_the_launch(self) -> AbstractContextManager[None]:
        """Inside, PyTorch's default group is that of all ranks of the launch. Islands' groups do not know their ranks there."""
        return contextlib.nullcontext()

    def use_own_folders(self, args: argparse.Namespace) -> None:
        """Changes Megatron's arguments so that worlds do not write the same files."""

    def describe(self, topology: Topology, config: PierConfig) -> list[str]:
        """Says who is in which group, as far as this launch knows, line by line."""
        return topology.describe()

    def membership(
        self, config: PierConfig, topology: Topology, shards: Sequence[Sequence[Shards]], device: torch.device
    ) -> ElasticMembership | None:
        """Makes this world known to those of other launches; None if there are none."""
        return None

    def join(
        self,
        model: "Sequence[DistributedDataParallel]",
        optimizer: "MegatronOptimizer",
        scheduler: "OptimizerParamScheduler | None",
    ) -> None:
        """Begins where worlds of other launches have come to."""


@dataclasses.dataclass(frozen=True)
class Island(World):
    """A world that is one group.

    Attributes:
        index: Number of the island.
        count: Number of islands.
        launch: All ranks of the launch, numbered as the launcher does.
        world: The ranks of this island, consecutive ones of the launch.
        over_all: Ranks of all islands that hold the same part of the model as this one, experts aside, and those of experts.
    """

    index: int
    count: int
    launch: dist.ProcessGroup
    world: dist.ProcessGroup
    over_all: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None

    @property
    def is_whole_launch(self) -> bool:
        """See :attr:`World.is_whole_launch`."""
        return self.world is self.launch

    def rank_in_launch(self) -> int:
        """See :meth:`World.rank_in_launch`."""
        return self.launch.rank()

    def ranks_of(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """See :meth:`World.ranks_of`."""
        reaches_beyond = group is self.launch or group.group_desc.startswith(DESCRIPTION)
        first = 0 if reaches_beyond else self.launch.rank() - self.world.rank()
        return tuple(first + rank for rank in dist.get_process_group_ranks(group))

    def own_group(self, optimizer: "ChainedOptimizer") -> dist.ProcessGroup:
        """See :meth:`World.own_group`."""
        return self.world

    def in_the_launch(self) -> AbstractContextManager[None]:
        """See :meth:`World.in_the_launch`."""
        return default_group(self.launch)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Inside, the first island is alone, the others follow; called by all ranks, where files are made for all."""
        if self.index > 0:
            dist.barrier(self.launch)
        yield
        if self.index == 0:
            dist.barrier(self.launch)

    def use_own_folders(self, args: argparse.Namespace) -> None:
        """See :meth:`World.use_own_folders`."""
        if args.save is not None:
            args.save = str(folder_of_island(Path(args.save), self.index))


def island_folder_error(folder: str) -> PierConfigError:
    """The error for a folder that is not that of a job."""
    return PierConfigError(
        f"--load {folder} holds one island's part of a checkpoint. Pass the --save folder of the job: each island finds "
        "its own."
    )


def folder_of_island(folder: Path, index: int) -> Path:
    """The folder of an island below that of its job."""
    return folder / ISLANDS / str(index) if index else folder


@contextlib.contextmanager
def default_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, a process group is PyTorch's default group."""
    before = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = before


# As long as Megatron's process groups, which may outlast the arguments of a training.
_own = World()


def own() -> World:
    """The world of this rank."""
    return _own


def set_own(world: World) -> None:
    """Names the world of this rank from now on."""
    global _own
    _own = world


def in_islands[**P, R](
    around: Callable[Concatenate[Callable[..., R], Island, P], R],
) -> Callable[Concatenate[Callable[..., R], P], R]:
    """For what is put around a function of Megatron: calls it where groups are islands, and the function alone elsewhere.

    Args:
        around: Called with the function, the island, and the function's arguments.
    """

    @functools.wraps(around)
    def choose(function: Callable[..., R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        world = own()
        return around(function, world, *args, **kwargs) if isinstance(world, Island) else function(*args, **kwargs)

    return choose
