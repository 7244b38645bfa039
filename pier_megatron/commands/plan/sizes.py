"""A job's sizes, from Megatron's arguments: operations, shards, and the memory that Pier takes."""

import argparse

from pier_megatron.commands.plan.model import Job
from pier_megatron.config import PierConfig
from pier_megatron.settings import settings_of


def sizes_of(args: argparse.Namespace) -> Job:
    """Sizes of a job.

    Raises:
        PierConfigError: If the vocabulary's size is unknown.
    """
    from pier_megatron.commands import planned_sizes
    from pier_megatron.integration.inner.requirements import are_shared_out

    return Job(
        flops=planned_sizes.operations(args),
        shard=sum(planned_sizes.parameters_of_first_shard(args)),
        gpus=args.world_size * settings_of(args).launches,
        tensor_parallel=args.tensor_model_parallel_size,
        replicas=args.data_parallel_size * args.context_parallel_size,
        groups=args.pier_groups or 1,
        is_shared_out=are_shared_out(args),
        parameter_bytes=planned_sizes.gathered_bytes(args),
        experts=planned_sizes.experts_of_first_shard(args),
        expert_owners=planned_sizes.owners(args, of_experts=True),
    )


def outer_memory(args: argparse.Namespace, config: PierConfig) -> dict[str, float]:
    """Bytes of a GPU's memory that Pier takes on a rank of a job whose sizes are known, by purpose."""
    from pier_megatron.commands import planned_sizes

    takes = planned_sizes.taken_by_outer_loop(args, config)
    state = {} if config.offload else {"outer state, --pier-offload to move it": float(takes.state)}
    residuals = {"residuals of sums, which stay on the device": float(takes.residuals)} if takes.residuals else {}
    return state | {"chunks of an outer step on their way": float(takes.work)} | residuals
