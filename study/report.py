"""Makes the tables and plots of the study from the finished runs: ``python study/report.py [--output DIR]``."""

import argparse
import itertools
import json
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rows import (
    ABLATIONS,
    ADAM,
    ITERATIONS,
    METHODS,
    MUON,
    SYNCHRONOUS,
    TABLES,
    Row,
    Table,
    learning_rate_sweep,
    muon_sweep,
)
from run import Study

from pier_megatron import PierConfig
from pier_megatron.outer.report import SCALAR_PREFIX
from pier_megatron.schedules import PRESETS

# More seeds than any study has.
_SEEDS = range(1, 100)

# One colour for each training in all panels of the picture; synchronous ones are black.
_COLORS = {"diloco": "C0", "pier": "C1", "pier-rising": "C2", "pier-muon-annealed": "C4", SYNCHRONOUS: "black"}
_SYNCHRONOUS_ADAMW = "synchronous AdamW"
_GROUPS = (2, 4, 8, 16)

_LEGEND = """Explanations: [study.md](../docs/study.md). Losses
are nats per byte, mean ± standard deviation over three paired seeds.

| column | meaning |
|---|---|
| H / (1 - mu) / T | momentum horizon as a share of the run |
| loss at the switch | validation loss after the last iteration of the lazy start |
| rise after it | highest loss of the first five outer steps minus the loss at the switch |
| gap | final loss minus that of the synchronous run on the same batches |
| cosine | cosine of a group's pseudo-gradient to the mean one, averaged over groups and outer steps |
| momentum length | momentum over the mean pseudo-gradient, averaged over outer steps |"""

# Outer steps after the switch among which the highest loss counts as the rise.
_RISE_STEPS = 5


def main() -> None:
    """Writes ``tables.md``, ``study.json`` and ``study.png``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="folder of the runs (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="folder for what it writes (%(default)s)")
    parser.add_argument("--known", type=Path, metavar="JSON", help="a study.json, for the curves of rows that are not there")
    parser.add_argument("--only-picture", action="store_true", help="draw study.png, and write nothing else")
    options = parser.parse_args()
    PRESETS.update(ABLATIONS)
    known = json.loads(options.known.read_text()) if options.known else {}
    results = Results(Study(options.runs.resolve(), known=known))
    if options.only_picture:
        _plot(results, options.output / "study.png")
        return
    sections = [_sweep(results), *(_section(results, table) for table in TABLES), _spreads(results)]
    heading = f"# Study tables\n\n`make study` or `python study/report.py`, {date.today().isoformat()}. {_LEGEND}"
    (options.output / "tables.md").write_text("\n\n".join([heading, *sections]) + "\n")
    (options.output / "study.json").write_text(json.dumps(results.raw(), indent=1, sort_keys=True))
    _plot(results, options.output / "study.png")
    print("\n\n".join(sections))


class Results:
    """What came out of the rows that have been trained."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._curves: dict[Row, dict[int, float]] = {}

    @property
    def learning_rate(self) -> float:
        """Learning rate of AdamW in all rows except those of its sweep."""
        return self._study.learning_rate

    def curve(self, row: Row) -> dict[int, float] | None:
        """Validation loss by iteration, or None for a row that has not been trained."""
        row = self._study.with_rate(row)
        if row not in self._curves:
            curve = self._study.validation(row) if self._study.has(row) else self._study.known_curve(row)
            if curve is None:
                return None
            self._curves[row] = curve
        return self._curves[row]

    def final(self, row: Row) -> float | None:
        """Validation loss after the last iteration, in nats per byte."""
        curve = self.curve(row)
        return None if curve is None else curve[max(curve)]

    def gap(self, row: Row) -> float | None:
        """Final loss above that of the synchronous run on the same batches."""
        own, baseline = self.final(row), self.final(row.baseline)
        return None if own is None or baseline is None else own - baseline

    def at_switch(self, row: Row) -> float | None:
        """Validation loss at the end of the lazy start, if there is one."""
        return (self.curve(row) or {}).get(_config(row).lazy_start)

    def rise(self, row: Row) -> float | None:
        """Highest loss of the first outer steps after the switch, minus the loss at the switch; negative if it only falls."""
        curve, switch = self.curve(row), _config(row).lazy_start
        if curve is None or switch not in curve:
            return None
        after = [loss for iteration, loss in curve.items() if switch < iteration <= switch + _RISE_STEPS * row.interval]
        return max(after) - curve[switch] if after else None

    def cosine(self, row: Row) -> float | None:
        """Cosine of the groups' pseudo-gradients to their mean, averaged over groups and outer steps."""
        cosines = self._of_outer_steps(row, "cosine-mean")
        return statistics.mean(cosines) if cosines else None

    def momentum_ratio(self, row: Row) -> float | None:
        """How many times longer the momentum is than the mean pseudo-gradient, averaged over outer steps."""
        momentum, delta = (self._of_outer_steps(row, f"{name}-norm") for name in ("momentum", "pseudo-gradient"))
        return statistics.mean(map(operator.truediv, momentum, delta)) if momentum else None

    def _of_outer_steps(self, row: Row, scalar: str) -> list[float]:
        row = self._study.with_rate(row)
        return [*self._study.log(row).scalars[SCALAR_PREFIX + scalar].values] if self._study.has(row) else []

    def spread(self, row: Row) -> list[tuple[float, float]]:
        """Spread of the weights over the groups and inner learning rate, by outer step, where groups never agree."""
        row = self._study.with_rate(row)
        if not self._study.has(row):
            return []
        scalars = self._study.log(row).scalars
        spreads, rates = (scalars[name] for name in (f"{SCALAR_PREFIX}spread of all groups", "learning-rate"))
        rate_at = dict(zip(rates.steps, rates.values, strict=True))
        switch = _config(row).lazy_start
        at = dict(zip(spreads.steps, spreads.values, strict=True))
        # Groups that begin alike need some outer steps to come apart.
        return [(at[step], rate_at[step]) for step in at if step >= switch + _RISE_STEPS * row.interval]

    def raw(self) -> dict[str, dict[int, float]]:
        """All curves so far, by the names of their rows."""
        return {
            row.name: {iteration: round(loss, 5) for iteration, loss in curve.items()} for row, curve in self._curves.items()
        }


