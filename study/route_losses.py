"""What routes past skipped stages cost in loss: ``python study/route_losses.py [--seeds N]``, printed as a table.

Simulated in one process: a plain GPT whose stages are its layers takes each micro-batch along its route, swaps included, as
Megatron does with ``--pier-skip-routes`` (``tests/distributed/test_routed_training.py``). With ``--megatron``, Megatron itself
trains, with a process for each stage. An interrupted study resumes.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from run import MALLOC, SET_UP, run_worker
from skipping import WHOLE, spread, validation_loss
from small_gpt import VECTORS, Parameters, Text, initial, losses
from text import VALIDATION_SEQUENCES, data_arguments

from pier_megatron.experiments.skipping.pipeline.routes import MicroBatch, Routes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from route_search.play import Grid, Link
from route_search.search import Wishes, search

STAGES, MICRO_BATCHES, BATCH, WIDTH = 6, 8, 64, 64
LEARNING_RATE, WARMUP, FINAL = 4e-3, 0.1, 0.1

EVALUATIONS = {WHOLE: None, "2 of 6 omitted (2, 3)": (0, 1, 4, 5), "3 of 6 omitted (1, 3, 4)": (0, 2, 5)}
"""Stages that an evaluation keeps; None for all."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        fraction: Share of stages and micro-batches that is skipped.
        may_swap: Whether routes may swap stages.
        seed: Seed of weights, data order and routes.
        stages: Number of stages.
    """

    fraction: float
    may_swap: bool
    seed: int
    stages: int = STAGES

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.stages}-stages-skip{self.fraction:g}{'-swaps' * self.may_swap}-seed{self.seed}"


COLUMNS = {
    "whole": (0.0, False, STAGES),
    "25 %": (0.25, False, STAGES),
    "25 %, swaps": (0.25, True, STAGES),
    "33 %": (1 / 3, False, STAGES),
    "33 %, swaps": (1 / 3, True, STAGES),
    "half as deep": (0.0, False, STAGES // 2),
}


def main() -> None:
    """Trains what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="paired seeds of every column (%(default)s)")
    parser.add_argument("--iterations", type=int, default=600, help="iterations of a run (%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/study/route-losses"), help="folder for the runs (%(default)s)"
    )
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), help="columns after whole (all)")
    parser.add_argument("--megatron", action="store_true", help="train in Megatron, not in one process")
    options = parser.parse_args()
    folder = options.output.resolve() / f"{options.iterations}{'-megatron' * options.megatron}"
    seeds = range(1, options.seeds + 1)
    table = {
        name: [Row(fraction, may_swap, seed, stages) for seed in seeds]
        for name, (fraction, may_swap, stages) in COLUMNS.items()
        if name in ("whole", *options.columns)
    }
    missing = [row for seed in zip(*table.values(), strict=True) for row in seed if not (folder / row.name).exists()]
    print(f"{len(missing)} trainings are to be done", flush=True)
    if missing:
        data_arguments(folder / "corpus")
    if options.megatron:
        for row in missing:
            (folder / row.name).write_text(json.dumps(train_in_megatron(folder, options.iterations, row)))
    else:
        os.environ.update(MALLOC, OMP_NUM_THREADS="1")
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(None, context, torch.set_num_threads, (1,)) as pool:
            for row, found in zip(
                missing, pool.map(functools.partial(train, folder, options.iterations), missing), strict=True
            ):
                (folder / row.name).write_text(json.dumps(found))
    print(_table(folder, table))


def routes(row: Row) -> Routes:
    """Routes for ranks with one behind a link ten times slower, as in ``benchmarks/skip_routes.py``."""
    slow, nodes = row.stages // 2, range(row.stages)
    links = [[Link(0.5 if slow in (one, other) else 0.05) for other in nodes] for one in nodes]
    devices, ones = tuple((node,) for node in nodes), (1.0,) * row.stages
    grid = Grid(devices, (0.03,) * row.stages, (0.06,) * row.stages, tuple(nodes), ones, links)
    wishes = Wishes(row.fraction, most_held=row.stages, seed=row.seed, may_swap=row.may_swap)
    found = search(grid, MICRO_BATCHES, [[0]], wishes)
    return Routes(row.stages, 1, MICRO_BATCHES, found.played.held, found.paths, found.played.order)


