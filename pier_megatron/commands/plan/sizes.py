"""A job's sizes, from Megatron's arguments: operations, shards, and the memory that Pier takes."""

import argparse
import math

from pier_megatron.commands.plan.model import Job
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.settings import settings_of


def sizes_of(args: argparse.Namespace) -> Job:
    """Sizes of a job.

    Raises:
        PierConfigError: If the vocabulary's size is unknown.
    """
    from pier_megatron.integration import planned_job
    from pier_megatron.integration.inner.requirements import are_shared_out

    flops, shard = planned_job.operations(args), planned_job.parameters_of_largest_shard(args)
    if flops is None or shard is None:
        raise PierConfigError("the vocabulary's size comes from the tokenizer, which is not loaded here: add --vocab-size.")
    return Job(
        flops=flops,
        shard=shard,
        gpus=args.world_size * settings_of(args).launches,
        tensor_parallel=args.tensor_model_parallel_size,
        replicas=args.data_parallel_size * args.context_parallel_size,
        groups=args.pier_groups or 1,
        sent_between_stages=planned_job.elements_between_stages(args),
        is_shared_out=are_shared_out(args),
    )


def outer_memory(config: PierConfig, owned: float) -> dict[str, float]:
    """Bytes of a GPU's memory that Pier takes for so many owned parameters, by purpose."""
    from pier_megatron.outer.memory import bytes_per_parameter, work_bytes

    in_fragment = owned / config.fragments
    chunk = math.ceil(min(config.chunk_numel_on("cuda"), in_fragment))
    in_fragments = [math.ceil(in_fragment / chunk)] * config.fragments
    work = {"chunks of an outer step on their way": float(work_bytes(config, [chunk], [in_fragments]))}
    state = {} if config.offload else {"outer state, --pier-offload to move it": bytes_per_parameter(config) * owned}
    return state | work
