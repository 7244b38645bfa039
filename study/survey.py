"""Simulated runs, trained once and kept: one line of JSON each."""

import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from run import MALLOC, data_arguments
from simulation import Outcome, Run, train
from small_gpt import Text


class Survey:
    """The runs in a file."""

    def __init__(self, path: Path, corpus: Path) -> None:
        """Reads what is there.

        Args:
            path: Of the file.
            corpus: Folder of the text, which is written if need be.
        """
        self._path, self._corpus = path, corpus
        lines = path.read_text().splitlines() if path.exists() else ()
        self._outcomes = dict(map(_parse, lines))

    def train(self, runs: Iterable[Run]) -> None:
        """Trains those that are missing, each in a process of one thread, as many at a time as there are processors."""
        missing = [run for run in dict.fromkeys(runs) if run not in self._outcomes]
        print(f"{len(missing)} simulated runs are to be done", flush=True)
        if missing:
            data_arguments(self._corpus)
        os.environ.update(MALLOC, OMP_NUM_THREADS="1")
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(mp_context=context, initializer=_use_one_thread) as pool:
            for run, outcome in zip(missing, pool.map(functools.partial(_train, self._corpus), missing), strict=True):
                self._add(run, outcome)

    def _add(self, run: Run, outcome: Outcome) -> None:
        self._outcomes[run] = outcome
        with self._path.open("a") as file:
            file.write(json.dumps({"run": dataclasses.asdict(run), "outcome": dataclasses.asdict(outcome)}) + "\n")

    def items(self) -> Iterable[tuple[Run, Outcome]]:
        """All runs, with what came out of them."""
        return self._outcomes.items()

    def __contains__(self, run: Run) -> bool:
        """Whether a run has been trained."""
        return run in self._outcomes

    def __getitem__(self, run: Run) -> Outcome:
        """What came out of it."""
        return self._outcomes[run]


def _parse(line: str) -> tuple[Run, Outcome]:
    found = json.loads(line)
    # JSON has no numbers as keys.
    for name in {"curve", "averaged"} & set(found["outcome"]):
        found["outcome"][name] = {int(key): loss for key, loss in found["outcome"][name].items()}
    return Run(**found["run"]), Outcome(**found["outcome"])


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def _train(corpus: Path, run: Run) -> Outcome:
    return train(run, Text(corpus))
