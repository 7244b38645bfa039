"""Confines what Megatron does between outer steps to the ranks of one group.

The gradients have a module of their own. What else crosses the groups in an iteration of stock Megatron: the loss and the
statistics, the vote on rerunning the iteration, the questions whether to exit and whether a save has finished.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pier_megatron.integration import current, island_world, islands
from pier_megatron.megatron_api import versions

_TRAINING = "megatron.training.training"

# The groups over which Megatron reduces losses, token counts and statistics in an iteration. Those of weight
# rematerialisation exist from 0.19 on.
_DENSE_GROUPS = ("_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT")
_EXPERT_GROUPS = ("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT")
_COLLECTION_GROUPS = ("dp_cp", "dp_cp_gtp_remat")
_EXPERT_COLLECTION_GROUPS = ("expt_dp",)


def ranks_of_group(optimizer: Any) -> dist.ProcessGroup:
    """All ranks of this rank's group; ``optimizer`` is Megatron's."""
    island = islands.own()
    found: dist.ProcessGroup = optimizer.get_grad_stats_parallel_group() if island is None else island.world
    return found


def own_data_parallel_ranks() -> dist.ProcessGroup:
    """The data-parallel and context-parallel ranks of this rank's group, which is an instance."""
    parallel_state = versions.require("megatron.core", "parallel_state")
    found: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    return found


@contextlib.contextmanager
def confined_to_group(model_chunk: Any) -> Iterator[None]:
    """Inside, the data-parallel group of the iteration is the part of it in this rank's Pier group.

    Args:
        model_chunk: Any chunk of the model; from 0.19 on it carries its own collection of process groups.
    """
    parallel_state = versions.require("megatron.core", "parallel_state")
    dense = own_data_parallel_ranks()
    expert = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
    with _averaging_over(model_chunk, dense, expert):
        yield


@contextlib.contextmanager
def over_all_groups(model_chunk: Any) -> Iterator[None]:
    """Inside, the data-parallel group is over all groups, as it is anyway unless they are islands; see above."""
    island = islands.own()
    if island is None or island.dense is None or island.expert is None:
        yield
        return
    with _averaging_over(model_chunk, island.dense, island.expert):
        yield


@contextlib.contextmanager
def _averaging_over(model_chunk: Any, dense: dist.ProcessGroup, expert: dist.ProcessGroup) -> Iterator[None]:
    """Not for the construction of models or optimizers, which size their buffers by the same groups."""
    parallel_state = versions.require("megatron.core", "parallel_state")
    collection = _process_group_collection(model_chunk)
    with contextlib.ExitStack() as stack:
        for owner, names, group in (
            (parallel_state, _DENSE_GROUPS, dense),
            (parallel_state, _EXPERT_GROUPS, expert),
            (collection, _COLLECTION_GROUPS, dense),
            (collection, _EXPERT_COLLECTION_GROUPS, expert),
        ):
            there = [name for name in names if getattr(owner, name, None) is not None]
            stack.enter_context(versions.replaced(owner, dict.fromkeys(there, group)))
        yield


def _process_group_collection(module: Any) -> Any:
    """The collection that a model carries below its wrappers, or None."""
    while not hasattr(module, "pg_collection") and hasattr(module, "module"):
        module = module.module
    return getattr(module, "pg_collection", None)


@current.in_the_local_phase
def in_the_group(function: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Sums over the own group what differs between groups in the local phase."""
    with confined_to_group(optimizer.model_chunks[0]):
        return function(*args, **kwargs)


@current.in_pier_runs
def vote_of_those_who_average(reduce_any: Callable[..., Any], optimizer: Any, machine: Any, value: bool | list[bool]) -> Any:
    """Asks whether an iteration has to be run again: all groups, or only the own where the others train on other parameters."""
    if not optimizer.loop.is_local:
        with island_world.in_the_launch():
            return reduce_any(machine, value)
    votes = torch.tensor(value, dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(votes, group=ranks_of_group(optimizer))
    return tuple((votes > 0).tolist()) if isinstance(value, list) else bool(votes)


@current.in_pier_runs
def ask_to_exit_when_together(decide: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Looks for signals and at the clock only where the groups meet, which is also where they hold equal parameters."""
    asked: dict[str, Any] = {}
    if optimizer.loop.is_deserted:
        asked = {"exit_duration_in_mins": -1.0}
    elif islands.is_job():
        # It may leave at any time.
        pass
    elif optimizer.loop.is_local and not _are_together(optimizer):
        asked = {"exit_signal_handler": False, "exit_duration_in_mins": None}
    elif (island := islands.own()) is not None:
        asked = {"exit_duration_in_mins": _limit_for_all(island, versions.megatron_args().exit_duration_in_mins)}
    with versions.with_megatron_args(asked):
        return decide(*args, **kwargs)


def _limit_for_all(island: islands.Island, minutes: float | None) -> float | None:
    """A limit that all clocks are beyond if one is beyond the given one, and else none: islands must not end one by one."""
    if not minutes:
        return None
    passed = (time.time() - versions.require(_TRAINING, "_TRAIN_START_TIME")) / 60
    is_over = torch.tensor([passed > minutes], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(is_over, dist.ReduceOp.MAX, group=island.launch)
    return -1.0 if is_over else None


@current.in_the_local_phase
def ask_for_saves_when_together(finalize: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Asks whether a save in the background has finished only where the groups meet: all ranks must agree on the answer."""
    blocking = versions.given(finalize, args, kwargs).get("blocking", False)
    return finalize(*args, **kwargs) if _are_together(optimizer) or blocking else None


def _are_together(optimizer: Any) -> bool:
    """Whether the groups meet in this iteration anyway: at an outer step of all, or else where the mean loss is logged."""
    loop = optimizer.loop
    if islands.is_job():
        return True
    if loop.config.has_common_anchor:
        return bool(loop.groups_meet)
    return bool(loop.groups_meet or loop.iteration % versions.megatron_args().log_interval == 0)
