"""The answer in one line: whether to use Pier for this job, over the whole run, if it fits at all."""

import dataclasses

from pier_megatron.commands.plan import ways
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.fit import RECOMPUTE, does_not_fit
from pier_megatron.commands.plan.model import Job, Way, predict
from pier_megatron.config import PierConfig

# Below this gain over synchronous training nobody should take on another optimizer.
_WORTH = 1.05


@dataclasses.dataclass(frozen=True)
class Gain:
    """How many times as fast as synchronous training a whole run is, lazy start included.

    Attributes:
        expected: Predicted with Megatron's overlap flags on both sides.
        low: Lowest value within the spread of published runs, :meth:`Cluster.spread`.
        high: Highest value within it.
        without_flags: Predicted without the overlap flags on both sides.
        days: Days of the run.
        synchronous_days: Days of synchronous training with overlap flags.
    """

    expected: float
    low: float
    high: float
    without_flags: float
    days: float
    synchronous_days: float


def gain_of(way: Way, job: Job, cluster: Cluster, config: PierConfig, is_measured: bool) -> Gain:
    """Predicts the gain of a way to train.

    Args:
        way: Outer steps.
        job: The job.
        cluster: Cluster on which it runs.
        config: Lazy start and length of the run.
        is_measured: Whether the cluster's TFLOP/s are of this job.
    """
    lazy, days = ways.lazy_share(config), config.train_iters / 86400
    predictions = [predict(job, each) for each in (cluster, *cluster.spread(is_measured))]
    expected, *ends = (found.synchronous_hidden / found.mean_of_run(way, lazy) for found in predictions)
    own = predictions[0]
    return Gain(
        expected,
        # Where Pier loses, the end at which it saves most is also the one at which an outer step costs most.
        min(expected, *ends),
        max(expected, *ends),
        own.synchronous / own.mean_of_run(way, lazy, hidden=False),
        own.mean_of_run(way, lazy) * days,
        own.synchronous_hidden * days,
    )


def verdict(
    job: Job,
    cluster: Cluster,
    config: PierConfig,
    *,
    source: str,
    is_measured: bool,
    memory: float,
    remedy: tuple[str, float] | None,
    can_overlap: bool,
) -> str:
    """The line.

    Args:
        job: The job.
        cluster: Cluster on which it runs.
        config: Its settings.
        source: Origin of the TFLOP/s, and how to have better ones.
        is_measured: Whether they are of this job.
        memory: Bytes that a GPU must have.
        remedy: Flags that make the job fit, and the bytes that it needs then.
        can_overlap: Whether the job starts and fits with ``--pier-overlap`` of half an interval, too.
    """
    problem = does_not_fit(memory, cluster, remedy)
    if problem and (remedy is None or RECOMPUTE in remedy[0]):
        # A job that has to change more than its micro-batch has other iterations than these.
        return problem + "Plan it with that change."
    if job.groups == 1:
        return problem + (
            "Do not use it for speed: there is one group, hence nothing to relax. With AdamW inside, outer steps of one group "
            "lowered the loss in small runs (docs/frontier.md#one-group)."
        )
    way = ways.of_job(config)
    if problem and remedy is not None and "--pier-offload" in remedy[0]:
        way = dataclasses.replace(way, offload=True)
    gain = gain_of(way, job, cluster, config, is_measured)
    better = gain_of(ways.half_overlapped(way), job, cluster, config, is_measured)
    how = ""
    if can_overlap and way.overlap == 0 and not way.in_pairs and better.expected > 1.02 * gain.expected:
        gain, how = better, f"with --pier-overlap {way.interval // 2}"
    answer = f"Then {how}".strip() if problem else _answer(gain, how, is_measured)
    return (
        f"{problem}{answer}: {gain.expected:.2f} x as fast as synchronous training over the whole run ({gain.low:.2f} to "
        f"{gain.high:.2f} x by the spread of published runs), {gain.days:.2f} days in place of {gain.synchronous_days:.2f}; "
        f"{gain.without_flags:.2f} x if neither overlaps gradients. {cluster.flops / 1e12:.3g} TFLOP/s per GPU {source}."
    )


def _answer(gain: Gain, how: str, is_measured: bool) -> str:
    if gain.low >= _WORTH or (is_measured and gain.expected >= _WORTH):
        return f"Use it {how}".strip()
    if gain.high < _WORTH or is_measured:
        return f"Do not use it, not even {how}" if how else "Do not use it"
    return f"Measure first, {how}" if how else "Measure first"
