"""The world of this rank's group: all that Megatron and the training script know of.

Megatron forms the world of torch.distributed once its arguments are known. There a launch of several groups is divided, so
that all of Megatron's process groups, and those of scripts and libraries, are the group's own.
"""

import argparse
import contextlib
import dataclasses
import datetime
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from pier_megatron.errors import PierConfigError, division
from pier_megatron.exchange.worlds import Launch
from pier_megatron.megatron_api import run, versions
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.settings import settings_of

# Megatron's arguments of what a run writes once: files at intervals, and a log of its progress.
_ONCE = ("save_params_interval", "save_activations_interval", "save_dgrads_interval", "save_wgrads_interval", "log_progress")
# Files that each world writes, by the ranks in it.
_OF_EACH_GROUP = ("memory_snapshot_path", "dataloader_save")
_RECORDS = "flight_recorder_dump_path"
_RECORDS_IN_ENVIRONMENT = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# Port of the first rank of a world. A node may have several worlds.
_PORT = "straggler_ctrlr_port"


@dataclasses.dataclass
class _Divided:
    launch: Launch | None = None


def divided() -> Launch | None:
    """The launch of this process, once it was divided into worlds; None before, and where it is one group."""
    return run.part(_Divided).launch


def launch() -> Launch:
    """The launch of this process: one group, unless it was divided."""
    return divided() or Launch(dist.get_rank(), dist.get_world_size())


def ranks() -> dist.ProcessGroup:
    """All ranks of this rank's group: the default group."""
    world = dist.group.WORLD
    assert world is not None
    return world


def time_out() -> datetime.timedelta:
    """Time after which a collective of Megatron's fails."""
    return datetime.timedelta(minutes=versions.megatron_args().distributed_timeout_minutes)


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
    of_run, changed = settings.world_size, {}
    if settings.pier_lighthouse is not None:
        of_run *= settings.pier_groups
    elif settings.pier_groups > 1:
        given = versions.given(initialize_distributed, args, kwargs)
        divided = divide(settings.rank, settings.world_size, settings.pier_groups, time_out(), given.get("store"))
        settings.rank, settings.world_size = divided.rank_in_group, divided.ranks_of_group
        _name_records(settings, divided)
        changed["store"] = divided.store_of_group
    result = versions.called_with(initialize_distributed, args, kwargs, changed)
    # Megatron's arguments speak of the whole run, whose ranks share a batch.
    settings.world_size = of_run
    return result


def divide(rank: int, size: int, groups: int, timeout: datetime.timedelta, store: Store | None = None) -> Launch:
    """Divides the launch into groups of consecutive ranks; all but one of these are silent from then on.

    Args:
        rank: Rank of this process in the launch.
        size: Number of ranks in the launch.
        groups: Number of groups.
        timeout: Time within which all ranks have to reach the store.
        store: Store of all ranks, if the caller has one; by default PyTorch's of this launch.

    Raises:
        PierConfigError: If torch.distributed has a world of all ranks already, or the groups would not be equal.
    """
    if dist.is_initialized():
        raise PierConfigError(
            f"--pier-groups {groups}: torch.distributed was initialized before Megatron does so, with all "
            f"{dist.get_world_size()} ranks in one world. Each group is a separate world: drop the script's own "
            "init_process_group."
        )
    if size % groups:
        raise PierConfigError(
            f"--pier-groups {groups} does not divide the world size {size} ({division(size, groups)}): every group needs the "
            "same number of ranks."
        )
    if store is None:
        found = distributed_c10d.rendezvous("env://", rank, size, timeout=timeout)  # type: ignore[attr-defined]
        store, rank, size = next(found)
    launch = run.part(_Divided).launch = Launch(rank, size, groups, store)
    if not launch.speaks:
        # What is wrong goes to the error stream.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  As long as the process lives.
        logging.disable(logging.INFO)
    return launch


def name_files(settings: argparse.Namespace) -> None:
    """Gives what each world writes the name of its group, and leaves to the first group what a run has once.

    Args:
        settings: Megatron's arguments, changed in place before it copies them into configurations.
    """
    launch = Launch(settings.rank, settings.world_size, settings.pier_groups)
    if getattr(settings, "profile_ranks", ()):
        settings.profile_ranks = profiled_ranks(settings.profile_ranks, launch)
    if not launch.group:
        return
    for name in _ONCE:
        if getattr(settings, name, None):
            setattr(settings, name, None)
    for name in _OF_EACH_GROUP:
        if (path := getattr(settings, name, None)) is not None:
            setattr(settings, name, file_of_group(path, launch.group))


def profiled_ranks(ranks_of_run: Sequence[int], launch: Launch) -> list[int]:
    """Ranks of the own group among those that the user has numbered over the run; no rank at all would mean every one."""
    inside = [rank - launch.first_of_group for rank in ranks_of_run]
    return [rank for rank in inside if 0 <= rank < launch.ranks_of_group] or [-1]


def file_of_group(path: str, group: int) -> str:
    """The path of a group for a file that several groups write."""
    where = Path(path)
    return str(where.with_name(f"group_{group}_{where.name}"))


def _name_records(settings: argparse.Namespace, launch: Launch) -> None:
    """Names records of a group, which Megatron and PyTorch look for once there are writers and ranks."""
    group = launch.group
    if not group:
        return
    # Writers are made before: what looks for their folder now writes profiles.
    if settings.tensorboard_dir is not None:
        settings.tensorboard_dir = str(Path(settings.tensorboard_dir) / f"group_{group}")
    if getattr(settings, _RECORDS, None) is not None:
        settings.flight_recorder_dump_path = f"{_prefix(settings.flight_recorder_dump_path)}group_{group}_"
    for variable in _RECORDS_IN_ENVIRONMENT:
        if variable in os.environ:
            os.environ[variable] = f"{_prefix(os.environ[variable])}group_{group}_"
    if hasattr(settings, _PORT):
        setattr(settings, _PORT, getattr(settings, _PORT) - group)


def count_ranks_of_group[**P, R](get_start_time_from_progress_log: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Lets Megatron find the starts of this job in its log of progress, which names torch.distributed's ranks from 0.18 on."""
    with versions.with_megatron_args({"world_size": dist.get_world_size()}):
        return get_start_time_from_progress_log(*args, **kwargs)


def _prefix(path: str) -> str:
    """How Megatron and PyTorch begin the names of records."""
    return os.path.join(path, "_dump_") if os.path.isdir(path) else path


def first_group_first(what: str) -> contextlib.AbstractContextManager[None]:
    """Inside, the first group does something, such as to write files that all read, while the others wait."""
    launch = divided()
    return contextlib.nullcontext() if launch is None else launch.first_group_first(what)
