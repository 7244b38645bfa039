"""What is simulated: every run of the survey, as data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rows import ADAM, MUON, SYNCHRONOUS
from simulation import Run


@dataclasses.dataclass(frozen=True)
class Setting:
    """What synchronous training is tuned for, and what is compared with it.

    Attributes:
        changes: Changes of its runs to a :class:`Run`'s defaults.
        rates: Learning rates of AdamW that were tried.
        muon_rates: Pairs of learning rates, of Muon and of AdamW, that were tried.
        groups: Changes of runs with groups to the defaults.
        shorter: Lengths of synchronous runs, which show what iterations are worth.
    """

    changes: Mapping[str, Any]
    rates: Sequence[float]
    muon_rates: Sequence[tuple[float, float]]
    groups: Sequence[Mapping[str, int]]
    shorter: float = 0.75

    def synchronous(self, inner: str) -> list[Run]:
        """One run for each rate."""
        given = {"inner": inner, "method": SYNCHRONOUS, **self.changes}
        if inner == ADAM:
            return [Run(learning_rate=rate, **given) for rate in self.rates]
        return [Run(muon_rate=muon, learning_rate=adam, **given) for muon, adam in self.muon_rates]


_EIGHT = ({"groups": 8},)
_MANY = (*({"groups": groups} for groups in (2, 4, 8, 16)), *({"interval": interval} for interval in (5, 10, 40, 50)))
_MUON_RATES = ((2e-2, 8e-3), (4e-2, 8e-3), (4e-2, 1.6e-2))
_SMALL_MUON_RATES = ((2e-2, 1.6e-2), (2e-2, 3.2e-2))
SETTINGS = (
    # The plugin's set-up: AdamW's best rate without Muon. Then both rates tuned together.
    Setting({}, (8e-3,), ((4e-2, 8e-3),), _MANY),
    Setting({}, (), ((2e-2, 1.6e-2), (4e-2, 1.6e-2), (8e-2, 1.6e-2), (4e-2, 3.2e-2)), _MANY),
    # Three quarters of these end within the noise of seeds.
    Setting({"iterations": 1200}, (8e-3,), ((4e-2, 8e-3), (4e-2, 1.6e-2)), _EIGHT, shorter=0.5),
    Setting({"iterations": 2400}, (4e-3, 8e-3), _MUON_RATES, _EIGHT),
    Setting({"batch": 256}, (8e-3, 1.6e-2, 3.2e-2), (*_MUON_RATES, (4e-2, 3.2e-2)), _EIGHT),
    Setting({"batch": 16}, (2e-3, 4e-3, 8e-3, 1.6e-2), ((2e-2, 4e-3), (2e-2, 8e-3), (4e-2, 8e-3)), _EIGHT),
    Setting(
        {"width": 32},
        (8e-3, 1.6e-2, 3.2e-2),
        (*_MUON_RATES, *_SMALL_MUON_RATES, *((4e-2, rate) for rate in (3.2e-2, 6.4e-2, 0.128))),
        _EIGHT,
    ),
    Setting({"width": 32, "batch": 256}, (1.6e-2, 3.2e-2), (), _EIGHT),
    Setting({"width": 32, "batch": 1024}, (1.6e-2, 3.2e-2, 6.4e-2), (), _EIGHT),
    Setting({"width": 32, "batch": 1024, "iterations": 1200}, (8e-3, 1.6e-2, 3.2e-2), (), _EIGHT, shorter=0.5),
    Setting({"width": 32, "iterations": 1200}, (1.6e-2,), (*_SMALL_MUON_RATES, (4e-2, 1.6e-2)), _EIGHT, shorter=0.5),
    Setting({"width": 32, "iterations": 2400}, (1.6e-2,), _SMALL_MUON_RATES, _EIGHT, shorter=0.5),
    Setting({"width": 32, "iterations": 4800}, (), (*_SMALL_MUON_RATES, (1e-2, 1.6e-2), (4e-2, 1.6e-2)), _EIGHT, shorter=0.5),
    Setting({"batch": 256, "iterations": 2400}, (), ((4e-2, 8e-3),), _EIGHT),
    Setting({"width": 32, "batch": 128, "iterations": 4000}, (1.6e-2,), (), ()),
    Setting({"width": 128}, (2e-3, 4e-3, 8e-3), ((2e-2, 4e-3), (4e-2, 4e-3), (2e-2, 8e-3)), _EIGHT),
)

SCHEDULES = {ADAM: ("diloco", "pier-rising", "pier-annealed"), MUON: ("diloco", "pier-muon", "pier-muon-annealed")}

_replace = dataclasses.replace

CRITICAL = ((ADAM, 32, 64, 256), (ADAM, 32, 64, 1024), (ADAM, 64, 64, 256), (MUON, 64, 64, 256))
"""Synchronous trainings: inner optimizer, width, a batch, and a larger one that saves iterations."""

_RISING, _ANNEALED = Run("pier-rising"), Run("pier-annealed")
_MUON, _MUON_ANNEALED = Run("pier-muon", inner=MUON), Run("pier-muon-annealed", inner=MUON)

# Trained with three seeds and, as they stand and on a quarter of the sequences, at rates that are best there.
_REMEDIES = {
    "nothing": (_RISING, _ANNEALED, _MUON, _MUON_ANNEALED),
    "synchronous tail, 5 %": (_replace(_RISING, tail=0.05), _replace(_MUON, tail=0.05)),
    "AdamW's noise divided": (
        _replace(_RISING, divides_noise=True),
        _replace(_ANNEALED, interval=5, divides_noise=True),
    ),
    "slow momentum": (_replace(_RISING, slow_share=0.5),),
    "H = 5": (_replace(_ANNEALED, interval=5),),
    "int4, H = 5": (_replace(_ANNEALED, interval=5, dtype="int4"), _replace(_MUON_ANNEALED, interval=5, dtype="int4")),
}
_FEW_SEQUENCES = {ADAM: {"batch": 16}, MUON: {"batch": 16, "muon_rate": 2e-2}}

# The paper's claim in miniature: 1800 outer steps, of groups that agree.
_CLAIM = Run("diloco", groups=4, interval=2, iterations=4000, batch=128, width=32, learning_rate=1.6e-2)
_CLAIM_RATES = {
    "diloco": (2.5e-4, 5e-4, 1e-3, 2e-3, 1.6e-2),
    "pier": (5e-4, 1e-3, 2e-3),
    "pier-rising": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
}

# A group sees as much as synchronous AdamW at its critical batch.
_CRITICAL_GROUPS = tuple(Run(method, width=32, batch=1024, learning_rate=1.6e-2) for method in ("diloco", "pier-annealed"))
_LONGER_CRITICAL_GROUPS = tuple(_replace(run, iterations=1200) for run in _CRITICAL_GROUPS)

_LONG = _replace(_MUON_ANNEALED, iterations=2400)
_LARGE = _replace(_LONG, batch=256)
_SMALL = _replace(_LONG, width=32, learning_rate=1.6e-2, muon_rate=2e-2)


def _without_drift(run: Run) -> Run:
    """Groups that always meet."""
    return _replace(run, method="local-sgd", interval=1)


def of_all_seeds(*runs: Run) -> tuple[Run, ...]:
    """Each run with each of the paired seeds."""
    return tuple(_replace(run, seed=seed) for run in runs for seed in (1, 2, 3))


OTHERS = {
    **{
        title: of_all_seeds(*(each for run in runs for each in (run, _replace(run, **_FEW_SEQUENCES[run.inner]))))
        for title, runs in _REMEDIES.items()
    },
    "synchronous tail, 10 %": (_replace(_RISING, tail=0.1), _replace(_MUON, tail=0.1)),
    "slow momentum, 0.999": (_replace(_RISING, slow_share=0.5, slow_beta=0.999),),
    **{f"lazy start {share:.0%}": (_replace(_MUON_ANNEALED, lazy_start=share),) for share in (1 / 30, 0.2, 0.3)},
    "H = 10": of_all_seeds(*(_replace(_ANNEALED, method=method, interval=10) for method in ("diloco", "pier-annealed"))),
    "DiLoCo": of_all_seeds(_replace(_MUON, method="diloco")),
    "2400 iterations": of_all_seeds(_LONG, _replace(_LONG, method="pier-muon"), _replace(_ANNEALED, iterations=2400)),
    "2400 iterations of 256 sequences": of_all_seeds(_replace(_LARGE, method="diloco"), _LARGE),
    "critical batch": (
        *of_all_seeds(*_CRITICAL_GROUPS, *_LONGER_CRITICAL_GROUPS),
        _replace(_LONGER_CRITICAL_GROUPS[-1], interval=50),
        *(_replace(run, learning_rate=3.2e-2) for run in _CRITICAL_GROUPS),
    ),
    "no drift": (
        *map(_without_drift, (_MUON_ANNEALED, _LONG, _replace(_MUON_ANNEALED, batch=256), _SMALL)),
        _without_drift(_replace(_SMALL, iterations=600, muon_rate=4e-2)),
        _without_drift(_replace(_SMALL, iterations=4800)),
        _replace(_SMALL, interval=5),
    ),
    "AdamW's noise divided, Muon inside": tuple(
        _replace(run, divides_noise=True)
        for run in (_MUON_ANNEALED, _LONG, _SMALL, *map(_without_drift, (_MUON_ANNEALED, _SMALL)))
    ),
    "1800 outer steps": tuple(
        _replace(_CLAIM, method=method, learning_rate=rate) for method, rates in _CLAIM_RATES.items() for rate in rates
    ),
}
"""What else was tried: docs/study.md."""
