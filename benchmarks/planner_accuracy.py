"""The planner against every published iteration time of Pier and its synchronous baseline: ``python planner_accuracy.py``.

Fitted, and marked so: what a GPU achieves, on the smallest published run of each model and layout. The bandwidths and the
overheads, constants of ``CLUSTERS``, follow from GPT-2 XL on the A100 machine, from its largest run on the GH200 one,
and from the one-node runs. The published outer step is the authors' own implementation, one collective per tensor through host
memory, so its cost is a fit of its own, on the same runs: seconds per gigabyte of a node's shards and doubling of the groups.
Everything else is predicted.
"""

import csv
import dataclasses
import math
import statistics
from pathlib import Path

from pier_megatron.commands.plan.model import CLUSTERS, Cluster, Job, predict

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

# Of the authors' outer step, in seconds per gigabyte of FP32 on a node and doubling of the groups.
_PUBLISHED_OUTER_STEP = {"perlmutter": 0.35, "vista": 0.16}


@dataclasses.dataclass(frozen=True)
class Point:
    """One published time and what the planner says.

    Attributes:
        run: Which.
        what: Synchronous or local iteration.
        published: In seconds.
        predicted: In seconds.
        is_fitted: Whether the planner has seen it.
    """

    run: str
    what: str
    published: float
    predicted: float
    is_fitted: bool

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was published."""
        return self.predicted / self.published - 1


def points() -> list[Point]:
    """Compares the planner with the published times."""
    rows = _rows()
    achieved = {_layout(row): _achieved(row) for row in reversed(rows)}
    first = {_layout(row): row for row in reversed(rows)}
    found = []
    for row in rows:
        job, cluster = _job(row), CLUSTERS[row["machine"]]
        prediction = predict(job, cluster, achieved[_layout(row)])
        run = f"{row['model']}, {row['machine']}, {row['gpus']} GPUs, TP {row['tp']} PP {row['pp']}, {row['groups']} groups"
        is_first, is_source = first[_layout(row)] is row, _is_source_of_constants(row)
        if row["ddp_ms"]:
            fitted = is_source or (is_first and not row["local_ms"])
            found.append(Point(run, "synchronous", float(row["ddp_ms"]) / 1e3, prediction.synchronous, fitted))
        if row["local_ms"]:
            local = prediction.local + _outer_step(row, cluster) / int(row["H"])
            found.append(Point(run, f"local, H = {row['H']}", float(row["local_ms"]) / 1e3, local, is_first or is_source))
    return found


def directions() -> list[tuple[str, float, float]]:
    """Published and predicted speed-up of each run that has both times."""
    by_run: dict[str, dict[str, Point]] = {}
    for point in points():
        by_run.setdefault(point.run, {})[point.what.split(",")[0]] = point
    return [
        (run, pair["synchronous"].published / pair["local"].published, pair["synchronous"].predicted / pair["local"].predicted)
        for run, pair in by_run.items()
        if len(pair) == 2
    ]


def _rows() -> list[dict[str, str]]:
    with _DATA.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def _layout(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("model", "machine", "tp", "pp"))


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
    """What a GPU achieves, from the first run of a layout."""
    job, cluster = _job(row), CLUSTERS[row["machine"]]
    seconds = float(row["local_ms"] or row["ddp_ms"]) / 1e3
    if row["local_ms"]:
        seconds -= _outer_step(row, cluster) / int(row["H"])
    seconds -= cluster.overhead + cluster.overhead_per_parameter * job.owned
    return job.flops / job.gpus / seconds


def _outer_step(row: dict[str, str], cluster: Cluster) -> float:
    job = _job(row)
    shards = min(job.tensor_parallel, cluster.gpus_per_node) * job.shard
    return _PUBLISHED_OUTER_STEP[row["machine"]] * shards * 4 / 1e9 * math.log2(int(row["groups"]))


def main() -> None:
    """Prints the table."""
    print("| run | | published, ms | predicted, ms | error | |\n|---|---|---|---|---|---|")
    for point in points():
        print(
            f"| {point.run} | {point.what} | {point.published * 1e3:,.0f} | {point.predicted * 1e3:,.0f} | {point.error:+.1%} "
            f"| {'fitted' if point.is_fitted else ''} |"
        )
    unseen = [abs(point.error) for point in points() if not point.is_fitted]
    median = statistics.median(unseen)
    print(f"\nMedian error of {len(unseen)} points that were not fitted: {median:.1%}; worst: {max(unseen):.1%}")
    # Runs on one node differ by less than their noise: within 2 % nobody is faster.
    agreeing = [run for run, published, predicted in directions() if (published > 1.02) == (predicted > 1.02)]
    print(f"Direction of the speed-up right on {len(agreeing)} of {len(directions())} runs")


if __name__ == "__main__":
    main()
