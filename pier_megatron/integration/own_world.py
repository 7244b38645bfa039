"""The world of this rank's group: all that Megatron and the training script know of.

Megatron forms the world of torch.distributed once its arguments are known. There a launch of several groups is divided, so
that all of Megatron's process groups, and those of scripts and libraries, are the group's own.
"""

import argparse
import dataclasses
import datetime
import logging
import os
import sys
from collections.abc import Callable

import torch.distributed as dist

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.worlds import Launch
from pier_megatron.megatron_api import run, versions
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.settings import settings_of


@dataclasses.dataclass
class _Divided:
    launch: Launch | None = None


def launch() -> Launch:
    """The launch of this process: one group, unless it was divided."""
    return run.part(_Divided).launch or Launch(dist.get_rank(), dist.get_world_size())


def groups() -> int:
    """Number of groups in the run; one with a stock optimizer."""
    return settings_of(versions.megatron_args()).groups if uses_pier(versions.megatron_args()) else 1


def own_data_parallel_ranks(of_experts: bool = False) -> dist.ProcessGroup:
    """The data-parallel and context-parallel ranks of this rank's group.

    Args:
        of_experts: Whether those that hold copies of the same experts.
    """
    parallel_state = versions.require("megatron.core", "parallel_state")
    found: dist.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group()
        if of_experts
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return found


def form[**P, R](initialize_distributed: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Lets the world that Megatron forms be that of this rank's group."""
    settings = versions.megatron_args()
    if not uses_pier(settings):
        return initialize_distributed(*args, **kwargs)
    of_run = settings.world_size
    if settings.pier_lighthouse is not None:
        of_run *= settings.pier_groups
    elif settings.pier_groups > 1:
        given = versions.given(initialize_distributed, args, kwargs)
        divided = divide(settings, settings.pier_groups, given.get("store"))
        settings.rank, settings.world_size = divided.rank_in_group, divided.ranks_of_group
        args, kwargs = (), {**given, "store": divided.store_of_group}  # type: ignore[assignment]
    result = initialize_distributed(*args, **kwargs)
    # Megatron's arguments speak of the whole run: so many ranks share a batch.
    settings.world_size = of_run
    return result


def divide(settings: argparse.Namespace, groups: int, store: object = None) -> Launch:
    """Divides the launch into groups of consecutive ranks; all but one of these are silent from then on.

    Args:
        settings: Megatron's arguments: rank and size of the launch, and the timeout.
        groups: Number of groups.
        store: Store of all ranks, if the caller has one; by default PyTorch's of this launch.

    Raises:
        PierConfigError: If torch.distributed has a world of all ranks already, or the groups would not be equal.
    """
    if dist.is_initialized():
        raise PierConfigError(
            f"--pier-groups {groups}: torch.distributed was initialized before Megatron does so, with all {dist.get_world_size()} "
            "ranks in one world. Each group is a world of its own: drop the script's own init_process_group."
        )
    rank, size = settings.rank, settings.world_size
    if size % groups:
        raise PierConfigError(
            f"--pier-groups {groups} does not divide the world size {size}: {size} = {size // groups} x {groups} + "
            f"{size % groups}. Every group needs the same number of ranks."
        )
    if store is None:
        timeout = datetime.timedelta(minutes=settings.distributed_timeout_minutes)
        store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=timeout))  # type: ignore[no-untyped-call]
    found = run.part(_Divided).launch = Launch(rank, size, groups, store)
    if not found.speaks:
        # What is wrong goes to the error stream.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  As long as the process lives.
        logging.disable(logging.INFO)
    return found
