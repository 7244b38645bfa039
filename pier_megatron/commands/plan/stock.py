"""What a job with a stock optimizer will cost on a cluster: its synchronous step, and what flags inside a group do to it."""

import argparse
import dataclasses
from typing import Any

from pier_megatron.commands.plan import compression
from pier_megatron.commands.plan.model import HIDING, Cluster, Job, predict
from pier_megatron.commands.plan.skipping import describe_skipping, predict_skipping

VERDICT = (
    "A stock optimizer: every iteration is synchronous, and there is no outer loop to predict. What one would win: the same "
    "command with --optimizer pier."
)


def make_plan(args: argparse.Namespace, job: Job, cluster: Cluster, flops: float | None) -> dict[str, Any]:
    """Plans a job without an outer loop.

    Args:
        args: Megatron's, validated.
        job: Their sizes.
        cluster: Where it runs.
        flops: What a GPU achieves on this model in operations per second; None for the cluster's.

    Returns:
        Plain values, with the names of a plan with Pier as far as they have a meaning.
    """
    from pier_megatron.integration import planned_job

    prediction = predict(job, cluster, flops)
    # Shards of one optimizer are reduced and gathered once; whole gradients are reduced everywhere.
    wire = prediction.inner if job.is_shared_out else prediction.synchronous - prediction.compute
    skipping = predict_skipping(args, job, cluster, flops)
    return {
        "gpus": job.gpus,
        "parameters per rank": job.shard,
        "calibrated": cluster.is_calibrated,
        "memory": planned_job.memory(args),
        "memory of a GPU": cluster.memory,
        "compute": prediction.compute,
        "wire": wire,
        "compression": [dataclasses.asdict(saving) for saving in compression.savings(job, cluster, prediction.compute)],
        "modes": _modes(args, job, cluster, prediction.compute, wire, skipping),
        "skipping": skipping,
        "iterations": args.train_iters,
        "verdict": VERDICT,
    }


def _modes(
    args: argparse.Namespace,
    job: Job,
    cluster: Cluster,
    compute: float,
    wire: float,
    skipping: dict[float, dict[str, float]],
) -> dict[str, float]:
    """Seconds of an iteration as it is, and with each of the job's own flags inside a group."""
    from pier_megatron.integration.compression import choice
    from pier_megatron.integration.pipeline.skipping import is_skipping

    hidden = compute + max(wire - HIDING * compute, 0.0)
    modes = {"synchronous": compute + wire, "synchronous, overlap flags": hidden}
    codec = choice.compressed(args).get("dp") if args.pier_compress is not None else None
    if codec is not None:
        [saving] = compression.savings_of_gradients(job, cluster, compute, codec.name)
        flag = f"--pier-compress {args.pier_compress} (gradients {codec.name})"
        modes[f"synchronous, {flag}"] = compute + wire - saving.gain
        modes[f"synchronous, overlap flags, {flag}"] = hidden - saving.gain_behind_compute
    if is_skipping(args):
        fraction = args.pier_skip_fraction
        skipped = compute * skipping[fraction]["share"]
        modes[f"synchronous, --pier-skip-fraction {fraction}"] = skipped + wire
        modes[f"synchronous, overlap flags, --pier-skip-fraction {fraction}"] = skipped + max(wire - HIDING * skipped, 0.0)
    return modes


def describe(plan: dict[str, Any]) -> list[str]:
    """The lines of the text before its table."""
    return [
        f"{plan['gpus']} GPUs, {plan['parameters per rank'] / 1e9:.2f} G parameters per rank",
        f"an iteration: {plan['compute'] * 1e3:,.0f} ms of compute, {plan['wire'] * 1e3:,.0f} ms of gradients and parameters "
        "between replicas",
        *compression.table([compression.Saving(**saving) for saving in plan["compression"]]),
        *describe_skipping(plan["skipping"]),
    ]
