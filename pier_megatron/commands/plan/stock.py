"""What a job with a stock optimizer will cost on a cluster: its synchronous step, and what flags inside a group do to it."""

import argparse
import dataclasses

from pier_megatron.commands.plan import compression_gain
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.fit import does_not_fit
from pier_megatron.commands.plan.model import HIDING, Job, Plan, predict
from pier_megatron.commands.plan.skipping_gain import describe_skipping, predict_skipping


def verdict(needed: float, cluster: Cluster, remedy: tuple[str, float] | None, source: str) -> str:
    """The answer in one line.

    Args:
        needed: Bytes that a GPU must have.
        cluster: Cluster on which the job runs.
        remedy: Flags that make it fit, and the bytes that it needs then.
        source: Words for where the TFLOP/s come from.
    """
    return does_not_fit(needed, cluster, remedy) + (
        "A stock optimizer: every iteration is synchronous, and there is no outer loop to predict, with "
        f"{cluster.flops / 1e12:.3g} TFLOP/s per GPU {source}. What one would win: the same command with --optimizer pier."
    )


def make_plan(args: argparse.Namespace, job: Job, cluster: Cluster) -> Plan:
    """What a job without an outer loop makes of its flags: plain values, by the names of a plan with Pier.

    Args:
        args: Megatron's, validated.
        job: Their sizes.
        cluster: Cluster on which it runs.
    """
    prediction = predict(job, cluster)
    # Shards of one optimizer are reduced and gathered once; whole gradients are reduced everywhere.
    wire = prediction.inner if job.is_shared_out else prediction.synchronous - prediction.compute
    skipping = predict_skipping(args, job, cluster)
    return {
        "compute": prediction.compute,
        "wire": wire,
        "compression": [dataclasses.asdict(saving) for saving in compression_gain.savings(job, cluster, prediction.compute)],
        "modes": _modes(args, job, cluster, prediction.compute, wire, skipping),
        "skipping": skipping,
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
    from pier_megatron.features.compression.feature import compressed
    from pier_megatron.features.skipping.feature import is_skipping

    hidden = compute + max(wire - HIDING * compute, 0.0)
    modes = {"synchronous": compute + wire, "synchronous, overlap flags": hidden}
    codec = compressed(args).get("dp") if args.pier_compress is not None else None
    if codec is not None:
        [saving] = compression_gain.savings_of_gradients(job, cluster, compute, codec.name)
        flag = f"--pier-compress {args.pier_compress} (gradients {codec.name})"
        modes[f"synchronous, {flag}"] = compute + wire - saving.gain
        modes[f"synchronous, overlap flags, {flag}"] = hidden - saving.gain_behind_compute
    if is_skipping(args):
        fraction = args.pier_skip_fraction
        skipped = compute * skipping[fraction]["share"]
        modes[f"synchronous, --pier-skip-fraction {fraction}"] = skipped + wire
        modes[f"synchronous, overlap flags, --pier-skip-fraction {fraction}"] = skipped + max(wire - HIDING * skipped, 0.0)
    return modes


def describe(plan: Plan) -> list[str]:
    """The lines of the text before its table."""
    return [
        f"{plan['gpus']} GPUs, {plan['parameters per rank'] / 1e9:.2f} G parameters per rank",
        f"an iteration: {plan['compute'] * 1e3:,.0f} ms of compute, {plan['wire'] * 1e3:,.0f} ms of gradients and parameters "
        "between replicas",
        *compression_gain.lines(plan),
        *describe_skipping(plan["skipping"]),
    ]
