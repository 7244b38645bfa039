"""Everything that is replaced so that stock Megatron takes one island of a launch for the whole world.

``torchrun`` starts all ranks as ever, and Megatron's arguments speak of all of them; only its process groups are those of an
island. Just before Megatron builds them, the ranks of the island become PyTorch's default group: what Megatron makes of it is
stock and knows of no other island. ``docs/islands.md`` says why Megatron's own offsets do not replace this. The rest is what
the islands of a launch still share: the samples, which they divide and count together, the files, the signals and the log.
"""

import datetime
import sys
import types
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pier_megatron.exchange.topology import DESCRIPTION, ranks_by_key
from pier_megatron.integration import worlds
from pier_megatron.integration.elastic_island import ElasticIsland
from pier_megatron.integration.worlds import Island, World, default_group, in_islands
from pier_megatron.megatron_api import versions

# Where Megatron keeps the group between the instances of its distributed optimizer. An island has only one.
_BETWEEN = "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"


def form_islands[**P, R](initialize_model_parallel: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Forms Megatron's process groups, inside each island if groups are islands."""
    settings = versions.require("megatron.training.global_vars", "_GLOBAL_ARGS")
    if not getattr(settings, "pier_islands", None):
        return initialize_model_parallel(*args, **kwargs)
    launch, count = dist.group.WORLD, settings.pier_groups
    assert launch is not None
    if settings.pier_lighthouse is not None:
        worlds.set_own(ElasticIsland(settings.pier_island, count, launch, launch))
        # As Megatron's arguments speak of the whole run.
        settings.world_size = count * launch.size()
        return initialize_model_parallel(*args, **kwargs)
    size = launch.size() // count
    index = launch.rank() // size
    blocks = [list(range(first, first + size)) for first in range(0, launch.size(), size)]
    world = _new_world(launch, index, size, datetime.timedelta(minutes=settings.distributed_timeout_minutes))
    with default_group(world):
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
    # A rank's groups are told apart by their first ranks, which have the same number in all islands.
    firsts = tuple(dist.get_process_group_ranks(group)[0] for group in inside)
    everyone = [firsts] * launch.size()
    dist.all_gather_object(everyone, firsts)
    dense, expert = (_over_all_islands(of_ranks) for of_ranks in zip(*everyone, strict=True))
    dist.group.WORLD = world
    worlds.set_own(Island(index, count, launch, world, (dense, expert)))
    return result


def _new_world(launch: dist.ProcessGroup, index: int, size: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Makes a default group of PyTorch's for the ranks of an island, on a store of its own."""
    store = dist.PrefixStore(f"pier/island_{index}", distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    # PyTorch would put the rank in the island before every line of an error, behind that in the launch.
    excepthook = sys.excepthook
    with default_group(None):
        dist.init_process_group(
            dist.get_backend(launch), store=store, rank=launch.rank() % size, world_size=size, timeout=timeout
        )
        world = dist.group.WORLD
    sys.excepthook = excepthook
    assert world is not None
    return world


def _over_all_islands(firsts: Sequence[int]) -> dist.ProcessGroup:
    """Makes a group of the same ranks of all islands; called by all ranks, with the first of its group for each of them."""
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(list(ranks_by_key(firsts).values()), group_desc=f"{DESCRIPTION}OVER_ISLANDS")
    return own


@in_islands
def return_to_the_launch[**P, R](
    destroy_model_parallel: Callable[P, R], island: Island, /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Makes the launch PyTorch's default group again."""
    dist.group.WORLD = island.launch
    worlds.set_own(World())
    return destroy_model_parallel(*args, **kwargs)


@in_islands
def count_all_islands[**P, R](train: Callable[P, R], island: Island, /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Lets Megatron's loop count the samples of all islands.

    The loop multiplies by the data-parallel size in its own body, so no smaller function could be wrapped. Only the loop's own
    name for ``parallel_state`` is replaced: everyone else asks for the size of the island's process groups, and gets it.
    """
    parallel_state = versions.require("megatron.core", "parallel_state")
    counting = types.SimpleNamespace(**vars(parallel_state))
    counting.get_data_parallel_world_size = lambda: island.count * parallel_state.get_data_parallel_world_size()
    with versions.replaced(versions.require("megatron.training", "training"), {"mpu": counting}):
        return train(*args, **kwargs)


@in_islands
def read_own_samples[**P, R](build_data_iterators: Callable[P, R], island: Island, /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Gives each island its share of the samples, one island after the other."""
    parallel_state = versions.require("megatron.core", "parallel_state")
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    # Megatron's own means to answer with another size and rank than those of the process group.
    place = {"_MPU_DATA_PARALLEL_WORLD_SIZE": island.count * size, "_MPU_DATA_PARALLEL_RANK": island.index * size + rank}
    with island.in_turn(), versions.replaced(parallel_state, place):
        return build_data_iterators(*args, **kwargs)


@in_islands
def one_after_the_other[**P, R](function: Callable[P, R], island: Island, /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Lets islands write files that all share one after the other."""
    with island.in_turn():
        return function(*args, **kwargs)


@in_islands
def hear_all_islands[**P, R](signals_received: Callable[P, R], island: Island, /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Looks for signals to any rank of the launch."""
    with island.in_the_launch():
        return signals_received(*args, **kwargs)


@in_islands
def print_once[**P](say: Callable[P, None], island: Island, /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Prints what Megatron prints for the whole job on the first island of the launch only."""
    if island.launch.rank() < island.world.size():
        say(*args, **kwargs)
