"""What skipping pipeline stages costs in loss: ``python study/skipping.py [--seeds N]``, printed as tables.

Real Megatron on the CPU and gloo, 2 pipeline ranks of 4 virtual stages of one layer. An interrupted study resumes. Losses are
measured; the time of a step is simulated.
"""

import argparse
import dataclasses
import math
import re
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from run import SET_UP, run_worker
from text import VALIDATION_SEQUENCES, data_arguments

from pier_megatron.experiments.skipping.pipeline.paths import search
from pier_megatron.experiments.skipping.pipeline.schedule import Pipeline
from pier_megatron.experiments.skipping.pipeline.simulator import makespan

FRACTIONS = (0.0, 0.25, 0.33)
LEARNING_RATE = 4e-3
"""Half of what AdamW chose in the study of the outer loop, for a model a quarter as deep."""

BATCH, MICRO_BATCHES = 64, 8
PIPELINE = Pipeline(ranks=2, chunks=4, micro_batches=MICRO_BATCHES, group=2)

WHOLE = "all stages"
OMITTED = {"3 of 8 omitted, half of the inner ones": "2,4,6", "4 of 8 omitted, half of all": "1,3,4,6"}
"""What further evaluations leave out, as ``--pier-eval-skip`` takes it."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        fraction: Share of stages and micro-batches that is skipped.
        seed: Seed of weights, data order and table of paths.
        has_equal_time: Whether the run has the simulated time of one that skips nothing, rather than its iterations.
    """

    fraction: float
    seed: int
    has_equal_time: bool = False

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"skip{self.fraction:g}{'-equal-time' * self.has_equal_time}-seed{self.seed}"

    @property
    def share_of_whole_step(self) -> float:
        """Simulated time of a step, as a multiple of a step without skipping."""
        costs = (1.0,) * PIPELINE.stages
        skipped = search(PIPELINE, self.fraction, self.seed, costs).skipped
        return makespan(PIPELINE, costs, skipped) / makespan(PIPELINE, costs)


