"""What groups lose, and whether their noise predicts it: ``python study/law.py [--runs FILE] [--train]``.

Simulated runs over groups, tokens per group, length, interval, size of the model and inner optimizer, each against synchronous
training at the best of the rates that were tried for its setting. What is lost is counted in iterations: a run that loses ``x``
ends where a synchronous one of ``exp(-x)`` of its iterations would.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from expected import SETTLED_AFTER, noise_to_signal, shares
from records import Survey
from rows import ADAM, MUON
from simulation import Run
from small_gpt import SEQUENCE
from surveyed import CRITICAL, OTHERS, SCHEDULES, SETTINGS, Setting, of_all_seeds

from pier_megatron import PierConfig

_UNSETTLED = 4


@dataclasses.dataclass(frozen=True)
class Point:
    """A run of groups against synchronous training.

    Attributes:
        run: Run of the groups.
        synchronous: Loss of synchronous training, in nats per byte.
        gap: What the groups' is above it.
        worth: Fall of synchronous training's loss while its iterations grow by a factor of e, at this length.
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
        """Bytes of a group in an iteration at which infinitely many groups would lose a factor of e."""
        run = self.run
        return None if self.lost is None else self.lost * (run.batch * SEQUENCE / run.groups) / (1 - 1 / run.groups)

    @property
    def predicted(self) -> float | None:
        """Gap that the plugin would predict; None where it predicts nothing."""
        run = self.run
        config = PierConfig(
            run.iterations,
            groups=run.groups,
            sync_interval=run.interval,
            preset=run.method,
            lazy_start_fraction=run.lazy_start,
            inner_optimizer=run.inner,
        )
        share_of = shares(config, self.noise, run.groups)
        return None if self.worth is None or share_of is None else -self.worth * math.log(share_of(run.groups))

    @property
    def lost_intervals(self) -> float | None:
        """What is lost of a run with Muon inside, per group."""
        run = self.run
        return None if self.lost is None else self.lost * run.iterations / run.interval / run.groups

    @property
    def lost_per_noise(self) -> float | None:
        """What is lost of a run with AdamW inside, per noise that synchronous training would not have."""
        return None if self.lost is None else self.lost / (self.noise * (1 - 1 / self.run.groups))


_CONSTANTS: dict[str, tuple[str, Callable[[Point], float | None]]] = {
    ADAM: ("Lost per unshared noise", lambda point: point.lost_per_noise),
    MUON: ("Intervals lost per group", lambda point: point.lost_intervals),
}


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
            for run in (_shorter(best, setting), *_of_groups(best, setting))
        )
        survey.train(each for runs in OTHERS.values() for run in runs for each in (_synchronous(survey, run), run))
    for inner in SCHEDULES:
        points = [point for setting in SETTINGS for point in _points(survey, setting, inner)]
        print(f"## {inner} inside\n\n{_table(points)}\n\n{_summary(points)}\n")
    print(f"## Critical batches of synchronous training\n\n{_critical_batches(survey)}\n")
    print(f"## What else was tried\n\n{_others(survey)}")


def _best(survey: Survey, setting: Setting, inner: str) -> list[Run]:
    """Synchronous training at the best of its rates, if any has been tried: of those with the most seeds."""

    def rank(run: Run) -> tuple[int, float]:
        finals = [survey[each].final for each in of_all_seeds(run) if each in survey]
        return -len(finals), statistics.mean(finals)

    return sorted((run for run in setting.synchronous(inner) if run in survey), key=rank)[:1]


def _shorter(run: Run, setting: Setting) -> Run:
    return dataclasses.replace(run, iterations=round(setting.shorter * run.iterations))


def _of_groups(best: Run, setting: Setting) -> list[Run]:
    methods = SCHEDULES[best.inner]
    return [
        dataclasses.replace(best, method=method, **changes) for method, changes in itertools.product(methods, setting.groups)
    ]


def _points(survey: Survey, setting: Setting, inner: str) -> Iterator[Point]:
    for best in _best(survey, setting, inner):
        synchronous, shorter = survey[best].final, _shorter(best, setting)
        worth = (survey[shorter].final - synchronous) / -math.log(setting.shorter) if shorter in survey else None
        for run in _of_groups(best, setting):
            if run not in survey:
                continue
            noises = [noise_to_signal(own, mean, run.groups) for own, mean in survey[run].norms]
            # Without the outer steps in which groups have only begun to come apart.
            noise = statistics.median(noises[_UNSETTLED:SETTLED_AFTER])
            yield Point(run, synchronous, survey[run].final - synchronous, worth, noise)