def _sweep(results: Results) -> str:
    lines = ["## Learning rate of synchronous AdamW\n", "| lr | final loss, nats per byte |", "|---|---|"]
    lines += _of_rates(results, learning_rate_sweep(len(_SEEDS)), operator.attrgetter("learning_rate"))
    lines += ["\n## Learning rate of synchronous Muon\n", "| of matrices | final loss |", "|---|---|"]
    lines += _of_rates(results, muon_sweep(len(_SEEDS), results.learning_rate), operator.attrgetter("muon_rate"))
    return "\n".join(lines)


def _of_rates(results: Results, sweep: Iterable[Row], rate_of: Callable[[Row], float]) -> list[str]:
    return [f"| {rate:g} | {_spread(map(results.final, rows))} |" for rate, rows in itertools.groupby(sweep, rate_of)]


def _section(results: Results, table: Table) -> str:
    columns = (
        *("", "gap", "final loss", "H / (1 - mu) / T", "loss at the switch", "rise after it"),
        *("cosine", "momentum length"),
    )
    lines = [f"## {table.title}\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, changes in table.variants.items():
        baselines = [row.baseline for row in _of_all_seeds(SYNCHRONOUS, changes)]
        inner = {ADAM: "AdamW", MUON: "Muon"}[baselines[0].inner]
        lines.append(f"| {name}, synchronous {inner} | | {_spread(map(results.final, baselines))} | | | | | |")
        for method in table.methods:
            rows = _of_all_seeds(method, changes)
            cells = (
                _spread(map(results.gap, rows), sign="+"),
                _spread(map(results.final, rows)),
                f"{_config(rows[0]).momentum_horizon():.1%}",
                _spread(map(results.at_switch, rows)),
                _spread(map(results.rise, rows), sign="+"),
                _spread(map(results.cosine, rows), digits=2),
                _spread(map(results.momentum_ratio, rows), digits=1),
            )
            lines.append(f"| {name}, {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spreads(results: Results) -> str:
    """Spread of the weights over gossip pairs, against the inner learning rate."""
    columns = ("", "spread after 5 outer steps", "at the end", "over the learning rate", "at the end", "correlation")
    lines = ["## Spread of weights over gossip pairs\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for groups, interval in itertools.product((4, 8, 16), (20, 10)):
        found = [results.spread(row) for row in _of_all_seeds("noloco", {"groups": groups, "interval": interval})]
        there = [pairs for pairs in found if pairs]
        cells = (
            _spread((pairs[0][0] for pairs in there), digits=4),
            _spread((pairs[-1][0] for pairs in there), digits=4),
            _spread((pairs[0][0] / pairs[0][1] for pairs in there), digits=2),
            _spread((pairs[-1][0] / pairs[-1][1] for pairs in there), digits=2),
            _spread((statistics.correlation(*zip(*pairs, strict=True)) for pairs in there), digits=3),
        )
        lines.append(f"| {groups} groups, H = {interval} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _config(row: Row) -> PierConfig:
    return PierConfig(
        train_iters=ITERATIONS // row.batch_scale,
        groups=row.groups,
        sync_interval=row.interval,
        preset=row.method,
        lazy_start_fraction=row.lazy_start,
    )


def _of_all_seeds(method: str, changes: dict[str, Any]) -> list[Row]:
    return [Row(method, seed, **changes) for seed in _SEEDS]


def _spread(values: Iterable[float | None], sign: str = "", digits: int = 3) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    if len(there) == 1:
        return f"{there[0]:{sign}.{digits}f} (one seed)"
    return f"{statistics.mean(there):{sign}.{digits}f} ± {statistics.stdev(there):.{digits}f}"


def _plot(results: Results, path: Path) -> None:
    """Draws the gap over groups and over the interval, with AdamW and with Muon inside, and the losses of one seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(4.6, 11), layout="constrained")
    figure.suptitle("Loss above synchronous training, and losses of one seed", fontsize=11)
    _plot_gaps(results, axes[0], "groups", _GROUPS, METHODS, {})
    axes[0].set_title("AdamW inside, H = 20", fontsize=10)
    _plot_gaps(results, axes[1], "groups", _GROUPS, ("diloco", "pier-rising", "pier-muon-annealed"), {"inner": MUON})
    axes[1].set_title("Muon inside, H = 20", fontsize=10)
    # Not H = 200: a lazy start lasts at least an interval, so that row differs in two settings.
    _plot_gaps(results, axes[2], "interval", (10, 20, 50), ("diloco", "pier-rising"), {})
    axes[2].set_title("AdamW inside, 4 groups", fontsize=10)
    axes[2].set_xlabel("H, iterations between outer steps")
    losses, rows = axes[3], [Row(method, 1) for method in METHODS]
    for row in (*rows, rows[0].baseline):
        curve = results.curve(row)
        if curve:
            label = _SYNCHRONOUS_ADAMW if row.method == SYNCHRONOUS else row.method
            losses.plot(*zip(*sorted(curve.items()), strict=True), color=_COLORS[row.method], label=label, linewidth=1.2)
    losses.set(xlabel="iteration", ylabel="loss, nats per byte")
    losses.set_title("AdamW inside, 4 groups, H = 20, seed 1", fontsize=10)
    losses.legend(fontsize=9)
    losses.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plot_gaps(
    results: Results, axes: Any, varied: str, values: Sequence[int], methods: Sequence[str], changes: dict[str, Any]
) -> None:
    """Draws a line for each method over what is varied, with standard deviations over seeds; rows not trained are missing."""
    for method in methods:
        points = []
        for value in values:
            gaps = [gap for gap in map(results.gap, _of_all_seeds(method, changes | {varied: value})) if gap is not None]
            if gaps:
                points.append((value, statistics.mean(gaps), statistics.stdev(gaps) if len(gaps) > 1 else 0.0))
        if points:
            places, means, spreads = zip(*points, strict=True)
            axes.errorbar(places, means, spreads, marker="o", capsize=3, color=_COLORS[method], label=method)
    synchronous = "synchronous Muon" if changes.get("inner") == MUON else _SYNCHRONOUS_ADAMW
    axes.axhline(0, color=_COLORS[SYNCHRONOUS], linewidth=1.5, label=synchronous)
    axes.set(xscale="log", xlabel=varied, ylabel="gap, nats per byte")
    axes.set_xticks(values, labels=[str(value) for value in values])
    axes.minorticks_off()
    # Room for the legend.
    axes.set_ylim(-0.02, 1.4 * axes.get_ylim()[1])
    axes.legend(fontsize=9, ncols=2, loc="upper left")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
