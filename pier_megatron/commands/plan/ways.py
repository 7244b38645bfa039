"""The ways to train a job, each with its mean iteration, and how they change with the interval, the link and the GPUs."""

import dataclasses

from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, Prediction, Way, predict
from pier_megatron.config import PierConfig

_INTERVALS = (10, 50, 200, 500)

# Intervals, and multiples of the link's rate, of the picture.
_SWEPT_INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_SWEPT_RATES = tuple(10 ** (power / 4) for power in range(-8, 9))

SYNCHRONOUS, HIDDEN = "synchronous", "synchronous, overlap flags"

BLOCKING, OVERLAPPED, COMPUTE = "Pier, blocking", "Pier, overlapped by H / 2", "compute alone"
"""Ways of a sweep."""


def of_job(config: PierConfig) -> Way:
    """The job's own outer steps."""
    in_pairs = config.subgroup == 2
    return Way(config.sync_interval, config.overlap, config.fragments, config.exchange_dtype, in_pairs, config.offload)


def half_overlapped(way: Way) -> Way:
    """The same with each exchange hidden behind half an interval."""
    return dataclasses.replace(way, overlap=way.interval // 2)


def lazy_share(config: PierConfig) -> float:
    """Share of the run that is synchronous."""
    return config.lazy_start / config.train_iters


def modes(prediction: Prediction, config: PierConfig) -> tuple[dict[str, float], str]:
    """Seconds of the mean iteration of a whole run, by the way it is trained; and which of them is the job itself."""
    own, lazy = of_job(config), lazy_share(config)
    found = {SYNCHRONOUS: prediction.synchronous, HIDDEN: prediction.synchronous_hidden}
    is_own: dict[Way, str] = {}
    # With fewer than two outer steps there is nothing to compare.
    intervals = {interval for interval in _INTERVALS if interval <= config.train_iters / 2}
    for interval in sorted({*intervals, own.interval}):
        blocking = Way(interval, offload=own.offload)
        found[f"DiLoCo from the first iteration, H = {interval}"] = prediction.mean_of_run(blocking, 0.0)
        for name, way in _ways(blocking).items():
            # With H = 1 half an interval is none.
            is_own.setdefault(way, name)
            found[name] = prediction.mean_of_run(way, lazy)
        if interval == own.interval and own not in is_own:
            is_own[own] = f"Pier, H = {interval}, {_name(own)}"
            found[is_own[own]] = prediction.mean_of_run(own, lazy)
    return found, is_own[own]


def _ways(blocking: Way) -> dict[str, Way]:
    interval = blocking.interval
    return {
        f"Pier, H = {interval}, blocking": blocking,
        f"Pier, H = {interval}, overlapped by H / 2": half_overlapped(blocking),
        f"Pier, H = {interval}, 4 fragments, each overlapped by H / 8": dataclasses.replace(
            blocking, overlap=interval // 8, fragments=4
        ),
        f"Pier, H = {interval}, blocking, int8": dataclasses.replace(blocking, dtype="int8"),
        f"NoLoCo, H = {interval}, blocking": dataclasses.replace(blocking, in_pairs=True),
    }


def _name(way: Way) -> str:
    parts = [f"overlapped by {way.overlap}" if way.overlap else "blocking"]
    parts += [f"{way.fragments} fragments"] if way.fragments > 1 else []
    parts += [way.dtype] if way.dtype != "fp32" else []
    return ", ".join([*parts, "in pairs"] if way.in_pairs else parts)


def sites(job: Job, cluster: Cluster, config: PierConfig) -> dict[str, float]:
    """The same where sites are no nearer than nodes, and with one group per site; nothing for a job inside one site."""
    number = cluster.sites(job.gpus)
    if number == 1:
        return {}
    own, lazy = of_job(config), lazy_share(config)
    near = predict(job, dataclasses.replace(cluster, nodes_per_site=0, site_bandwidth=0.0))
    found = {
        f"{HIDDEN}, all in one site": near.synchronous_hidden,
        f"this job, H = {own.interval}, all in one site": near.mean_of_run(own, lazy),
    }
    if number != job.groups and job.replicas % number == 0:
        apart = predict(dataclasses.replace(job, groups=number), cluster)
        found[f"this job, H = {own.interval}, --pier-groups {number}: one per site"] = apart.mean_of_run(own, lazy)
    return found


def over_intervals(prediction: Prediction, config: PierConfig) -> dict[float, dict[str, float]]:
    """Mean iterations in seconds, by the interval."""
    swept = sorted({*_SWEPT_INTERVALS, config.sync_interval})
    return {interval: _swept(prediction, dataclasses.replace(of_job(config), interval=interval), config) for interval in swept}


def over_rates(job: Job, cluster: Cluster, config: PierConfig) -> dict[float, dict[str, float]]:
    """Mean iterations in seconds, by the bytes per second of the slowest link that the job uses."""
    name = "site_bandwidth" if cluster.sites(job.gpus) > 1 else "node_bandwidth"
    rate = getattr(cluster, name)
    found = {}
    for factor in _SWEPT_RATES:
        prediction = predict(job, dataclasses.replace(cluster, **{name: factor * rate}))
        found[factor * rate] = _swept(prediction, of_job(config), config)
    return found


def over_gpus(job: Job, global_batch: int, cluster: Cluster, config: PierConfig) -> dict[int, dict[str, float]]:
    """Mean iterations in seconds of more and fewer groups of the same size on the same global batch, by the number of GPUs."""
    found = {}
    for factor in (2.0**power for power in range(-10, 11)):
        groups = job.groups * factor
        # More replicas than the batch has sequences would have nothing to train on.
        if groups != int(groups) or job.replicas * factor > global_batch:
            continue
        scaled = dataclasses.replace(job, gpus=int(job.gpus * factor), replicas=int(job.replicas * factor), groups=int(groups))
        found[scaled.gpus] = _swept(predict(scaled, cluster), of_job(config), config)
    return found


def _swept(prediction: Prediction, way: Way, config: PierConfig) -> dict[str, float]:
    lazy, blocking = lazy_share(config), dataclasses.replace(way, overlap=0)
    return {
        SYNCHRONOUS: prediction.synchronous,
        HIDDEN: prediction.synchronous_hidden,
        BLOCKING: prediction.mean_of_run(blocking, lazy),
        OVERLAPPED: prediction.mean_of_run(half_overlapped(way), lazy),
        COMPUTE: prediction.compute,
    }
