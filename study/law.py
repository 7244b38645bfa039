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

from pier_megatron.outer.noise import LOST_PER_NOISE, SETTLED_AFTER, noise_to_signal

_SHORTER = 0.75
"""Synchronous training of so many of a setting's iterations says what iterations are worth there."""

_UNSETTLED = 4


@dataclasses.dataclass(frozen=True)
class Setting:
    """What synchronous training is tuned for, and what is compared with it.

    Attributes:
        title: For people.
        changes: What its runs have in place of a :class:`Run`'s defaults.
        rates: Of AdamW that were tried.
        muon_rates: Of Muon and AdamW that were tried together.
        groups: What groups have in place of the defaults.
    """

    title: str
    changes: Mapping[str, Any]
    rates: Sequence[float]
    muon_rates: Sequence[tuple[float, float]]
    groups: Sequence[Mapping[str, int]]

    def synchronous(self, inner: str, **changes: Any) -> list[Run]:
        """One run for each rate."""
        given = {"inner": inner, "method": SYNCHRONOUS, **self.changes, **changes}
        if inner == ADAM:
            return [Run(learning_rate=rate, **given) for rate in self.rates]
        return [Run(muon_rate=muon, learning_rate=adam, **given) for muon, adam in self.muon_rates]


_EIGHT = {"groups": 8}
SETTINGS = (
    Setting(
        "600 iterations of 64 sequences, width 64",
        {},
        (8e-3,),
        ((4e-2, 8e-3),),
        (*({"groups": groups} for groups in (2, 4, 8)), *({"interval": interval} for interval in (5, 10, 40, 50))),
    ),
    Setting("2400 iterations", {"iterations": 2400}, (4e-3, 8e-3), ((2e-2, 8e-3), (4e-2, 8e-3)), (_EIGHT,)),
    Setting("256 sequences", {"batch": 256}, (1.6e-2,), ((4e-2, 8e-3),), (_EIGHT,)),
    Setting("16 sequences", {"batch": 16}, (4e-3, 8e-3), (), (_EIGHT,)),
    Setting("width 32", {"width": 32}, (8e-3, 1.6e-2, 3.2e-2), ((2e-2, 8e-3), (4e-2, 8e-3), (4e-2, 1.6e-2)), (_EIGHT,)),
    Setting("width 128", {"width": 128}, (4e-3, 8e-3), (), (_EIGHT,)),
)

SCHEDULES = {ADAM: ("diloco", "pier-rising", "pier-annealed"), MUON: ("diloco", "pier-muon", "pier-muon-annealed")}


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
        return None if self.worth is None else self.worth * LOST_PER_NOISE * self.unshared_noise

    @property
    def unshared_noise(self) -> float:
        """What synchronous training would not have of it."""
        return self.noise * (1 - 1 / self.run.groups)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("docs/survey.jsonl"), help="file of the runs (%(default)s)")
    parser.add_argument("--train", action="store_true", help="train what is missing there: hours on two cores")
    options = parser.parse_args()
    survey = Survey(options.runs)
    pairs = list(itertools.product(SETTINGS, SCHEDULES))
    if options.train:
        survey.train(run for setting, inner in pairs for run in setting.synchronous(inner))
        survey.train(run for setting, inner in pairs for run in _rows(survey, setting, inner))
    for inner in SCHEDULES:
        points = [point for setting in SETTINGS for point in _points(survey, setting, inner)]
        print(f"## {inner} inside\n\n{_table(points)}\n\n{_summary(points)}\n")


def _best(survey: Survey, setting: Setting, inner: str) -> Run | None:
    """Synchronous training at the best of the rates that have been tried."""
    found = [run for run in setting.synchronous(inner) if run in survey]
    return min(found, key=lambda run: survey[run].final) if found else None


def _rows(survey: Survey, setting: Setting, inner: str) -> list[Run]:
    """A shorter synchronous run, and those of groups, at the best rate."""
    best = _best(survey, setting, inner)
    if best is None:
        return []
    of_groups = itertools.product(SCHEDULES[inner], setting.groups)
    return [_shorter(best), *(dataclasses.replace(best, method=method, **changes) for method, changes in of_groups)]


def _shorter(run: Run) -> Run:
    return dataclasses.replace(run, iterations=round(_SHORTER * run.iterations))


def _points(survey: Survey, setting: Setting, inner: str) -> Iterator[Point]:
    best = _best(survey, setting, inner)
    if best is None:
        return
    shorter, *of_groups = _rows(survey, setting, inner)
    worth = (survey[shorter].final - survey[best].final) / -math.log(_SHORTER) if shorter in survey else None
    for run in of_groups:
        if run in survey:
            outcome, synchronous = survey[run], survey[best].final
            noises = [noise_to_signal(own, mean, run.groups) for own, mean in outcome.norms[_UNSETTLED:SETTLED_AFTER]]
            yield Point(run, synchronous, outcome.final - synchronous, worth, statistics.median(noises))


def _table(points: Iterable[Point]) -> str:
    columns = (
        *(
            "width",
            "sequences",
            "iterations",
            "groups",
            "H",
            "bytes of a group in an iteration",
            "schedule",
            "synchronous",
            "gap",
        ),
        *("", "noise to signal", "lost", "critical bytes", "foretold gap", "measured / foretold"),
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for point in points:
        run, foretold = point.run, point.foretold
        cells = [run.width, run.batch, run.iterations, run.groups, run.interval, run.batch * SEQUENCE // run.groups, run.method]
        cells += [f"{point.synchronous:.3f}", f"{point.gap:.3f}", f"{point.gap / point.synchronous:.1%}", f"{point.noise:.2f}"]
        cells += (
            ["-"] * 4
            if foretold is None
            else [f"{point.lost:.2f}", f"{point.critical:.0f}", f"{foretold:.3f}", f"{point.gap / foretold:.2f}"]
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


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
