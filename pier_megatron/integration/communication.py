"""Confines what Megatron does between outer steps to the ranks of one group.

The gradients have a module of their own. What else crosses the groups in an iteration of stock Megatron: the loss and the
statistics, the vote on rerunning the iteration, the questions whether to exit and whether a save has finished.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.integration import current
from pier_megatron.integration.own_group import own_balancing_ranks, own_data_parallel_ranks, own_ranks
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from pier_megatron.integration.optimizer import PierOptimizer

# The groups over which Megatron reduces losses, token counts and statistics in an iteration. Those of weight
# rematerialisation exist from 0.19 on.
_DENSE_GROUPS = ("_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT")
# The data-parallel groups without context parallelism.
REPLICAS, _COLLECTION_REPLICAS = ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"), ("dp",)
_EXPERT_GROUPS = ("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT")
_COLLECTION_GROUPS = ("dp_cp", "dp_cp_gtp_remat")
_EXPERT_COLLECTION_GROUPS = ("expt_dp",)
_BALANCING_GROUPS, _COLLECTION_BALANCING_GROUPS = ("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",), ("tp_dp_cp",)


def groups_replaced(owner: object, names: Sequence[str], group: dist.ProcessGroup) -> contextlib.AbstractContextManager[None]:
    """Inside, a group takes the place of those under some names, as far as a release or a run has them."""
    return versions.replaced(owner, {name: group for name in names if getattr(owner, name, None) is not None})


@contextlib.contextmanager
def confined_to_group(model_chunk: "DistributedDataParallel", averages: bool = False) -> Iterator[None]:
    """Inside, the data-parallel group of the iteration is the part of it in this rank's Pier group.

    Args:
        model_chunk: Any chunk of the model; from 0.19 on it carries its own collection of process groups.
        averages: Whether statistics are averaged over a data-parallel group without context parallelism too.
    """
    parallel_state = versions.require("megatron.core", "parallel_state")
    collection = _process_group_collection(model_chunk)
    dense, expert = own_data_parallel_ranks(), own_data_parallel_ranks(of_experts=True)
    groups = [
        (parallel_state, _DENSE_GROUPS, dense),
        (parallel_state, _EXPERT_GROUPS, expert),
        (collection, _COLLECTION_GROUPS, dense),
        (collection, _EXPERT_COLLECTION_GROUPS, expert),
    ]
    if versions.require("megatron.core.utils", "get_model_config")(model_chunk).num_moe_experts is not None:
        balancing = own_balancing_ranks()
        groups += [(parallel_state, _BALANCING_GROUPS, balancing), (collection, _COLLECTION_BALANCING_GROUPS, balancing)]
    if averages:
        # Context-parallel ranks hold the same sums by then.
        groups += [(parallel_state, REPLICAS, dense), (collection, _COLLECTION_REPLICAS, dense)]
    with contextlib.ExitStack() as stack:
        for owner, names, group in groups:
            stack.enter_context(groups_replaced(owner, names, group))
        yield


def _process_group_collection(module: "DistributedDataParallel") -> "ProcessGroupCollection | None":
    """The collection that a model carries below its wrappers, or None."""
    while not hasattr(module, "pg_collection") and hasattr(module, "module"):
        module = module.module
    return getattr(module, "pg_collection", None)


@current.in_pier_runs
def in_the_group[**P, R](function: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Sums over the own group what is sharded in each group: it differs between groups, or would count once for each."""
    with confined_to_group(optimizer.model_chunks[0]):
        return function(*args, **kwargs)


@current.in_the_local_phase
def vote_of_those_who_average(
    _: Callable[..., bool | tuple[bool, ...]], optimizer: "PierOptimizer", machine: object, value: bool | list[bool]
) -> bool | tuple[bool, ...]:
    """Asks only the own group whether an iteration has to be run again: the others train on other parameters."""
    votes = torch.tensor(value, dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(votes, group=own_ranks())
    return tuple((votes > 0).tolist()) if isinstance(value, list) else bool(votes)


@current.in_pier_runs
def ask_to_exit_when_together[**P, R](
    decide: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Looks for signals and at the clock only where the groups meet, which is also where they hold equal parameters."""
    asked: dict[str, object] = {}
    if optimizer.loop.is_deserted:
        asked = {"exit_duration_in_mins": -1.0}
    elif optimizer.loop.is_local and not _are_together(optimizer):
        asked = {"exit_signal_handler": False, "exit_duration_in_mins": None}
    with versions.with_megatron_args(asked):
        return decide(*args, **kwargs)


@current.in_the_local_phase
def estimate_tokens(consume: Callable[[], tuple[float | None, ...]], optimizer: "PierOptimizer") -> tuple[float | None, ...]:
    """Estimates the tokens of packed sequences, from which operations are counted, by those of this rank's replica."""
    if optimizer.loop.config.groups == optimizer.loop.config.launches:
        return consume()
    # Megatron sums over all ranks, unless there is no model-parallel group yet.
    parallel_state, replicas = versions.require("megatron.core", "parallel_state"), versions.megatron_args().data_parallel_size
    with versions.replaced(parallel_state, {"model_parallel_is_initialized": lambda: False}):
        own = consume()
    return tuple(count if count is None else count * replicas for count in own)


@current.in_the_local_phase
def ask_for_saves_when_together[**P](
    finalize: Callable[P, None], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> None:
    """Asks whether a save in the background has finished only where the groups meet: all ranks must agree on the answer."""
    if _are_together(optimizer) or versions.given(finalize, args, kwargs).get("blocking", False):
        finalize(*args, **kwargs)


def _are_together(optimizer: "PierOptimizer") -> bool:
    """Whether the groups may ask each other something in this iteration."""
    # An elastic island may save and end in any iteration, without others.
    return optimizer.loop.config.lighthouse is not None or optimizer.loop.groups_meet
