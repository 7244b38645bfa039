"""What groups lose, and whether their noise foretells it: ``python study/law.py [--runs FILE] [--train]``.

Simulated runs over groups, tokens per group, length, interval, size of the model and inner optimizer, each against synchronous
training at the best of the rates that were tried for its setting. What is lost is counted in iterations: a run that loses ``x``
ends where a synchronous one of ``exp(-x)`` of its iterations would.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import ADAM, MUON, SYNCHRONOUS
from simulation import Run
from small_gpt import SEQUENCE
from survey import Survey

from pier_megatron.outer.noise import equivalent_share, noise_to_signal, settled

_SHORTER = 0.75
"""Synchronous training of so many of a setting's iterations says what iterations are worth there."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What synchronous training is tuned for, and what is compared with it.

    Attributes:
        changes: What its runs have in place of a :class:`Run`'s defaults.
        rates: Of AdamW that were tried.
        muon_rates: Of Muon and AdamW that were tried together.
        groups: What groups have in place of the defaults.
    """

    changes: Mapping[str, Any]
    rates: Sequence[float]
    muon_rates: Sequence[tuple[float, float]]
    groups: Sequence[Mapping[str, int]]

    def synchronous(self, inner: str) -> list[Run]:
        """One run for each rate."""
        given = {"inner": inner, "method": SYNCHRONOUS, **self.changes}
        if inner == ADAM:
            return [Run(learning_rate=rate, **given) for rate in self.rates]
        return [Run(muon_rate=muon, learning_rate=adam, **given) for muon, adam in self.muon_rates]


_EIGHT = {"groups": 8}
SETTINGS = (
    Setting(
        {},
        (8e-3,),
        ((4e-2, 8e-3),),
        (*({"groups": groups} for groups in (2, 4, 8)), *({"interval": interval} for interval in (5, 10, 40, 50))),
    ),
    Setting({"iterations": 2400}, (4e-3, 8e-3), ((2e-2, 8e-3), (4e-2, 8e-3)), (_EIGHT,)),
    Setting({"batch": 256}, (1.6e-2,), ((4e-2, 8e-3),), (_EIGHT,)),
    Setting({"batch": 16}, (4e-3, 8e-3), (), (_EIGHT,)),
    Setting({"width": 32}, (8e-3, 1.6e-2, 3.2e-2), ((2e-2, 8e-3), (4e-2, 8e-3), (4e-2, 1.6e-2)), (_EIGHT,)),
    Setting({"width": 128}, (4e-3, 8e-3), (), (_EIGHT,)),
)

SCHEDULES = {ADAM: ("diloco", "pier-rising", "pier-annealed"), MUON: ("diloco", "pier-muon", "pier-muon-annealed")}

_RISING, _MUON = Run("pier-rising"), Run("pier-muon-annealed", inner=MUON)
_CLAIM = Run("diloco", groups=4, interval=2, iterations=4000, batch=128, width=32, learning_rate=1.6e-2)
_replace = dataclasses.replace

OTHERS = {
    "synchronous tail, 5 %": (_replace(_RISING, tail=0.05), _replace(_MUON, method="pier-muon", tail=0.05)),
    "synchronous tail, 10 %": (_replace(_RISING, tail=0.1), _replace(_MUON, method="pier-muon", tail=0.1)),
    "AdamW's noise divided": (_replace(_RISING, divides_noise=True),),
    "slow momentum": tuple(_replace(_RISING, slow_share=0.5, slow_beta=beta) for beta in (0.99, 0.999)),
    "int4, H = 5": (
        _replace(_RISING, method="pier-annealed", interval=5, dtype="int4"),
        *(_replace(_MUON, interval=5, dtype="int4", seed=seed) for seed in (1, 2, 3)),
    ),
    **{f"lazy start {share:.0%}": (_replace(_MUON, lazy_start=share),) for share in (1 / 30, 0.2, 0.3)},
    "other seeds": (
        *(_replace(_RISING, method="pier-annealed", interval=interval, seed=seed) for interval in (10, 20) for seed in (2, 3)),
        *(_replace(_RISING, method="diloco", interval=10, seed=seed) for seed in (2, 3)),
        *(_replace(_MUON, method=method, seed=seed) for method in ("diloco", "pier-muon-annealed") for seed in (2, 3)),
        *(_replace(_MUON, method=method, iterations=2400, seed=seed) for method in SCHEDULES[MUON][1:] for seed in (2, 3)),
    ),
    "16 groups": tuple(_replace(_MUON, method=method, groups=16) for method in ("diloco", "pier-muon-annealed")),
    "1800 outer steps": (_CLAIM, *(_replace(_CLAIM, method=method, learning_rate=2e-3) for method in ("diloco", "pier"))),
}
"""What else was tried: docs/study.md."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A run of groups against synchronous training.

    Attributes:
        run: Of the groups.
        synchronous: Loss of synchronous training, in nats per byte.
        gap: What the groups' is above it.
        worth: By how much synchronous training's falls while its iterations grow by a factor of e, at this length.
        noise: Noise to signal of the groups' pseudo-gradients in the first outer steps, as the plugin takes it.
    """

    run: Run
    synchronous: float
    gap: float
    worth: float | None
    noise: float

    @property
    def lost(self) -> float | None:
        """Iterations that are lost, as the logarithm of their share."""
        return None if self.worth is None else self.gap / self.worth

    @property
    def critical(self) -> float | None:
        """Bytes of a group in an iteration at which groups without number would lose a factor of e."""
        run = self.run
        return None if self.lost is None else self.lost * (run.batch * SEQUENCE / run.groups) / (1 - 1 / run.groups)

    @property
    def foretold(self) -> float | None:
        """The gap that the plugin would foretell from the noise."""
        groups = self.run.groups
        return None if self.worth is None else -self.worth * math.log(equivalent_share(self.noise, groups, groups))

    @property
    def unshared_noise(self) -> float:
        """What synchronous training would not have of it."""
        return self.noise * (1 - 1 / self.run.groups)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("docs/survey.jsonl"), help="file of the runs (%(default)s)")
    parser.add_argument("--train", action="store_true", help="train what is missing there: hours on two cores")
    parser.add_argument("--corpus", type=Path, default=Path("runs/study/corpus"), help="folder of the text (%(default)s)")
    options = parser.parse_args()
    survey = Survey(options.runs, options.corpus.resolve())
    pairs = list(itertools.product(SETTINGS, SCHEDULES))
    if options.train:
        survey.train(run for setting, inner in pairs for run in setting.synchronous(inner))
        survey.train(
            run
            for setting, inner in pairs
            for best in _best(survey, setting, inner)
            for run in (_shorter(best), *_of_groups(best, setting))
        )
        survey.train(each for runs in OTHERS.values() for run in runs for each in (_synchronous(run), run))
    for inner in SCHEDULES:
        points = [point for setting in SETTINGS for point in _points(survey, setting, inner)]
        print(f"## {inner} inside\n\n{_table(points)}\n\n{_summary(points)}\n")
    print(f"## What else was tried\n\n{_others(survey)}")


def _best(survey: Survey, setting: Setting, inner: str) -> list[Run]:
    """Synchronous training at the best of the rates that have been tried, if any has been."""
    return sorted((run for run in setting.synchronous(inner) if run in survey), key=lambda run: survey[run].final)[:1]


def _shorter(run: Run) -> Run:
    return _replace(run, iterations=round(_SHORTER * run.iterations))


def _of_groups(best: Run, setting: Setting) -> list[Run]:
    methods = SCHEDULES[best.inner]
    return [_replace(best, method=method, **changes) for method, changes in itertools.product(methods, setting.groups)]


def _points(survey: Survey, setting: Setting, inner: str) -> Iterator[Point]:
    for best in _best(survey, setting, inner):
        synchronous, shorter = survey[best].final, _shorter(best)
        worth = (survey[shorter].final - synchronous) / -math.log(_SHORTER) if shorter in survey else None
        for run in _of_groups(best, setting):
            if run not in survey:
                continue
            noise = settled([noise_to_signal(own, mean, run.groups) for own, mean in survey[run].norms])
            assert noise is not None, "all have outer steps enough"
            yield Point(run, synchronous, survey[run].final - synchronous, worth, noise)


def _table(points: Iterable[Point]) -> str:
    columns = ("width", "sequences", "iterations", "groups", "H", "bytes of a group in an iteration", "schedule", "synchronous")
    measured = ("gap", "", "noise to signal", "lost", "critical bytes", "foretold gap", "measured / foretold")
    rows: list[Sequence[object]] = []
    for point in points:
        run, foretold = point.run, point.foretold
        cells = [run.width, run.batch, run.iterations, run.groups, run.interval, run.batch * SEQUENCE // run.groups, run.method]
        cells += [f"{point.synchronous:.3f}", f"{point.gap:.3f}", f"{point.gap / point.synchronous:.1%}", f"{point.noise:.2f}"]
        cells += (
            ["-"] * 4
            if foretold is None
            else [f"{point.lost:.2f}", f"{point.critical:.0f}", f"{foretold:.3f}", f"{point.gap / foretold:.2f}"]
        )
        rows.append(cells)
    return _markdown((*columns, *measured), rows)


def _synchronous(run: Run) -> Run:
    """Training on the same batches, at the rate that is best for it."""
    given = {name: getattr(run, name) for name in ("seed", "inner", "iterations", "batch", "width", "muon_rate")}
    return Run(learning_rate=_CLAIM.learning_rate if run.width == _CLAIM.width else run.learning_rate, **given)


def _others(survey: Survey) -> str:
    columns = ("", "schedule", "inner", "iterations", "H", "inner rate", "seed", "final loss", "gap")
    rows: list[Sequence[object]] = []
    for title, runs in OTHERS.items():
        for run in runs:
            if run in survey:
                final, synchronous = survey[run].final, _synchronous(run)
                gap = f"{final - survey[synchronous].final:.3f}" if synchronous in survey else "-"
                cells = (title, run.method, run.inner, run.iterations, run.interval, f"{run.learning_rate:g}", run.seed)
                rows.append((*cells, f"{final:.3f}", gap))
    return _markdown(columns, rows)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def _summary(points: Sequence[Point]) -> str:
    """Lost iterations per unshared noise, by schedule."""
    lines = []
    for method in dict.fromkeys(point.run.method for point in points):
        ratios = [
            point.lost / point.unshared_noise for point in points if point.run.method == method and point.lost is not None
        ]
        if ratios:
            lines.append(f"{method}: {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    return "Lost per unshared noise: " + "; ".join(lines)


if __name__ == "__main__":
    main()
