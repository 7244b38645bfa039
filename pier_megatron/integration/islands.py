"""Groups that are separate Megatron worlds (islands), in one launch.

``torchrun`` starts all ranks as ever, and Megatron's arguments speak of all of them; only its process groups are those of an
island. Just before Megatron builds them, the ranks of the island become PyTorch's default group: what Megatron makes of it is
stock and knows of no other island. The rest is in this module: which samples an island reads, what all islands do in turn or
decide together, and which of them prints.
"""

import contextlib
import dataclasses
import datetime
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pier_megatron.exchange.topology import DESCRIPTION
from pier_megatron.megatron_api import versions

# Where Megatron keeps the group between the instances of its distributed optimizer. An island has only one.
_BETWEEN = "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"


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


def own() -> Island | None:
    """The island of this rank; None where groups are not islands."""
    return _island


def rank_in_launch() -> int:
    """The number that the launcher gave this rank."""
    return dist.get_rank() if _island is None else _island.launch.rank()


def is_job() -> bool:
    """Whether this rank's island is a launch of its own."""
    return _island is not None and _island.is_job


@contextlib.contextmanager
def in_the_launch() -> Iterator[None]:
    """Inside, PyTorch's default group is that of all ranks of the launch. Islands' groups do not know their ranks there."""
    with contextlib.nullcontext() if _island is None else _default_group(_island.launch):
        yield


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The numbers that the launcher gave the ranks of a process group, Megatron's or the plugin's."""
    ranks = dist.get_process_group_ranks(group)
    if _island is None or group is _island.launch or group.group_desc.startswith(DESCRIPTION):
        return tuple(ranks)
    first = _island.launch.rank() - _island.world.rank()
    return tuple(first + rank for rank in ranks)


def in_islands(around: Callable[..., Any]) -> Callable[..., Any]:
    """For what is put around a function of Megatron: calls it where groups are islands, and the function alone elsewhere.

    Args:
        around: Called with the function, the island, and the function's arguments.
    """

    @functools.wraps(around)
    def choose(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _island is None else around(function, _island, *args, **kwargs)

    return choose


@contextlib.contextmanager
def _default_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    before = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = before


def form_islands(initialize_model_parallel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forms Megatron's process groups inside each island."""
    global _island
    settings = versions.require("megatron.training.global_vars", "_GLOBAL_ARGS")
    if not getattr(settings, "pier_islands", None):
        return initialize_model_parallel(*args, **kwargs)
    launch, count = dist.group.WORLD, settings.pier_groups
    assert launch is not None
    if settings.pier_lighthouse is not None:
        _island = Island(settings.pier_island, count, launch, launch)
        # As Megatron's arguments speak of the whole run.
        settings.world_size = count * launch.size()
        return initialize_model_parallel(*args, **kwargs)
    size = launch.size() // count
    index = launch.rank() // size
    blocks = [list(range(first, first + size)) for first in range(0, launch.size(), size)]
    world = _new_world(launch, index, size, datetime.timedelta(minutes=settings.distributed_timeout_minutes))
    with _default_group(world):
        result = initialize_model_parallel(*args, **kwargs)
    parallel_state = versions.require("megatron.core", "parallel_state")
    between, _ = dist.new_subgroups_by_enumeration(
        [list(alike) for alike in zip(*blocks, strict=True)], group_desc=f"{DESCRIPTION}BETWEEN_ISLANDS"
    )
    versions.assign(parallel_state, _BETWEEN, between)
    inside = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )
    dense, expert = (
        _over_all_islands([block[rank] for block in blocks for rank in dist.get_process_group_ranks(group)]) for group in inside
    )
    dist.group.WORLD = world
    _island = Island(index, count, launch, world, between, dense, expert)
    return result


def _new_world(launch: dist.ProcessGroup, index: int, size: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Makes a default group of PyTorch's for the ranks of an island, on a store of its own."""
    store = dist.PrefixStore(f"pier/island_{index}", distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    # PyTorch would put the rank in the island before every line of an error, behind that in the launch.
    excepthook = sys.excepthook
    with _default_group(None):
        dist.init_process_group(
            dist.get_backend(launch), store=store, rank=launch.rank() % size, world_size=size, timeout=timeout
        )
        world = dist.group.WORLD
    sys.excepthook = excepthook
    assert world is not None
    return world


def _over_all_islands(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Makes a group of the same ranks of all islands; called by all ranks, each with its own group's."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(ranks))
    own: dist.ProcessGroup
    enumeration = [list(ranks) for ranks in sorted(set(everyone))]
    own, _ = dist.new_subgroups_by_enumeration(enumeration, group_desc=f"{DESCRIPTION}OVER_ISLANDS")
    return own


def return_to_the_launch(destroy_model_parallel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes the launch PyTorch's default group again."""
    global _island
    if _island is not None:
        dist.group.WORLD = _island.launch
        _island = None
    return destroy_model_parallel(*args, **kwargs)


@in_islands
def count_all_islands(size: Callable[..., int], island: Island, /, *args: Any, **kwargs: Any) -> int:
    """Answers with the data-parallel size of the job who asks without qualification, to count samples."""
    return size(*args, **kwargs) * (1 if args or kwargs else island.count)


@in_islands
def read_own_samples(build_data_iterators: Callable[..., Any], island: Island, /, *args: Any, **kwargs: Any) -> Any:
    """Gives each island its share of the samples, one island after the other."""
    parallel_state = versions.require("megatron.core", "parallel_state")
    size = parallel_state.get_data_parallel_world_size() // island.count
    rank = island.index * size + parallel_state.get_data_parallel_rank()
    with island.in_turn(), versions.replaced(parallel_state, {"_MPU_DATA_PARALLEL_RANK": rank}):
        return build_data_iterators(*args, **kwargs)


@in_islands
def one_after_the_other(function: Callable[..., Any], island: Island, /, *args: Any, **kwargs: Any) -> Any:
    """Lets islands write files that all share one after the other."""
    with island.in_turn():
        return function(*args, **kwargs)


@in_islands
def hear_all_islands(signals_received: Callable[..., Any], island: Island, /, *args: Any, **kwargs: Any) -> Any:
    """Looks for signals to any rank of the launch."""
    with in_the_launch():
        return signals_received(*args, **kwargs)


def print_once(say: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Prints what Megatron prints for the whole job on one island only."""
    if _island is None or _island.index == 0 or _island.is_job:
        say(*args, **kwargs)
