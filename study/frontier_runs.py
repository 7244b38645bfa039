"""What the frontier of bytes against loss is simulated from: every run, as data, in the order of training."""

import dataclasses
from collections.abc import Iterable

from codings import CODINGS
from rows import ADAM, MUON
from simulation import Run

_replace = dataclasses.replace

AVERAGING = "local-sgd"
ANNEALED = {ADAM: "pier-annealed", MUON: "pier-muon-annealed"}
"""The presets with momentum that end best: docs/study.md."""


def averaging(inner: str, interval: int, dtype: str = "fp32") -> Run:
    """Plain averaging after every interval."""
    return coded(Run(AVERAGING, inner=inner, interval=interval), dtype)


def annealed(inner: str, interval: int, dtype: str = "fp32") -> Run:
    """The best preset with momentum."""
    return coded(Run(ANNEALED[inner], inner=inner, interval=interval), dtype)


def coded(run: Run, dtype: str) -> Run:
    """The same, exchanged in few bits, both ways where a sum comes back."""
    comes_back = dtype in CODINGS and not CODINGS[dtype].is_sparse
    return _replace(run, dtype=dtype, sum_dtype=dtype if comes_back else "fp32")


def hidden(run: Run) -> Run:
    """The same, each exchange behind the whole next interval."""
    return _replace(run, overlap=run.interval)


def predicted(run: Run, own_share: float, share: float, decay: float) -> Run:
    """The same, from where groups are expected to meet."""
    return _replace(run, own_share=own_share, predicted_share=share, prediction_decay=decay)


_A, _M = ADAM, MUON
_1BIT = ("int1", "1 bit, mean", "1 bit, largest / 3", "1 bit, power of two")
_2BITS = ("int2", "2 bits, 1.25 means", "2 bits, largest / 1.5")

PARTS: dict[str, tuple[Run, ...]] = {
    "codec": (
        *(averaging(_M, 1, dtype) for dtype in _1BIT),
        *(averaging(_M, 2, dtype) for dtype in (*_2BITS, "int1", "1 bit, mean")),
    ),
    "frontier, Muon": (
        averaging(_M, 1),
        averaging(_M, 5, "int2"),
        annealed(_M, 10, "int2"),
        averaging(_M, 10, "int2"),
        averaging(_M, 5, "int1"),
    ),
    "delay, Muon": (
        hidden(averaging(_M, 1, "int1")),
        predicted(hidden(averaging(_M, 1, "int1")), 0.2, 0.8, 0.5),
        hidden(averaging(_M, 2, "int2")),
        predicted(hidden(averaging(_M, 2, "int2")), 0.2, 0.8, 0.0),
    ),
    "frontier, AdamW": (
        annealed(_A, 10, "int2"),
        averaging(_A, 1, "int1"),
        averaging(_A, 2, "int2"),
        averaging(_A, 5, "int2"),
        averaging(_A, 1),
    ),
}


def all_runs() -> Iterable[Run]:
    """Each once, in order."""
    return dict.fromkeys(run for runs in PARTS.values() for run in runs)
