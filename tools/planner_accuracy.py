"""The planner against every published iteration time of Pier and its synchronous baseline: ``tools/planner_accuracy.py``.

Each point is predicted twice. "as a user gets it": with the cluster's one TFLOP/s figure and the planner's own outer step, as
`plan --cluster` does. "TFLOP/s measured": with what a GPU achieved on the smallest published run of the same model and layout,
as `plan --tflops` or `--log` does, and with the authors' outer step. That is one collective per tensor through host memory; its
cost is a fit of its own: seconds per gigabyte of a node's shards and doubling of the groups.

"fitted" marks what constants were chosen on: the first run of each layout for its TFLOP/s; GPT-2 XL on the A100 machine, its
largest run on the GH200 one and the one-node runs for bandwidths and overheads.
"""

import csv
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from pier_megatron.commands.plan.cluster import CLUSTERS, Cluster
from pier_megatron.commands.plan.model import Job, achieved, predict
from pier_megatron.config import PierConfig

_DATA = Path(__file__).with_name("published_timings.csv")

# Layers, hidden size, parameters.
_SHAPES = {
    "small": (12, 768, 124e6),
    "medium": (24, 1024, 355e6),
    "xl": (48, 1600, 1558e6),
    "7b": (32, 4096, 6.7e9),
    "70b": (80, 8192, 69e9),
}
_BATCH, _SEQUENCE, _VOCABULARY = 512, 1024, 50304

# Share of a run that is synchronous.
_LAZY = 0.1

# Runs on one node differ by less than this.
_NOISE = 1.02

# Time of the authors' outer step, in seconds per gigabyte of FP32 on a node and doubling of the groups.
_PUBLISHED_OUTER_STEP = {"perlmutter": 0.35, "vista": 0.16}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A published figure of a run, and what the planner says.

    Attributes:
        run: Name of the run.
        published: Published figure.
        plain: Figure as a user gets it.
        measured: Figure with TFLOP/s measured.
    """

    run: str
    published: float
    plain: float
    measured: float

    @property
    def error(self) -> float:
        """Error of the prediction as a user gets it, as a share of what was published."""
        return self.plain / self.published - 1

    @property
    def measured_error(self) -> float:
        """The same with TFLOP/s measured."""
        return self.measured / self.published - 1


@dataclasses.dataclass(frozen=True)
class Point(Prediction):
    """One published time, in seconds.

    Attributes:
        what: Synchronous or local iteration.
        is_fitted: Whether constants were chosen on it.
    """

    what: str
    is_fitted: bool


@dataclasses.dataclass(frozen=True)
class Gain(Prediction):
    """Speed-up of one published run over synchronous training, lazy start included and nothing overlapped.

    Attributes:
        spread: Lowest and highest speed-up that the verdict then names.
        measured_spread: The same spread with TFLOP/s measured.
    """

    spread: tuple[float, float]
    measured_spread: tuple[float, float]


def points() -> list[Point]:
    """Compares the planner with the published times."""
    return [point for row in _rows() for point in _points(row)]


def _points(row: dict[str, str]) -> list[Point]:
    job, cluster, at_measured = _job(row), CLUSTERS[row["machine"]], _at_measured(row)
    plain, measured = predict(job, cluster), predict(job, at_measured)
    is_first, is_source = _first(row) == row, _is_source_of_constants(row)
    found = []
    if row["ddp_ms"]:
        fitted = is_source or (is_first and not row["local_ms"])
        times = (float(row["ddp_ms"]) / 1e3, plain.synchronous, measured.synchronous)
        found.append(Point(_name(row), *times, "synchronous", fitted))
    if row["local_ms"]:
        interval = int(row["H"])
        local = measured.local + _outer_step(row, cluster) / interval
        times = (float(row["local_ms"]) / 1e3, plain.mean_iteration(_steps(interval)), local)
        found.append(Point(_name(row), *times, f"local, H = {interval}", is_first or is_source))
    return found


def gains() -> list[Gain]:
    """Published and predicted speed-up of each run that has both times."""
    found = []
    for row in _rows():
        if row["ddp_ms"] and row["local_ms"]:
            job, interval = _job(row), int(row["H"])
            cluster, at_measured = CLUSTERS[row["machine"]], _at_measured(row)
            synchronous, local = _points(row)
            published, measured = (
                _of_run(*times) for times in ((synchronous.published, local.published), (synchronous.measured, local.measured))
            )
            low, high = (_gain(job, each, interval) for each in cluster.spread(is_measured=False))
            measured_low, measured_high = (_gain(job, each, interval) for each in at_measured.spread(is_measured=True))
            plain = _gain(job, cluster, interval)
            found.append(Gain(_name(row), published, plain, measured, (low, high), (measured_low, measured_high)))
    return found


def _gain(job: Job, cluster: Cluster, interval: int) -> float:
    prediction = predict(job, cluster)
    return _of_run(prediction.synchronous, prediction.mean_iteration(_steps(interval), hidden=False))


def _steps(interval: int) -> PierConfig:
    return PierConfig(train_iters=100 * interval, groups=2, sync_interval=interval)


def _of_run(synchronous: float, local: float) -> float:
    return synchronous / (_LAZY * synchronous + (1 - _LAZY) * local)


def flops_spread() -> tuple[float, float]:
    """Lowest and highest TFLOP/s of a published run, as multiples of its cluster's figure."""
    found = [_achieved(row) / CLUSTERS[row["machine"]].flops for row in _rows() if row["local_ms"]]
    return min(found), max(found)


