"""Megatron's layer-wise optimizer inside a group: it asks all ranks of the launch, and takes itself for the only instance."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from pier_megatron.integration import current, own_group
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    from pier_megatron.integration.optimizer import PierOptimizer


@current.in_pier_runs
def over_own_group[R](
    statistic: Callable[..., R],
    _: "PierOptimizer",
    /,
    *args: object,
    grad_stats_parallel_group: dist.ProcessGroup | None,
    **kwargs: object,
) -> R:
    """Takes a statistic of gradients over the own group: all ranks of the launch would count them once for each group."""
    group = own_group.own_ranks() if grad_stats_parallel_group is None else grad_stats_parallel_group
    return statistic(*args, grad_stats_parallel_group=group, **kwargs)


@current.in_pier_runs
def number_copies(
    sharded_state_dict: "Callable[..., ShardedStateDict]",
    _: "PierOptimizer",
    optimizer: "LayerWiseDistributedOptimizer",
    /,
    *args: object,
    **kwargs: object,
) -> "ShardedStateDict":
    """Numbers the copies of a tensor by group: a rank has the only one in its group, which Megatron numbers 0 in all."""
    state = sharded_state_dict(optimizer, *args, **kwargs)
    number = own_group.own_number()
    for value in versions.require("megatron.core.dist_checkpointing.dict_utils", "nested_values")(state):
        if hasattr(value, "replica_id"):
            value.replica_id = number if isinstance(value.replica_id, int) else (*value.replica_id[:-1], number)
    return state


def prepare(optimizer: "ChainedOptimizer") -> None:
    """Prepares the layer-wise optimizer, and the optimizers chained with it, before the first step."""
    layer_wise = versions.require("megatron.core.optimizer.layer_wise_optimizer", "LayerWiseDistributedOptimizer")
    if not any(isinstance(link, layer_wise) for link in (optimizer, *optimizer.chained_optimizers)):
        return
    for link in optimizer.chained_optimizers:
        if hasattr(link, "distributed_optimizer_instance_id"):
            # Checkpoints use this number to tell copies apart. Megatron gives all instances 0 here.
            link.distributed_optimizer_instance_id = own_group.own_number()
    if versions.is_between("0.19", None):
        # Asked of all ranks in the first step, once: a group had better not wait for others there.
        for name in versions.require("megatron.core.optimizer.optimizer", "SEPARATE_GRAD_NORM_GROUPS"):
            optimizer.has_grad_norm_group(name)
