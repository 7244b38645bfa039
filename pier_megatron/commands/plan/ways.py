"""The rows of a plan: synchronous training, the job itself, and the job with one setting changed."""

import argparse
import dataclasses

from pier_megatron.commands.plan import fit
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, predict
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


def is_hidden(args: argparse.Namespace) -> bool:
    """Whether Megatron's overlap flags hide the communication of an iteration: all of it, as the model counts."""
    return bool(args.overlap_grad_reduce and (args.overlap_param_gather or not args.use_distributed_optimizer))


def rows(
    args: argparse.Namespace, config: PierConfig, job: Job, cluster: Cluster, is_measured: bool, fix: fit.Fix | None
) -> dict[str, Row]:
    """Predicts all ways to train, by name: ``SYNCHRONOUS``, ``OWN`` or the flags that are added to the job's own.

    ``is_measured`` says that the cluster's TFLOP/s are the job's own, ``fix`` what makes it fit if it does not.
    """
    hidden, ways = is_hidden(args), {OWN: (args, config)}
    if fix is not None:
        # Recomputed iterations are others than these.
        ways |= {} if fix.recomputes else {fix.flags: (fix.args, fix.config or config)}
    elif job.groups > 1:
        int8 = {"--pier-exchange-dtype int8": fit.changed_settings(args, config, exchange_dtype="int8")}
        for flags, changed in (_with_other_overlap(args, config) | int8).items():
            if changed is not None and changed != config:
                ways[flags] = (args, changed)
    synchronous = predict(job, cluster).of_synchronous(hidden)
    found = {SYNCHRONOUS: synchronous_row(synchronous, config.train_iters)}
    for name, (changed_args, changed) in ways.items():
        memory = fit.needed(fit.memory_of(changed_args, changed), changed_args)
        row = gain_of(changed, job, cluster, is_measured, hidden)
        found[name] = dataclasses.replace(row, memory=memory, fits=memory <= cluster.memory)
    return found


def _with_other_overlap(args: argparse.Namespace, config: PierConfig) -> dict[str, PierConfig | None]:
    """The job with its exchange hidden behind half an interval, or blocking if it overlaps; None if it would not start."""
    overlap = 0 if config.overlap else config.sync_interval // 2
    return {f"--pier-overlap {overlap}": fit.changed_settings(args, config, overlap=overlap)}


def gain_of(config: PierConfig, job: Job, cluster: Cluster, is_measured: bool, hidden: bool) -> Row:
    """Predicts one way to train; ``hidden`` as of :func:`is_hidden`, which holds for synchronous training, too."""
    predictions = [predict(job, each) for each in (cluster, *cluster.spread(is_measured))]
    gain, *ends = (each.of_synchronous(hidden) / each.mean_of_run(config, hidden) for each in predictions)
    seconds = predictions[0].mean_of_run(config, hidden)
    with_flags = predictions[0].of_synchronous(True) / predictions[0].mean_of_run(config)
    # The ends may swap: if Pier loses, the slowest link saves most per iteration and costs most per outer step.
    return Row(seconds, gain, min(gain, *ends), max(gain, *ends), with_flags, seconds * config.train_iters / 86400)


def synchronous_row(seconds: float, iterations: int) -> Row:
    """The row of synchronous training, whose iterations take so long."""
    return Row(seconds, 1.0, 1.0, 1.0, 1.0, seconds * iterations / 86400)


def over_rates(args: argparse.Namespace, job: Job, cluster: Cluster, config: PierConfig) -> dict[float, dict[str, float]]:
    """Mean iterations in seconds, by the bytes per second of the slowest link that the job uses."""
    name = "site_bandwidth" if cluster.sites(job.gpus) > 1 else "node_bandwidth"
    found, hidden, configs = {}, is_hidden(args), {OWN: config} | _with_other_overlap(args, config)
    for rate in (factor * getattr(cluster, name) for factor in _SWEPT_RATES):
        each = predict(job, dataclasses.replace(cluster, **{name: rate}))
        runs = {name: each.mean_of_run(changed, hidden) for name, changed in configs.items() if changed is not None}
        found[rate] = {SYNCHRONOUS: each.of_synchronous(hidden), **runs, COMPUTE: each.compute}
    return found