def link_spread() -> tuple[float, float]:
    """Lowest and highest rate at which a run on several nodes reduced its gradients, as multiples of the predicted one."""
    found = []
    for row in _rows():
        if row["ddp_ms"] and int(row["gpus"]) > CLUSTERS[row["machine"]].gpus_per_node:
            prediction = predict(_job(row), _at_measured(row))
            published = float(row["ddp_ms"]) / 1e3 - prediction.compute
            found.append((prediction.synchronous - prediction.compute) / published)
    return min(found), max(found)


def outside(gains: Sequence[Gain], spread_of: Callable[[Gain], tuple[float, float]]) -> list[Gain]:
    """Runs whose published speed-up is not in the spread, by more than the noise of 2 % of runs on one node."""
    return [gain for gain in gains if not spread_of(gain)[0] / _NOISE <= gain.published <= spread_of(gain)[1] * _NOISE]


def _rows() -> list[dict[str, str]]:
    with _DATA.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def _name(row: dict[str, str]) -> str:
    return f"{row['model']}, {row['machine']}, {row['gpus']} GPUs, TP {row['tp']} PP {row['pp']}, {row['groups']} groups"


def _first(row: dict[str, str]) -> dict[str, str]:
    """The first run of the row's model and layout."""
    names = ("model", "machine", "tp", "pp")
    return next(other for other in _rows() if all(other[name] == row[name] for name in names))


def _at_measured(row: dict[str, str]) -> Cluster:
    return dataclasses.replace(CLUSTERS[row["machine"]], flops=_achieved(_first(row)))


def _is_source_of_constants(row: dict[str, str]) -> bool:
    """Whether the constants of ``CLUSTERS`` and of the authors' outer step were chosen on this run."""
    on_one_node = int(row["gpus"]) <= CLUSTERS[row["machine"]].gpus_per_node
    return on_one_node or (row["model"] == "xl" and (row["machine"] == "perlmutter" or row["gpus"] == "64"))


def _job(row: dict[str, str]) -> Job:
    layers, hidden, parameters = _SHAPES[row["model"]]
    gpus, tensor, pipeline = (int(row[name]) for name in ("gpus", "tp", "pp"))
    # Narayanan et al., arXiv 2104.04473, equation 3, without recomputation.
    attention, logits = _SEQUENCE / (6 * hidden), _VOCABULARY / (12 * hidden * layers)
    flops = 72 * _BATCH * _SEQUENCE * layers * hidden**2 * (1 + attention + logits)
    replicas = gpus // tensor // pipeline
    # The published runs do not share optimizer state, whatever the size of a group.
    return Job(flops, parameters / tensor / pipeline, gpus, tensor, replicas, replicas)


