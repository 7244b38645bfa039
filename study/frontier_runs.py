"""What the frontier of bytes against loss is simulated from: every run, as data, in the order of training."""

import dataclasses
from collections.abc import Iterable

from codings import CODINGS
from rows import ADAM, MUON, SYNCHRONOUS
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


def short(run: Run) -> Run:
    """The same with a short momentum, constant; ``eta / (1 - mu)`` is 1.14."""
    return _replace(run, outer_momentum=0.3, outer_lr=0.8)


def predicted(run: Run, own_share: float, share: float, decay: float) -> Run:
    """The same, from where groups are expected to meet."""
    return _replace(run, own_share=own_share, predicted_share=share, prediction_decay=decay)


def seeds(*runs: Run) -> tuple[Run, ...]:
    """The other seeds of runs that have been trained with the first."""
    return tuple(_replace(run, seed=seed) for seed in (2, 3) for run in runs)


def small(method: str, iterations: int, rate: float, seed: int = 1, inner: str = ADAM) -> Run:
    """A small model on few sequences, for runs of many outer steps."""
    run = Run(method, iterations=iterations, learning_rate=rate, seed=seed, inner=inner, layers=1, width=16, batch=8)
    return run if method == SYNCHRONOUS else _replace(run, groups=4)


_A, _M = ADAM, MUON
_1BIT = ("int1", "1 bit, mean", "1 bit, largest / 3", "1 bit, power of two", "1 bit, 0.7 of the largest")
_2BITS = ("int2", "2 bits, 1.25 means", "2 bits, largest / 1.5")
_HIDDEN = _replace(hidden(averaging(_M, 1, "int1")), outer_momentum=0.3, outer_lr=0.7)

PARTS: dict[str, tuple[Run, ...]] = {
    "codec": (
        *(averaging(_M, 1, dtype) for dtype in _1BIT),
        *(averaging(_M, 2, dtype) for dtype in (*_2BITS, "int1")),
        _replace(averaging(_M, 1, "int1"), sum_dtype="fp32"),
    ),
    "codec of the sum": (
        _replace(averaging(_M, 1, "int1"), sum_dtype="1 bit, largest / 3"),
        _replace(averaging(_M, 1, "int1"), sum_dtype="int2"),
    ),
    "frontier, Muon": (
        averaging(_M, 5, "int2"),
        annealed(_M, 10, "int2"),
        averaging(_M, 10, "int2"),
    ),
    "momentum": (
        _replace(averaging(_M, 10, "int2"), outer_momentum=0.3, outer_lr=1.0),
        short(averaging(_M, 5, "int2")),
        _replace(averaging(_M, 10, "int2"), outer_momentum=0.5, outer_lr=0.7),
        _replace(averaging(_M, 1, "int1"), outer_momentum=0.5, outer_lr=0.5),
        short(averaging(_M, 2, "int1")),
        short(averaging(_M, 2, "int2")),
    ),
    "delay, Muon": (
        hidden(averaging(_M, 1, "int1")),
        predicted(hidden(averaging(_M, 1, "int1")), 0.2, 0.8, 0.8),
        hidden(averaging(_M, 2, "int2")),
        predicted(hidden(averaging(_M, 2, "int2")), 0.2, 0.8, 0.5),
        predicted(hidden(averaging(_M, 1, "int1")), 0.6, 0.0, 0.0),
        _HIDDEN,
        short(hidden(averaging(_M, 2, "int2"))),
        predicted(hidden(averaging(_M, 2, "int2")), 1.0, 0.3, 0.0),
        _replace(hidden(averaging(_M, 1, "int1")), muon_rate=3e-2),
        short(predicted(hidden(averaging(_M, 2, "int2")), 1.0, 0.3, 0.0)),
        predicted(hidden(averaging(_M, 2, "int2")), 1.0, 0.6, 0.0),
        predicted(hidden(averaging(_M, 1, "int1")), 1.0, 0.3, 0.5),
    ),
    "frontier, AdamW": (
        annealed(_A, 10, "int2"),
        averaging(_A, 1, "int1"),
        averaging(_A, 2, "int2"),
    ),
    "momentum, more": (
        short(averaging(_M, 5, "int1")),
        short(_replace(averaging(_M, 2, "int1"), sum_dtype="int2")),
        short(averaging(_A, 2, "int2")),
    ),
    "seeds": seeds(
        short(averaging(_M, 5, "int2")),
        averaging(_M, 1, "int1"),
        annealed(_M, 10, "int2"),
        annealed(_A, 10, "int2"),
        _HIDDEN,
        short(averaging(_M, 2, "int2")),
    ),
    "many outer steps": (
        *(small(SYNCHRONOUS, 600, rate) for rate in (4e-3, 8e-3, 1.6e-2)),
        *(small(SYNCHRONOUS, 2400, rate) for rate in (4e-3, 8e-3, 1.6e-2)),
        *(small(SYNCHRONOUS, 9600, rate) for rate in (4e-3, 8e-3, 1.6e-2)),
        *(small(SYNCHRONOUS, iterations, 1.6e-2, seed) for iterations in (600, 2400) for seed in (2, 3)),
        *(
            small(method, iterations, 1.6e-2, seed)
            for iterations in (600, 2400)
            for seed in (1, 2, 3)
            for method in ("pier", "diloco", "pier-annealed")
        ),
        *(small(method, 9600, 8e-3) for method in ("pier", "diloco", "pier-annealed")),
    ),
    "many groups": (
        _replace(averaging(_M, 1, "int1"), groups=16),
        _replace(short(averaging(_M, 2, "int2")), groups=16),
    ),
    "one group": (
        _replace(annealed(_M, 20), groups=1),
        _replace(annealed(_A, 10), groups=1),
        _replace(annealed(_A, 50), groups=1),
        _replace(annealed(_M, 50), groups=1),
        _replace(annealed(_A, 20), groups=1),
    ),
    "most outer steps": (
        *(small(method, 37800, 8e-3) for method in ("pier", "diloco", "pier-annealed", SYNCHRONOUS)),
        *(
            small(method, iterations, 1.6e-2, inner=_M)
            for iterations in (600, 2400)
            for method in ("pier", "diloco", "pier-muon-annealed", SYNCHRONOUS)
        ),
    ),
    "others": (
        coded(Run(AVERAGING, inner=_M, interval=15), "SparseLoCo"),
        coded(Run("diloco", inner=_M, interval=30), "MuLoCo"),
    ),
    "frontier, Muon, more": (
        annealed(_M, 20, "int2"),
        averaging(_M, 5, "int1"),
        averaging(_M, 1, "int2"),
        annealed(_M, 50, "int2"),
    ),
    "frontier, AdamW, more": (
        averaging(_A, 5, "int2"),
        annealed(_A, 20, "int2"),
    ),
    "delay, AdamW": (
        short(hidden(averaging(_A, 2, "int2"))),
        hidden(averaging(_A, 1, "int1")),
    ),
    "seeds, 16 groups": seeds(_replace(short(averaging(_M, 2, "int2")), groups=16)),
}


def all_runs() -> Iterable[Run]:
    """Each once, in order."""
    return dict.fromkeys(run for runs in PARTS.values() for run in runs)
