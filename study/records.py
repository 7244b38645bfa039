"""Simulated runs, trained once and kept: one line of JSON each."""

import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from run import MALLOC
from simulation import Outcome, Run, train
from small_gpt import Text
from text import data_arguments

from pier_megatron.integration.checkpoint.helpers import end_with_parent


class Survey:
    """The runs in a file."""

    def __init__(self, path: Path, corpus: Path, processes: int | None = None, is_brief: bool = False) -> None:
        """Reads the outcomes of the file.

        Args:
            path: Path of the file.
            corpus: Folder of the text, which is written if need be.
            processes: Number of runs trained at a time; by default, as many as there are processors.
            is_brief: Whether new outcomes are brief, see :class:`Outcome`.
        """
        self._path, self._corpus, self._processes, self._is_brief = path, corpus, processes, is_brief
        lines = path.read_text().splitlines() if path.exists() else ()
        self._outcomes = dict(map(_parse, lines))

    def train(self, runs: Iterable[Run]) -> None:
        """Trains those that are missing, each in a process of one thread."""
        missing = [run for run in dict.fromkeys(runs) if run not in self._outcomes]
        print(f"{len(missing)} simulated runs are to be done", flush=True)
        if missing:
            data_arguments(self._corpus)
        os.environ.update(MALLOC, OMP_NUM_THREADS="1")
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(self._processes, context, be_worker) as pool:
            train_one = functools.partial(_train, self._corpus, self._is_brief)
            for run, outcome in zip(missing, pool.map(train_one, missing), strict=True):
                self.add(run, outcome)

    def add(self, run: Run, outcome: Outcome) -> None:
        """Notes what came out of a run, and writes it down."""
        self._outcomes[run] = outcome
        with self._path.open("a") as file:
            file.write(json.dumps({"run": _changes(run), "outcome": _changes(outcome)}) + "\n")

    def items(self) -> Iterable[tuple[Run, Outcome]]:
        """All runs, with what came out of them."""
        return self._outcomes.items()

    def __contains__(self, run: Run) -> bool:
        """Whether a run has been trained."""
        return run in self._outcomes

    def __getitem__(self, run: Run) -> Outcome:
        """What came out of it."""
        return self._outcomes[run]


def _changes(instance: Run | Outcome) -> dict[str, Any]:
    """What differs from the defaults."""
    default = dataclasses.asdict(type(instance)())
    return {name: value for name, value in dataclasses.asdict(instance).items() if value != default[name]}


def _parse(line: str) -> tuple[Run, Outcome]:
    found = json.loads(line)
    # JSON has no numbers as keys.
    for name in {"curve", "averaged"} & set(found["outcome"]):
        found["outcome"][name] = {int(key): loss for key, loss in found["outcome"][name].items()}
    return Run(**found["run"]), Outcome(**found["outcome"])


def be_worker() -> None:
    """Makes a process of a pool: one thread, which ends with the program that it works for."""
    end_with_parent()
    torch.set_num_threads(1)


def _train(corpus: Path, is_brief: bool, run: Run) -> Outcome:
    return train(run, Text(corpus), is_brief)