def _achieved(row: dict[str, str]) -> float:
    """Operations per second of a GPU in a run."""
    cluster = CLUSTERS[row["machine"]]
    seconds = float(row["local_ms"] or row["ddp_ms"]) / 1e3
    if row["local_ms"]:
        seconds -= _outer_step(row, cluster) / int(row["H"])
    return achieved(_job(row), cluster, seconds)


def _outer_step(row: dict[str, str], cluster: Cluster) -> float:
    job = _job(row)
    shards = min(job.tensor_parallel, cluster.gpus_per_node) * job.shard
    return _PUBLISHED_OUTER_STEP[row["machine"]] * shards * 4 / 1e9 * math.log2(int(row["groups"]))


def _summary(what: str, points: Sequence[Point | Gain], error_of: Callable[[Point | Gain], float]) -> str:
    worst = max(points, key=lambda point: abs(error_of(point)))
    median = statistics.median(abs(error_of(point)) for point in points)
    name = worst.run + (f", {worst.what}" if isinstance(worst, Point) else "")
    return f"| {what} | {len(points)} | {median:.1%} | {error_of(worst):+.1%}: {name} |"


def _outside(what: str, gains: Sequence[Gain], spread_of: Callable[[Gain], tuple[float, float]], number: int) -> list[str]:
    return [
        f"Published speed-up outside the verdict's spread, {what}, {len(gains)} of {number}:",
        "",
        *(
            f"- {gain.run}: {gain.published:.2f} x, spread {spread_of(gain)[0]:.2f} to {spread_of(gain)[1]:.2f} x."
            for gain in gains
        ),
    ]


def summary() -> list[str]:
    """The table of errors: median and worst, nothing left out."""
    every, speed_ups = points(), gains()
    unseen = [point for point in every if not point.is_fitted]
    wrong = [gain.run for gain in speed_ups if (gain.published > _NOISE) != (gain.plain > _NOISE)]
    outside_plain = outside(speed_ups, lambda gain: gain.spread)
    outside_measured = outside(speed_ups, lambda gain: gain.measured_spread)
    return [
        "| what | points | median error | worst |",
        "|---|---|---|---|",
        _summary("iteration, as a user gets it", every, lambda point: point.error),
        _summary("iteration, TFLOP/s measured", every, lambda point: point.measured_error),
        _summary("the same, points not fitted", unseen, lambda point: point.measured_error),
        _summary("speed-up, as a user gets it", speed_ups, lambda gain: gain.error),
        _summary("speed-up, TFLOP/s measured", speed_ups, lambda gain: gain.measured_error),
        "",
        f"Direction of the speed-up wrong, as a user gets it: {len(wrong)} of {len(speed_ups)} ({'; '.join(wrong)}).",
        "",
        *_outside("as a user gets it", outside_plain, lambda gain: gain.spread, len(speed_ups)),
        "",
        *_outside("TFLOP/s measured", outside_measured, lambda gain: gain.measured_spread, len(speed_ups)),
    ]


def table() -> list[str]:
    """Every published time with both predictions."""
    return [
        "| run | | published, ms | as a user gets it, ms | error | TFLOP/s measured, ms | error | |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {point.run} | {point.what} | {point.published * 1e3:,.0f} | {point.plain * 1e3:,.0f} | {point.error:+.1%} "
            f"| {point.measured * 1e3:,.0f} | {point.measured_error:+.1%} | {'fitted' if point.is_fitted else ''} |"
            for point in points()
        ),
    ]


def main() -> None:
    """Prints both tables."""
    print("\n".join([*summary(), "", *table()]))


if __name__ == "__main__":
    main()
