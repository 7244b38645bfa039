"""The rows of a plan: synchronous training, the job itself, and the job with one setting changed."""

import argparse
import dataclasses

from pier_megatron.commands.plan import fit
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, Way, predict
from pier_megatron.config import PierConfig

SYNCHRONOUS, OWN, COMPUTE = "synchronous", "this job", "compute alone"

# Multiples of the link's rate, of the picture.
_SWEPT_RATES = tuple(10 ** (power / 4) for power in range(-8, 9))


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train, over the whole run, lazy start included.

    Attributes:
        seconds: Mean iteration.
        gain: How many times as fast as synchronous training with the same flags.
        low: Lowest gain within the spread of published runs, :meth:`Cluster.spread`.
        high: Highest gain within it.
        gain_with_flags: Gain where both have Megatron's overlap flags.
        days: Days of the run.
        memory: Bytes that a GPU must have; None for synchronous training, which is not counted.
        fits: Whether a GPU has them.
    """

    seconds: float
    gain: float
    low: float
    high: float
    gain_with_flags: float
    days: float
    memory: float | None = None
    fits: bool = True


def of_job(config: PierConfig) -> Way:
    """The job's own outer steps."""
    in_pairs = config.subgroup == 2
    return Way(config.sync_interval, config.overlap, config.fragments, config.exchange_dtype, in_pairs, config.offload)


def lazy_share(config: PierConfig) -> float:
    """Share of the run that is synchronous."""
    return config.lazy_start / config.train_iters


def is_hidden(args: argparse.Namespace) -> bool:
    """Whether Megatron's overlap flags hide the communication of an iteration: all of it, as the model counts."""
    return bool(args.overlap_grad_reduce and (args.overlap_param_gather or not args.use_distributed_optimizer))


def rows(
    args: argparse.Namespace, config: PierConfig, job: Job, cluster: Cluster, is_measured: bool, fix: fit.Fix | None
) -> dict[str, Row]:
    """Predicts all ways to train, by name: ``SYNCHRONOUS``, ``OWN`` or the flags that are added to the job's own.

    Args:
        args: Megatron's, validated.
        config: Settings of the job.
        job: Its sizes.
        cluster: Cluster on which it runs.
        is_measured: Whether the cluster's TFLOP/s are of this job.
        fix: What makes a job fit that does not.
    """
    hidden, ways = is_hidden(args), {OWN: (args, config)}
    if fix is not None:
        # Recomputed iterations are others than these.
        ways |= {} if fix.recomputes else {fix.flags: (fix.args, fix.config or config)}
    elif job.groups > 1:
        other = 0 if config.overlap else config.sync_interval // 2
        changes: dict[str, dict[str, object]] = {
            f"--pier-overlap {other}": {"overlap": other},
            "--pier-exchange-dtype int8": {"exchange_dtype": "int8"},
        }
        for flags, change in changes.items():
            changed = fit.changed_settings(args, config, **change)
            if changed is not None and of_job(changed) != of_job(config):
                ways[flags] = (args, changed)
    synchronous = predict(job, cluster).of_synchronous(hidden)
    found = {SYNCHRONOUS: synchronous_row(synchronous, config.train_iters)}
    for name, (changed_args, changed) in ways.items():
        memory = fit.needed(fit.memory_of(changed_args, changed), changed_args)
        row = gain_of(of_job(changed), job, cluster, config, is_measured, hidden)
        found[name] = dataclasses.replace(row, memory=memory, fits=memory <= cluster.memory)
    return found


def gain_of(way: Way, job: Job, cluster: Cluster, config: PierConfig, is_measured: bool, hidden: bool) -> Row:
    """Predicts one way to train.

    Args:
        way: Outer steps.
        job: The job.
        cluster: Cluster on which it runs.
        config: Lazy start and length of the run.
        is_measured: Whether the cluster's TFLOP/s are of this job.
        hidden: Whether it has Megatron's overlap flags, see :func:`is_hidden`; synchronous training has them then, too.
    """
    lazy = lazy_share(config)
    predictions = [predict(job, each) for each in (cluster, *cluster.spread(is_measured))]
    gain, *ends = (each.of_synchronous(hidden) / each.mean_of_run(way, lazy, hidden) for each in predictions)
    seconds = predictions[0].mean_of_run(way, lazy, hidden)
    with_flags = predictions[0].of_synchronous(True) / predictions[0].mean_of_run(way, lazy)
    # The ends may swap: if Pier loses, the slowest link saves most per iteration and costs most per outer step.
    return Row(seconds, gain, min(gain, *ends), max(gain, *ends), with_flags, seconds * config.train_iters / 86400)


def synchronous_row(seconds: float, iterations: int) -> Row:
    """The row of synchronous training, whose iterations take so long."""
    return Row(seconds, 1.0, 1.0, 1.0, 1.0, seconds * iterations / 86400)


def over_rates(args: argparse.Namespace, job: Job, cluster: Cluster, config: PierConfig) -> dict[float, dict[str, float]]:
    """Mean iterations in seconds, by the bytes per second of the slowest link that the job uses."""
    name = "site_bandwidth" if cluster.sites(job.gpus) > 1 else "node_bandwidth"
    found, own, lazy, hidden = {}, of_job(config), lazy_share(config), is_hidden(args)
    overlapped = dataclasses.replace(own, overlap=own.overlap or own.interval // 2)
    for rate in (factor * getattr(cluster, name) for factor in _SWEPT_RATES):
        each = predict(job, dataclasses.replace(cluster, **{name: rate}))
        found[rate] = {SYNCHRONOUS: each.of_synchronous(hidden), OWN: each.mean_of_run(own, lazy, hidden)}
        found[rate] |= {f"--pier-overlap {overlapped.overlap}": each.mean_of_run(overlapped, lazy, hidden)}
        found[rate] |= {COMPUTE: each.compute}
    return found
