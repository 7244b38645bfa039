"""The Pier group of this rank, which is an instance of Megatron's distributed optimizer, whatever trains inside it.

Megatron forms the process groups of as many instances as it is asked for. AdamW it builds over all of them. Other optimizers
it builds in one instance only, by its configuration of data parallelism. That configuration names one instance, and the
ranks of the own group stand for all data-parallel ranks.
"""

import dataclasses
import datetime
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.megatron_api import run, versions
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.settings import settings_of

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


def own_ranks() -> dist.ProcessGroup:
    """All ranks of this rank's group."""
    parallel_state = versions.require("megatron.core", "parallel_state")
    found: dist.ProcessGroup = parallel_state.get_intra_distributed_optimizer_instance_group()
    return found


def own_number() -> int:
    """The number of this rank's group among those of the launch."""
    parallel_state = versions.require("megatron.core", "parallel_state")
    between: dist.ProcessGroup | None = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    return 0 if between is None else between.rank()


def own_data_parallel_ranks(of_experts: bool = False) -> dist.ProcessGroup:
    """The data-parallel and context-parallel ranks of this rank's group.

    Args:
        of_experts: Whether those that hold copies of the same experts.
    """
    parallel_state = versions.require("megatron.core", "parallel_state")
    found: dist.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
        if of_experts
        else parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    )
    return found


@dataclasses.dataclass
class _Balancing:
    ranks: dist.ProcessGroup | None = None


def own_balancing_ranks() -> dist.ProcessGroup:
    """The ranks of this rank's pipeline stage in its group, over which routers of experts count tokens.

    Megatron has no such group, unless it is all of a stage or of an instance. These ranks make it when they first ask for it.
    """
    found = run.part(_Balancing)
    if found.ranks is None:
        parallel_state = versions.require("megatron.core", "parallel_state")
        stage, own = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True), own_ranks()
        members = dist.get_process_group_ranks(own)
        ranks = [rank for rank in dist.get_process_group_ranks(stage) if rank in members]
        timeout = datetime.timedelta(minutes=versions.megatron_args().distributed_timeout_minutes)
        found.ranks = {stage.size(): stage, own.size(): own}.get(len(ranks)) or dist.new_group(
            ranks, timeout=timeout, use_local_synchronization=True, group_desc="PIER_INSIDE_STAGE"
        )
        # NCCL connects with the first collective: what does not connect had better fail at start.
        dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=found.ranks)
    return found.ranks


def own_process_groups() -> "ProcessGroupCollection":
    """Megatron's process groups, as if this rank's group were alone."""
    groups: ProcessGroupCollection = versions.require(
        "megatron.core.process_groups_config", "ProcessGroupCollection"
    ).use_mpu_process_groups()
    groups.dp_cp, groups.expt_dp = own_data_parallel_ranks(), own_data_parallel_ranks(of_experts=True)
    return groups


def trains_as_one_instance(args: Namespace) -> bool:
    """Whether Megatron builds the optimizer of a run in one instance, although the launch has several groups."""
    if not uses_pier(args) or args.optimizer == "adam":
        return False
    settings = settings_of(args)
    return settings.groups > settings.launches


def form_groups[**P, R](initialize_model_parallel: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Forms process groups of as many instances as there are groups."""
    settings = versions.megatron_args() if versions.is_training() else Namespace()
    if trains_as_one_instance(settings):
        kwargs["num_distributed_optimizer_instances"] = settings.pier_groups
    elif uses_pier(settings) and settings.pier_lighthouse is not None:
        # Megatron's arguments speak of the whole run.
        settings.world_size = settings.pier_groups * dist.get_world_size()
    return initialize_model_parallel(*args, **kwargs)


def average_inside(
    process_groups_of_ddp: Callable[..., Mapping[str, dist.ProcessGroup]], /, *args: object, **kwargs: object
) -> Mapping[str, dist.ProcessGroup]:
    """Builds gradient buckets over the own group where Megatron knows of one instance."""
    groups = process_groups_of_ddp(*args, **kwargs)
    if not versions.is_training() or not trains_as_one_instance(versions.megatron_args()):
        return groups
    dense, expert = own_data_parallel_ranks(), own_data_parallel_ranks(of_experts=True)
    return {
        **groups,
        **dict.fromkeys(("dp_cp_group", "intra_dp_cp_group"), dense),
        **dict.fromkeys(("expt_dp_group", "intra_expt_dp_group"), expert),
    }


def lay_out_inside[**P, R](wrap_model_chunks_with_ddp: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Cuts gradient buckets for the ranks of the own group, where Megatron asks for the size of the data-parallel group."""
    if not trains_as_one_instance(versions.megatron_args()):
        return wrap_model_chunks_with_ddp(*args, **kwargs)
    size = {"_MPU_DATA_PARALLEL_WORLD_SIZE": own_data_parallel_ranks().size()}
    with versions.replaced(versions.require("megatron.core", "parallel_state"), size):
        return wrap_model_chunks_with_ddp(*args, **kwargs)