def train(folder: Path, iterations: int, row: Row) -> dict[str, float]:
    """Trains a row; returns its validation losses in nats per byte by evaluation, and ``swaps`` of its routes."""
    text, generator = Text(folder / "corpus"), np.random.default_rng(row.seed)
    found = routes(row)
    paths = [tuple(place.stage for place in found.paths[MicroBatch(0, number)]) for number in range(MICRO_BATCHES)]
    parameters = {name: vector.clone().requires_grad_() for name, vector in initial(row.stages, WIDTH, row.seed).items()}
    groups = [
        {
            "params": [vector for name, vector in parameters.items() if name.endswith(VECTORS) == is_vector],
            "weight_decay": decay,
        }
        for is_vector, decay in ((False, 0.1), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    for iteration in range(iterations):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _schedule(iteration, iterations)
        backward(parameters, text.batch(generator, BATCH).chunk(MICRO_BATCHES), paths)
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    evaluations = EVALUATIONS if row.stages == STAGES else {WHOLE: None}
    return {name: _validation(parameters, text, kept) for name, kept in evaluations.items()} | {"swaps": found.swaps}


def train_in_megatron(folder: Path, iterations: int, row: Row) -> dict[str, float]:
    """Does the same as :func:`train` in Megatron, with the files of its runs in ``folder``."""
    found, place = routes(row), folder / f"{row.name}-files"
    place.mkdir(parents=True, exist_ok=True)
    (place / "routes.json").write_text(found.text())
    common = (
        f"--num-layers {row.stages} {SET_UP} {data_arguments(folder / 'corpus')} --pipeline-model-parallel-size {row.stages} "
        f"--train-iters {iterations} --global-batch-size {BATCH} --micro-batch-size {BATCH // MICRO_BATCHES} --seed {row.seed} "
        f"--lr {LEARNING_RATE} --min-lr {FINAL * LEARNING_RATE} --eval-interval {iterations} "
        f"--eval-iters {VALIDATION_SEQUENCES // BATCH} --use-distributed-optimizer --save-interval {iterations} "
    )
    arguments = {WHOLE: f"--pier-skip-routes {place / 'routes.json'} --save {place / 'checkpoints'}"}
    for name, kept in EVALUATIONS.items() if row.stages == STAGES else ():
        if kept is not None:
            omitted = ",".join(str(stage) for stage in range(STAGES) if stage not in kept)
            arguments[name] = (
                f"--pier-eval-skip {omitted} --skip-train --no-load-optim --no-load-rng --load {place / 'checkpoints'}"
            )
    logs = {name: place / f"{name}, log" for name in arguments}
    run_worker(
        [
            {
                "name": f"{row.name}, {name}",
                "groups": row.stages,
                "argv": f"{common}{own}".split(),
                "log": str(logs[name]),
                "done": str(place / f"{name}, done"),
            }
            for name, own in arguments.items()
        ]
    )
    return {name: validation_loss(log) for name, log in logs.items()} | {"swaps": found.swaps}


def backward(parameters: Parameters, batch: Sequence[torch.Tensor], paths: Sequence[tuple[int, ...]]) -> None:
    """Adds the gradients of the mean loss of micro-batches, each ``[sequences, SEQUENCE + 1]``, along their paths."""
    # Those with the same path at once.
    for path in dict.fromkeys(paths):
        own = torch.cat([tokens for tokens, taken in zip(batch, paths, strict=True) if taken == path])
        (losses(parameters, own[None], path).sum() * paths.count(path) / len(paths)).backward()


def _schedule(iteration: int, iterations: int) -> float:
    warm = min(1.0, (iteration + 1) / (WARMUP * iterations))
    return warm * (FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * iteration / iterations)))


@torch.no_grad()
def _validation(parameters: Parameters, text: Text, kept: Sequence[int] | None) -> float:
    # In batches of equal size.
    return statistics.mean(losses(parameters, some[None], kept).item() for some in text.validation[0].split(BATCH))


def _table(folder: Path, table: dict[str, list[Row]]) -> str:
    found = {name: [json.loads((folder / row.name).read_text()) for row in rows] for name, rows in table.items()}
    lines = [f"| evaluated with | {' | '.join(found)} |", "|---" * (1 + len(found)) + "|"]
    for evaluation in EVALUATIONS:
        cells = [spread([each[evaluation] for each in column]) if evaluation in column[0] else "" for column in found.values()]
        lines.append(f"| {evaluation} | {' | '.join(cells)} |")
    above = [
        spread([each[WHOLE] - whole[WHOLE] for each, whole in zip(column, found["whole"], strict=True)])
        for column in found.values()
    ]
    swaps = [f"{statistics.mean(each['swaps'] for each in column):.1f}" for column in found.values()]
    return "\n".join([*lines, f"| above the whole | {' | '.join(above)} |", f"| swaps in a step | {' | '.join(swaps)} |"])


if __name__ == "__main__":
    main()
