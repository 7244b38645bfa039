"""What iterations would take if micro-batches skipped pipeline stages, by the simulator of the schedule."""

import argparse
import dataclasses

from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, bandwidth_between_stages, predict
from pier_megatron.pipeline.paths import most, wanted

FRACTIONS = (0.0, 0.25, 0.33, 0.5)

ACTIVATION = 2
"""Bytes of an activation between stages, in bf16."""


def predict_skipping(args: argparse.Namespace, job: Job, cluster: Cluster) -> dict[float, dict[str, float]]:
    """Predicts iterations of the local phase by share that is skipped; nothing for a job without inner stages.

    The bubble of the whole step is in what a GPU achieves, as everywhere in the planner. What is skipped makes the operations
    of a step fewer by as much as the simulated step becomes shorter, with the table of paths that the run itself would have.

    Args:
        args: Megatron's, validated.
        job: Their sizes.
        cluster: Cluster on which it runs.

    Returns:
        ``share``, the simulated time of a step as a multiple of a whole one, and ``local``, an iteration in seconds.
    """
    from pier_megatron.features.skipping import feature as skipping
    from pier_megatron.megatron_api import batches

    stages, micro_batches = skipping.number_of_stages(args), max(batches.training_phases(args).values())
    layer_passes = 3 * micro_batches * args.num_layers / args.pipeline_model_parallel_size
    forward = predict(job, cluster).compute / layer_passes
    found = {}
    fractions = sorted({*FRACTIONS, getattr(args, "pier_skip_fraction", None) or 0.0})
    for fraction in fractions if most(stages, micro_batches) else ():
        if wanted(stages, micro_batches, fraction) > most(stages, micro_batches):
            continue
        skipped = argparse.Namespace(**vars(args) | {"pier_skip_fraction": fraction})
        share = skipping.share_of_whole_step(args, skipping.paths(skipped, micro_batches), _message(args, cluster) / forward)
        local = predict(dataclasses.replace(job, flops=job.flops * share), cluster).local
        found[fraction] = {"share": share, "local": local}
    return found


def _message(args: argparse.Namespace, cluster: Cluster) -> float:
    """Seconds of a message between stages; on other nodes unless all ranks are on one."""
    from pier_megatron.integration.planned_sizes import elements_of_message

    nbytes = ACTIVATION * elements_of_message(args)
    latency = 0.0 if args.world_size <= cluster.gpus_per_node else cluster.latency
    return nbytes / bandwidth_between_stages(args.world_size, cluster) + latency


def describe_skipping(predicted: dict[float, dict[str, float]], phase: str = "") -> list[str]:
    """The same as lines; none for a job without inner stages. ``phase`` says of which iterations, where not of all."""
    if not predicted:
        return []
    steps = (
        f"{fraction:g}: {found['local'] * 1e3:,.0f} ms ({found['share']:.3f} x the compute)"
        for fraction, found in predicted.items()
    )
    return [f"an iteration{phase} by --pier-skip-fraction (simulated; costs quality): {', '.join(steps)}"]
