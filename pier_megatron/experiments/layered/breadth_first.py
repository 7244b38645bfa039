"""Breadth-first pipelines: each virtual stage takes all micro-batches of a step before the next one begins.

Layered gradient accumulation in a modular pipeline (arXiv 2106.02679), at the granularity of virtual stages (arXiv 2211.05953).
Megatron's interleaved schedule takes ``--microbatch-group-size-per-virtual-pipeline-stage`` micro-batches through a stage at a
time, as many as there are pipeline ranks by default: depth-first. Breadth-first is all of them, a number that changes in a
ramp-up of the batch and is another one in evaluation, and that Megatron looks at in each call.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pier_megatron.errors import PierConfigError
from pier_megatron.features import Cost
from pier_megatron.megatron_api import batches, versions

if TYPE_CHECKING:
    from torch import nn

# Name in Megatron's configuration and among its arguments.
_GROUP_SIZE = "microbatch_group_size_per_vp_stage"

REFUSED = ("use_megatron_fsdp", _GROUP_SIZE)
"""See :func:`prepare`."""


def run[R](schedule: Callable[..., R], /, *, model: Sequence["nn.Module"], num_microbatches: int, **kwargs: object) -> R:
    """Runs Megatron's interleaved schedule, of a training or an evaluation step, with all its micro-batches in one group.

    Args:
        schedule: Megatron's function.
        model: This rank's virtual stages, in order.
        num_microbatches: Number of micro-batches of this step.
        kwargs: Other arguments of the schedule.
    """
    config = versions.require("megatron.core.utils", "get_model_config")(model[0])
    with versions.replaced(config, {_GROUP_SIZE: num_microbatches}):
        return schedule(model=model, num_microbatches=num_microbatches, **kwargs)


def prepare(args: argparse.Namespace) -> None:
    """Refuses what is known before Megatron's own checks, whose reasons would not help.

    Raises:
        PierConfigError: With the flag, the values and a remedy.
    """
    ranks = args.pipeline_model_parallel_size
    if args.pier_layered is not True:
        raise PierConfigError(
            f"--pier-layered {args.pier_layered} with --pipeline-model-parallel-size {ranks}: virtual stages take all "
            f"micro-batches of a step at a time. For {args.pier_layered} at a time use Megatron's own "
            f"--microbatch-group-size-per-virtual-pipeline-stage {args.pier_layered}, without --pier-layered."
        )
    if ranks == 2 and not args.overlap_p2p_comm:
        raise PierConfigError(
            "--pier-layered with --pipeline-model-parallel-size 2 and --no-overlap-p2p-communication: virtual stages on two "
            "ranks would put several transfers between the same two into one batch, which Megatron refuses. Drop "
            "--no-overlap-p2p-communication, or use --pipeline-model-parallel-size 3 or more."
        )
    if getattr(args, "use_megatron_fsdp", False):
        raise PierConfigError(
            f"--use-megatron-fsdp cannot be used with --pier-layered, which needs --pipeline-model-parallel-size {ranks}: "
            "Megatron lays its FSDP over data-, expert- and tensor-parallel ranks alone, and fails to build the model where "
            "there are pipeline ranks too. Use --use-distributed-optimizer, or drop --pier-layered and the pipeline."
        )
    given = getattr(args, _GROUP_SIZE)
    if given is not None:
        raise PierConfigError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {given} contradicts --pier-layered, which sets it to the "
            "number of micro-batches of each step. Drop one of them."
        )


def check(args: argparse.Namespace) -> None:
    """Refuses one stage per rank and too few micro-batches, and sets the order of the virtual stages.

    Raises:
        PierConfigError: With the flag, the arithmetic and a remedy.
    """
    check_virtual_stages(args)
    check_micro_batches(args)
    # What captures CUDA graphs looks at it between two calls of the schedule.
    setattr(args, _GROUP_SIZE, max(batches.training_phases(args).values()))


def check_virtual_stages(args: argparse.Namespace) -> None:
    """Refuses one stage per rank; of arguments that have been validated.

    Raises:
        PierConfigError: With the flag, the arithmetic of the fully modular pipeline, and a remedy.
    """
    if args.virtual_pipeline_model_parallel_size is not None:
        return
    layers, ranks = args.num_layers, args.pipeline_model_parallel_size
    remedy = "Add --num-virtual-stages-per-pipeline-rank V, 2 or more"
    if layers % ranks == 0 and layers > ranks:
        remedy += (
            f"; V = {layers // ranks} (--num-layers {layers} / --pipeline-model-parallel-size {ranks}) makes every layer a "
            f"stage, layer l on rank l mod {ranks}, which is the fully modular pipeline"
        )
    raise PierConfigError(
        f"--pier-layered needs virtual stages: with one stage on each of the {ranks} pipeline ranks there is no order to "
        f"choose. {remedy}. Megatron's other flags for them are --num-layers-per-virtual-pipeline-stage and "
        "--pipeline-model-parallel-layout."
    )


def check_micro_batches(args: argparse.Namespace) -> None:
    """Refuses steps with fewer micro-batches than pipeline ranks, at which Megatron stops when it comes to them.

    Raises:
        PierConfigError: With the flag, the arithmetic and a remedy.
    """
    for source, batch, count in batches.phases_to_come(args):
        _check_count(args, source, batch, args.micro_batch_size, count)
    if args.eval_iters or getattr(args, "full_validation", False):
        batch, count = batches.evaluation_phase(args)
        micro_batch = getattr(args, "eval_micro_batch_size", args.micro_batch_size)
        has_flag = hasattr(args, "eval_global_batch_size")
        source = f"{'--eval-global-batch-size' if has_flag else 'evaluation with --global-batch-size'} {batch}"
        _check_count(args, source, batch, micro_batch, count)


def _check_count(args: argparse.Namespace, source: str, batch: int, micro_batch: int, count: int) -> None:
    ranks, replicas = args.pipeline_model_parallel_size, batches.replicas(args)
    least = ranks * micro_batch * replicas
    if count < ranks:
        raise PierConfigError(
            f"--pier-layered: {source}: {batch} samples / (micro-batches of {micro_batch} x {replicas} replicas) = {count} "
            f"micro-batches, but virtual stages need one for each of --pipeline-model-parallel-size {ranks}. Use "
            f"{ranks} x {micro_batch} x {replicas} = {least} samples or more, or smaller micro-batches."
        )


def in_flight(args: argparse.Namespace, micro_batches: int, group_size: int) -> int:
    """Most pairs of a virtual stage and a micro-batch whose activations the first pipeline rank holds at once.

    One more than its forward passes before the first backward one: ``get_pp_rank_microbatches`` in Megatron's ``schedules.py``.

    Args:
        args: Megatron's, validated.
        micro_batches: Number of micro-batches of a training step.
        group_size: Micro-batches that a virtual stage takes at a time.
    """
    ranks, stages = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    ahead = 2 * (ranks - 1) + (stages - 1) * group_size + bool(getattr(args, "overlap_moe_expert_parallel_comm", False))
    return int(min(ahead + 1, stages * micro_batches))


def cost(args: argparse.Namespace) -> Cost:
    """Says how many activations of the largest step there are at once, as a multiple of those of Megatron's own order."""
    most = max(batches.training_phases(args).values())
    return Cost(activations=in_flight(args, most, most) / in_flight(args, most, args.pipeline_model_parallel_size))


def describe(args: argparse.Namespace) -> list[str]:
    """Says what the order will be and what it costs, line by line."""
    ranks, stages = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    counts = sorted(batches.training_phases(args).values())
    most = counts[-1]
    held, depth_first = (in_flight(args, most, size) for size in (most, ranks))
    return [
        f"Pier layered: breadth-first over {ranks} pipeline ranks of {stages} virtual stages: a stage runs all "
        f"{'-'.join(map(str, dict.fromkeys((counts[0], most))))} micro-batches of a step before the next stage begins",
        f"  the first pipeline rank keeps activations of up to {held} of {stages * most} stage-micro-batches at once; "
        f"depth-first, of {depth_first} ({held / depth_first:.2f} x)",
    ]


def warnings(args: argparse.Namespace) -> list[str]:
    """Says where the order is Megatron's own."""
    ranks = args.pipeline_model_parallel_size
    if max(batches.training_phases(args).values()) > ranks:
        return []
    return [
        f"--pier-layered: a step has {ranks} micro-batches, as many as --pipeline-model-parallel-size. In Megatron's own order "
        "a virtual stage takes as many at a time: nothing changes. Use larger batches or smaller "
        "micro-batches."
    ]
