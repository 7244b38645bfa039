"""Trains the study's rows; resumes if it was interrupted.

``make study``, or ``python study/run.py [--seeds N] [--only TEXT]``: real Megatron on the CPU and gloo, one process per group.
A row that is complete is not trained again. ``python study/report.py`` makes the tables and plots of the finished rows.
"""

import argparse
import dataclasses
import functools
import json
import operator
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rows import BATCH, ITERATIONS, METHODS, MUON, SYNCHRONOUS, TABLES, Row, learning_rate_sweep, muon_sweep
from text import VALIDATION_SEQUENCES, data_arguments

from pier_megatron.commands.tensorboard_log import TensorBoardLog

_FOLDER = Path(__file__).resolve().parent

# A byte-level GPT of 0.12 million parameters: small enough for hundreds of trainings, on batches of 4096 bytes. Each of 16
# groups gets 256 of them.
_MODEL = "--num-layers 2"
SET_UP = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 1 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --adam-beta2 0.99 --weight-decay 0.1 --clip-grad 1.0 --log-interval 10"
)
# Its update of a matrix is as long as that of https://kellerjordan.github.io/posts/muon/, times the factor that makes of
# AdamW's rate its own.
_MUON = "--muon-momentum 0.95 --muon-nesterov --muon-scale-mode shape_scaling --muon-fp32-matmul-prec high"
VALIDATION = "lm loss validation"

# Iterations between evaluations, which take place where groups agree.
_EVALUATED = 20

# glibc gives large blocks back to the system at once; asking for them again was a sixth of the time.
MALLOC = {f"MALLOC_{name}_THRESHOLD_": str(2**30) for name in ("MMAP", "TRIM")}