def main() -> None:
    """Trains and evaluates what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="paired seeds of every row (%(default)s)")
    parser.add_argument("--iterations", type=int, default=200, help="length of a run that skips nothing (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/study/skipping"), help="folder for the runs (%(default)s)")
    options = parser.parse_args()
    study = Study(options.output.resolve() / str(options.iterations), options.iterations)
    seeds = range(1, options.seeds + 1)
    for seed in seeds:
        study.train(list(rows(seed)))
        study.evaluate(list(rows(seed)))
    print(study.table("Equal tokens", [[Row(fraction, seed) for seed in seeds] for fraction in FRACTIONS]))
    print(
        study.table(
            "Equal simulated time",
            [[Row(fraction, seed, has_equal_time=fraction > 0) for seed in seeds] for fraction in FRACTIONS],
        )
    )


def rows(seed: int) -> Iterator[Row]:
    """All trainings of a seed."""
    for fraction in FRACTIONS:
        yield Row(fraction, seed)
        if fraction:
            yield Row(fraction, seed, has_equal_time=True)


class Study:
    """The folder of the runs."""

    def __init__(self, folder: Path, iterations: int) -> None:
        """Opens it; ``iterations`` is the length of a run that skips nothing."""
        self.folder, self.iterations = folder, iterations
        self._data = data_arguments(folder / "corpus")

    def train(self, wanted: Sequence[Row]) -> None:
        """Trains what is not there yet.

        Raises:
            subprocess.CalledProcessError: If something failed; what it printed is in its folder.
        """
        missing = [row for row in wanted if not self._done(row, WHOLE).exists()]
        for row in missing:
            shutil.rmtree(self.folder / row.name, ignore_errors=True)
            (self.folder / row.name).mkdir(parents=True)
        print(f"{len(missing)} of {len(wanted)} trainings are to be done", flush=True)
        saving = f"--save-interval {10**6} --save"
        run_worker(
            [
                self._entry(row, WHOLE, f"{saving} {self.folder / row.name / 'checkpoint'} --pier-skip-fraction {row.fraction}")
                for row in missing
            ]
        )

    def evaluate(self, trained: Sequence[Row]) -> None:
        """Evaluates with some stages omitted, as far as that has not been done; raises as :meth:`train`."""
        missing = [(row, name) for row in trained for name in OMITTED if not self._done(row, name).exists()]
        for row, name in missing:
            self._log(row, name).unlink(missing_ok=True)
        loading = "--skip-train --no-load-optim --no-load-rng --load"
        run_worker(
            [
                self._entry(row, name, f"{loading} {self.folder / row.name / 'checkpoint'} --pier-eval-skip {OMITTED[name]}")
                for row, name in missing
            ]
        )

    def _done(self, row: Row, evaluation: str) -> Path:
        return self.folder / row.name / f"{evaluation}, done"

    def _log(self, row: Row, evaluation: str) -> Path:
        return self.folder / row.name / f"{evaluation}, log"

    def _entry(self, row: Row, evaluation: str, arguments: str) -> dict[str, object]:
        iterations = self.length(row)
        argv = (
            f"--num-layers {PIPELINE.stages} {SET_UP} {self._data} --pipeline-model-parallel-size {PIPELINE.ranks} "
            f"--num-virtual-stages-per-pipeline-rank {PIPELINE.chunks} --train-iters {iterations} --global-batch-size {BATCH} "
            f"--micro-batch-size {BATCH // MICRO_BATCHES} --seed {row.seed} --pier-skip-seed {row.seed} --lr {LEARNING_RATE} "
            f"--min-lr {LEARNING_RATE / 10} --eval-interval {iterations} --eval-iters {VALIDATION_SEQUENCES // BATCH} "
            f"--use-distributed-optimizer {arguments}"
        )
        files = {"log": str(self._log(row, evaluation)), "done": str(self._done(row, evaluation))}
        return files | {"name": f"{row.name}, {evaluation}", "groups": PIPELINE.ranks, "argv": argv.split()}

    def length(self, row: Row) -> int:
        """Iterations of a run."""
        return round(self.iterations / row.share_of_whole_step) if row.has_equal_time else self.iterations

    def loss(self, row: Row, evaluation: str = WHOLE) -> float:
        """Validation loss at the end of a run, in nats per byte."""
        return validation_loss(self._log(row, evaluation))

    def table(self, title: str, columns: Sequence[Sequence[Row]]) -> str:
        """Final losses, and perplexities per byte, mean and standard deviation over the seeds; a column is of one fraction."""
        heads = [
            f"F = {column[0].fraction:g}, {statistics.mean(map(self.length, column)):.0f} iterations of "
            f"{statistics.mean(row.share_of_whole_step for row in column):.3f} of a whole one"
            for column in columns
        ]
        lines = [f"\n### {title}\n", f"| evaluated with | {' | '.join(heads)} |", "|---" * (1 + len(columns)) + "|"]
        for name in (WHOLE, *OMITTED):
            cells = []
            for column in columns:
                losses = [self.loss(row, name) for row in column]
                cells.append(f"{spread(losses)} ({math.exp(statistics.mean(losses)):.2f})")
            lines.append(f"| {name} | {' | '.join(cells)} |")
        gaps = [
            spread([self.loss(row) - self.loss(whole) for row, whole in zip(column, columns[0], strict=True)])
            for column in columns
        ]
        return "\n".join([*lines, f"| all stages, above the run that skips nothing | {' | '.join(gaps)} |"])


def validation_loss(log: Path) -> float:
    """Last validation loss that Megatron has printed before the test loss, in nats per byte."""
    found = re.search(r"validation loss at .* on validation set.*lm loss value: (\S+)", log.read_text())
    assert found, f"{log}: no validation loss"
    return float(found[1])


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


if __name__ == "__main__":
    main()
