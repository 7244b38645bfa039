"""Confines what Megatron does between outer steps to the ranks of one group.

The gradients have a module of their own. What else crosses the groups in an iteration of stock Megatron: the loss and the
statistics, the vote on rerunning the iteration, the questions whether to exit and whether a save has finished.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pier_megatron.integration import current, versions

_TRAINING = "megatron.training.training"

# The groups over which Megatron reduces losses, token counts and statistics in an iteration. Those of weight
# rematerialisation exist from 0.19 on.
_DENSE_GROUPS = ("_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT")
_EXPERT_GROUPS = ("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT")
_COLLECTION_GROUPS = ("dp_cp", "dp_cp_gtp_remat")


def install() -> None:
    """Confines Megatron's own collectives. A run without ``--optimizer pier`` passes through unchanged."""
    rerun_state_machine = versions.require("megatron.core.rerun_state_machine", "RerunStateMachine")
    versions.wrap_method(rerun_state_machine, "_reduce_any", _voting_in_the_group)
    versions.wrap(_TRAINING, "checkpoint_and_decide_exit", _asking_to_exit_when_together)
    versions.wrap(_TRAINING, "maybe_finalize_async_save", _asking_for_saves_when_together)
    versions.wrap(_TRAINING, "calc_params_l2_norm", _in_the_group)


@contextlib.contextmanager
def confined_to_group(model_chunk: Any) -> Iterator[None]:
    """Inside, the data-parallel group of the iteration is the part of it in this rank's Pier group.

    Not for the construction of models or optimizers, which size their buffers by the same groups.

    Args:
        model_chunk: Any chunk of the model; from 0.19 on it carries its own collection of process groups.
    """
    parallel_state = versions.require("megatron.core", "parallel_state")
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    expert = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
    collection = _process_group_collection(model_chunk)
    with contextlib.ExitStack() as stack:
        for owner, names, group in (
            (parallel_state, _DENSE_GROUPS, dense),
            (parallel_state, _EXPERT_GROUPS, expert),
            (collection, _COLLECTION_GROUPS, dense),
        ):
            there = [name for name in names if getattr(owner, name, None) is not None]
            stack.enter_context(versions.replaced(owner, dict.fromkeys(there, group)))
        yield


def _process_group_collection(module: Any) -> Any:
    """The collection that a model carries below its wrappers, or None."""
    while not hasattr(module, "pg_collection") and hasattr(module, "module"):
        module = module.module
    return getattr(module, "pg_collection", None)


def _in_the_group(function: Callable[..., Any]) -> Callable[..., Any]:
    def confined(*args: Any, **kwargs: Any) -> Any:
        optimizer = current.local_optimizer()
        with confined_to_group(optimizer.model_chunks[0]) if optimizer else contextlib.nullcontext():
            return function(*args, **kwargs)

    return confined


def _voting_in_the_group(reduce_any: Callable[..., Any]) -> Callable[..., Any]:
    """Asks only the own group whether an iteration has to be run again: the others train on other parameters."""

    def vote(machine: Any, value: bool | list[bool]) -> Any:
        optimizer = current.local_optimizer()
        if optimizer is None:
            return reduce_any(machine, value)
        votes = torch.tensor(value, dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(votes, group=optimizer.get_grad_stats_parallel_group())
        return tuple((votes > 0).tolist()) if isinstance(value, list) else bool(votes)

    return vote


def _asking_to_exit_when_together(checkpoint_and_decide_exit: Callable[..., Any]) -> Callable[..., Any]:
    """Looks for signals and at the clock only where the groups meet, which is also where they hold equal parameters."""

    def decide(*args: Any, **kwargs: Any) -> Any:
        optimizer = current.local_optimizer()
        if optimizer is None or optimizer.loop.groups_meet:
            return checkpoint_and_decide_exit(*args, **kwargs)
        with versions.replaced(versions.megatron_args(), {"exit_signal_handler": False, "exit_duration_in_mins": None}):
            return checkpoint_and_decide_exit(*args, **kwargs)

    return decide


def _asking_for_saves_when_together(maybe_finalize_async_save: Callable[..., Any]) -> Callable[..., Any]:
    """Asks whether a save in the background has finished only where the groups meet: all ranks must agree on the answer."""

    def finalize(*args: Any, **kwargs: Any) -> Any:
        optimizer = current.local_optimizer()
        blocking = kwargs.get("blocking", args[0] if args else False)
        if optimizer is None or optimizer.loop.groups_meet or blocking:
            return maybe_finalize_async_save(*args, **kwargs)
        return None

    return finalize