def main() -> None:
    """Trains what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="paired seeds of every row (%(default)s)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only what begins with this: a table's title or a row's folder"
    )
    parser.add_argument("--short", action="store_true", help="a tenth of the iterations, one seed, 4 groups: minutes")
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="folder for the runs (%(default)s)")
    options = parser.parse_args()
    # Rows of other lengths have the same names.
    folder = options.output / "short" if options.short else options.output
    study = Study(folder.resolve(), ITERATIONS // 10 if options.short else ITERATIONS)
    seeds = 1 if options.short else options.seeds
    study.train(learning_rate_sweep(seeds))
    print(f"Synchronous AdamW chooses --lr {study.learning_rate:g}", flush=True)
    if options.short:
        study.train([row for method in METHODS for row in (Row(method, 1).baseline, Row(method, 1, interval=5))])
        return
    study.train(muon_sweep(seeds, study.learning_rate))
    print(f"Synchronous Muon chooses {study.muon_rate:g}", flush=True)
    rows = [
        row
        for table in TABLES
        for row in map(study.with_rate, table.rows(seeds))
        if table.title.startswith(options.only) or row.name.startswith(options.only)
    ]
    study.train([each for row in rows for each in (row.baseline, row)])


class Study:
    """The folder of a study.

    Attributes:
        folder: Each row has one in it, by its name.
    """

    def __init__(
        self, folder: Path, iterations: int = ITERATIONS, known: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Opens a study.

        Args:
            folder: Folder of the runs.
            iterations: Length of its runs.
            known: Curves of rows that have been trained elsewhere, by name: losses by iteration.
        """
        self.folder = folder
        self._known = known or {}
        self._iterations = iterations
        self._logs: dict[Row, TensorBoardLog] = {}
        self._data = data_arguments(folder / "corpus")

    def train(self, rows: Sequence[Row]) -> None:
        """Trains those rows that are not there yet.

        Raises:
            subprocess.CalledProcessError: If one failed; what it printed is in its folder.
        """
        needed = dict.fromkeys(map(self.with_rate, rows))
        missing = [row for row in needed if not self.has(row)]
        print(f"{len(missing)} of {len(needed)} trainings are to be done", flush=True)
        specification = []
        for row in missing:
            folder = self.folder / row.name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            entry = {"name": row.name, "groups": row.groups, "argv": self._arguments(row)}
            specification.append(entry | {"done": str(self._done(row)), "log": str(folder / "log.txt")})
        run_worker(specification)

    def _arguments(self, row: Row) -> list[str]:
        assert row.learning_rate is not None, "with_rate comes first"
        rate = row.learning_rate * row.batch_scale
        iterations, batch = self._iterations // row.batch_scale, BATCH * row.batch_scale
        arguments = (
            f"{_MODEL} {SET_UP} {self._data} --train-iters {iterations} --global-batch-size {batch} --micro-batch-size "
            f"{batch // row.groups} --seed {row.seed} --lr {rate} --min-lr {rate / 10} --eval-interval "
            f"{max(_EVALUATED // row.interval, 1) * row.interval} "
            f"--eval-iters {VALIDATION_SEQUENCES // batch} "
            f"--tensorboard-dir {self.folder / row.name / 'tensorboard'}"
        ).split()
        if row.inner == MUON:
            arguments += f"{_MUON} --muon-extra-scale-factor {row.muon_rate / row.learning_rate}".split()  # type: ignore[operator]
        if row.method == SYNCHRONOUS:
            return [*arguments, *(("--optimizer", MUON) if row.inner == MUON else ("--use-distributed-optimizer",))]
        return [
            *arguments,
            *(("--pier-inner-optimizer", MUON) if row.inner == MUON else ()),
            *("--optimizer", "pier", "--pier-preset", row.method, "--pier-groups", str(row.groups)),
            *("--pier-sync-interval", str(row.interval), "--pier-lazy-start-fraction", str(row.lazy_start)),
            *("--pier-exchange-dtype", row.dtype, "--pier-overlap", str(row.overlap)),
        ]

    def _done(self, row: Row) -> Path:
        return self.folder / row.name / "done"

    def has(self, row: Row) -> bool:
        """Whether a row has been trained."""
        return self._done(row).exists()

    def log(self, row: Row) -> TensorBoardLog:
        """What Megatron and the plugin wrote of a row that has been trained."""
        if row not in self._logs:
            self._logs[row] = TensorBoardLog(self.folder / row.name)
        return self._logs[row]

    def validation(self, row: Row) -> dict[int, float]:
        """Loss on all validation data, in nats per byte, by iteration."""
        return validation_curve(self.log(row))

    def known_curve(self, row: Row) -> dict[int, float] | None:
        """Validation losses of a row that has been trained elsewhere; None if it has not."""
        found = self._known.get(row.name)
        return None if found is None else {int(iteration): loss for iteration, loss in found.items()}

    def with_rate(self, row: Row) -> Row:
        """A row as it is trained: its folder says at which rate, so that another choice does not find runs of this one."""
        if row.learning_rate is None:
            row = dataclasses.replace(row, learning_rate=self.learning_rate)
        if row.inner == MUON and row.muon_rate is None:
            row = dataclasses.replace(row, muon_rate=self.muon_rate)
        return row

    @functools.cached_property
    def learning_rate(self) -> float:
        """Rate with the lowest final loss of synchronous AdamW, over the trained seeds."""
        return self._best(learning_rate_sweep(seeds=99), operator.attrgetter("learning_rate"))

    @functools.cached_property
    def muon_rate(self) -> float:
        """Rate with the lowest final loss of synchronous Muon."""
        return self._best(muon_sweep(99, self.learning_rate), operator.attrgetter("muon_rate"))

    def _best(self, rows: Sequence[Row], rate_of: Callable[[Row], float]) -> float:
        ends: dict[float, list[float]] = {}
        for row in rows:
            curve = self.validation(row) if self.has(row) else self.known_curve(row)
            if curve:
                ends.setdefault(rate_of(row), []).append(curve[max(curve)])
        if not ends:
            sys.exit(f"No rate has been tried yet in {self.folder}: python study/run.py")
        return min(ends, key=lambda rate: statistics.mean(ends[rate]))


def validation_curve(log: TensorBoardLog) -> dict[int, float]:
    """Reads the validation losses of a run, by iteration."""
    series = log.scalars[VALIDATION]
    curve: dict[int, float] = {}
    for iteration, loss in zip(series.steps, series.values, strict=True):
        # What Megatron writes once more under that name, at the end, is of the test data.
        curve.setdefault(iteration, loss)
    return curve


def run_worker(specification: Sequence[Mapping[str, object]]) -> None:
    """Trains the row in a separate process, which runs ``worker.py``.

    Raises:
        subprocess.CalledProcessError: If a training failed.
    """
    path = [str(_FOLDER), str(_FOLDER.parent), str(_FOLDER.parent / "tools")]
    environment = MALLOC | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(path)}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(specification, file)
        file.flush()
        subprocess.run([sys.executable, str(_FOLDER / "worker.py"), file.name], env=os.environ | environment, check=True)


if __name__ == "__main__":
    main()