def _table(points: Iterable[Point]) -> str:
    columns = ("width", "sequences", "iterations", "groups", "H", "bytes of a group in an iteration", "rates", "schedule")
    measured = ("synchronous", "gap", "", "noise / signal", "lost", "critical bytes", "intervals per group")
    rows: list[Sequence[object]] = []
    for point in points:
        run, predicted = point.run, point.predicted
        cells = [run.width, run.batch, run.iterations, run.groups, run.interval, run.batch * SEQUENCE // run.groups]
        cells += [_rates(run), run.method, *(f"{loss:.3f}" for loss in (point.synchronous, point.gap))]
        cells += [f"{point.gap / point.synchronous:.1%}", f"{point.noise:.2f}", _figure(point.lost, 2)]
        cells += [_figure(point.critical, 0), _figure(point.lost_intervals, 2), _figure(predicted, 3)]
        rows.append([*cells, _figure(predicted and point.gap / predicted, 2)])
    return markdown((*columns, *measured, "predicted", "measured / predicted"), rows)


def _rates(run: Run) -> str:
    return f"{run.learning_rate:g}" if run.inner == ADAM else f"{run.learning_rate:g}, Muon {run.muon_rate:g}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _critical_batches(survey: Survey) -> str:
    """Critical batch of arXiv 1812.06162, from the additional iterations that a smaller batch needs for the same loss."""
    rows: list[Sequence[object]] = []
    for inner, width, fewer, more in CRITICAL:
        kind = Run(inner=inner, width=width)
        loss = _best_losses(survey, kind, more)[kind.iterations]
        points = sorted(_best_losses(survey, kind, fewer).items())
        for (early, before), (late, after) in itertools.pairwise(points):
            if before >= loss >= after:
                ratio = early * (late / early) ** ((before - loss) / (before - after)) / kind.iterations
                critical = (ratio - 1) / (1 / fewer - ratio / more)
                rows.append((inner, width, f"{loss:.3f}", fewer, more, f"{ratio:.2f}", f"{critical:.0f}"))
    columns = ("inner", "width", "loss", "sequences", "and more", "times the iterations", "critical batch")
    return markdown(columns, rows)


def _best_losses(survey: Survey, kind: Run, batch: int) -> dict[int, float]:
    """Final loss of synchronous training at the best of its rates, by iterations."""
    best: dict[int, float] = {}
    for run, outcome in survey.items():
        if run == dataclasses.replace(
            kind,
            batch=batch,
            iterations=run.iterations,
            learning_rate=run.learning_rate,
            muon_rate=run.muon_rate,
        ):
            best[run.iterations] = min(outcome.final, best.get(run.iterations, math.inf))
    return best


def _synchronous(survey: Survey, run: Run) -> Run:
    """Training on the same batches, at the rates that are best for it."""
    wanted = Run(inner=run.inner, iterations=run.iterations, batch=run.batch, width=run.width)
    setting = next(each for each in SETTINGS if Run(inner=run.inner, **each.changes) == wanted)
    return dataclasses.replace(_best(survey, setting, run.inner)[0], seed=run.seed)


def _others(survey: Survey) -> str:
    columns = (
        "",
        "schedule",
        "inner",
        "width",
        "sequences",
        "iterations",
        "groups",
        "H",
        "rates",
        "seeds",
        "final loss",
    )
    rows: list[Sequence[object]] = []
    for title, runs in OTHERS.items():
        of_seeds: dict[Run, list[Run]] = {}
        for run in runs:
            if run in survey:
                of_seeds.setdefault(dataclasses.replace(run, seed=0), []).append(run)
        for run, seeds in of_seeds.items():
            cells = [title, run.method, run.inner, run.width, run.batch, run.iterations, run.groups, run.interval]
            finals = [survey[each].final for each in seeds]
            gaps = [survey[each].final - survey[base].final for each in seeds if (base := _synchronous(survey, each)) in survey]
            rows.append((*cells, _rates(run), len(seeds), _mean(finals), _mean(gaps)))
    return markdown((*columns, "gap"), rows)


def _mean(values: Sequence[float]) -> str:
    """With the standard deviation over seeds, if there are some."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.3f}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def _summary(points: Sequence[Point]) -> str:
    """What the law of an inner optimizer takes for constant, by schedule."""
    what, constant_of = _CONSTANTS[points[0].run.inner]
    lines = []
    for method in dict.fromkeys(point.run.method for point in points):
        found = [value for point in points if point.run.method == method and (value := constant_of(point)) is not None]
        if found:
            lines.append(f"{method}: {statistics.median(found):.3f}, from {min(found):.3f} to {max(found):.3f}")
    return f"{what}: " + "; ".join(lines)


if __name__ == "__main__":
    main()
