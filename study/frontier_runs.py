"""What the frontier of bytes against loss is simulated from: every run, as data, in the order of training."""

import dataclasses
from collections.abc import Iterable

from codings import CODINGS
from rows import ADAM, MUON, SYNCHRONOUS
from simulation import Run
from surveyed import of_all_seeds

_replace = dataclasses.replace

AVERAGING = "local-sgd"
ANNEALED = {ADAM: "pier-annealed", MUON: "pier-muon-annealed"}
"""The presets with momentum that end best: docs/study.md."""

ORTHOGONAL = Run(rule="muon as long as own")
"""``--pier-outer-rule muon``, the winner of search.py."""


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


def small(method: str, iterations: int, rate: float, inner: str = ADAM) -> Run:
    """A small model on few sequences, for runs of many outer steps."""
    run = Run(method, iterations=iterations, learning_rate=rate, inner=inner, layers=1, width=16, batch=8)
    return run if method == SYNCHRONOUS else _replace(run, groups=4)


_A, _M = ADAM, MUON
_RATES = (4e-3, 8e-3, 1.6e-2)
_BIT, _TWO_BITS = averaging(_M, 1, "int1"), averaging(_M, 2, "int2")
_SMALL_METHODS = ("pier", "diloco", "pier-annealed", SYNCHRONOUS)

PARTS: dict[str, tuple[Run, ...]] = {
    "Levels and scales of 1 and 2 bits": (
        *(
            averaging(_M, 1, dtype)
            for dtype in (
                *("int1", "1 bit, mean", "1 bit, largest / 3", "1 bit, power of two"),
                "1 bit, 0.7 of the largest",
            )
        ),
        *(averaging(_M, 2, dtype) for dtype in ("int2", "2 bits, 1.25 means", "2 bits, largest / 1.5")),
    ),
    "What comes back": (
        *(_replace(_BIT, sum_dtype=dtype) for dtype in ("int1", "1 bit, largest / 3", "int2", "fp32")),
        short(_replace(averaging(_M, 2, "int1"), sum_dtype="int2")),
    ),
    "8 groups, Muon inside": (
        *of_all_seeds(_BIT, short(_TWO_BITS), short(averaging(_M, 5, "int2")), annealed(_M, 10, "int2")),
        averaging(_M, 1, "int2"),
        _TWO_BITS,
        *(each for run in (averaging(_M, 2, "int1"), averaging(_M, 5, "int2")) for each in (run, short(run))),
        short(averaging(_M, 5, "int1")),
        averaging(_M, 10, "int2"),
        annealed(_M, 20, "int2"),
        *(
            _replace(run, outer_momentum=mu, outer_lr=eta)
            for run, mu, eta in (
                (_BIT, 0.5, 0.5),
                (averaging(_M, 10, "int2"), 0.3, 1.0),
                (averaging(_M, 10, "int2"), 0.5, 0.7),
            )
        ),
    ),
    "8 groups, AdamW inside": (
        *of_all_seeds(annealed(_A, 10, "int2")),
        averaging(_A, 1, "int1"),
        averaging(_A, 2, "int2"),
        short(averaging(_A, 2, "int2")),
    ),
    "Delay": (
        *of_all_seeds(_replace(hidden(_BIT), outer_momentum=0.3, outer_lr=0.7)),
        hidden(_BIT),
        _replace(hidden(_BIT), muon_rate=3e-2),
        predicted(hidden(_BIT), 0.2, 0.8, 0.8),
        predicted(hidden(_BIT), 0.6, 0.0, 0.0),
        predicted(hidden(_BIT), 1.0, 0.3, 0.5),
        hidden(_TWO_BITS),
        short(hidden(_TWO_BITS)),
        predicted(hidden(_TWO_BITS), 0.2, 0.8, 0.5),
        predicted(hidden(_TWO_BITS), 1.0, 0.3, 0.0),
        predicted(hidden(_TWO_BITS), 1.0, 0.6, 0.0),
        predicted(short(hidden(_TWO_BITS)), 1.0, 0.3, 0.0),
        hidden(averaging(_A, 1, "int1")),
    ),
    "Without a lazy start": tuple(
        _replace(run, lazy_start=0.0) for run in (_BIT, _TWO_BITS, short(_replace(_TWO_BITS, interval=5)))
    ),
    "Rates of a small model": (
        *(small(SYNCHRONOUS, iterations, rate) for iterations in (600, 2400, 9600) for rate in _RATES),
        small(SYNCHRONOUS, 9600, 2e-3),
        *(small("pier", 9600, rate) for rate in (1e-3, 2e-3, *_RATES)),
        *(small("diloco", 9600, rate) for rate in (2e-3, 4e-3)),
        small("pier-annealed", 9600, 4e-3),
    ),
    "16 groups": (
        _replace(_BIT, groups=16),
        *of_all_seeds(_replace(short(_TWO_BITS), groups=16)),
    ),
    "2 and 4 groups": tuple(
        _replace(run, groups=groups)
        for groups in (2, 4)
        for run in (
            _BIT,
            short(_TWO_BITS),
            short(_replace(_TWO_BITS, interval=5)),
            annealed(_M, 10, "int2"),
            annealed(_A, 10, "int2"),
        )
    ),
    "One group": (
        *(_replace(annealed(_A, interval), groups=1) for interval in (10, 20, 50)),
        *(_replace(annealed(_M, interval), groups=1) for interval in (20, 50)),
    ),
    "Position embeddings by Muon, as in Megatron": of_all_seeds(
        Run(SYNCHRONOUS, inner=_M, muon_positions=True), _replace(short(_TWO_BITS), muon_positions=True)
    ),
    "Sparse exchanges": (
        coded(Run(AVERAGING, inner=_M, interval=15), "SparseLoCo"),
        coded(Run("diloco", inner=_M, interval=30), "MuLoCo"),
    ),
    "27 to 1,701 outer steps": (
        *of_all_seeds(*(small(method, iterations, 1.6e-2) for iterations in (600, 2400) for method in _SMALL_METHODS)),
        *(small(method, iterations, 8e-3) for iterations in (9600, 37800) for method in _SMALL_METHODS),
        *(
            small(method, iterations, 1.6e-2, _M)
            for iterations in (600, 2400)
            for method in ("pier", "diloco", "pier-muon-annealed", SYNCHRONOUS)
        ),
    ),
}


def all_runs() -> Iterable[Run]:
    """Each once, in order."""
    return dict.fromkeys(run for runs in PARTS.values() for run in runs)
