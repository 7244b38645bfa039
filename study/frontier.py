"""Bytes against loss: ``python study/frontier.py [--train] [--output DIR]`` prints the tables and draws ``frontier.png``.

Gaps are final losses above synchronous training with the same inner optimizer on the same batches, in nats per byte. Bits are
sent per parameter and iteration of the local phase, where an all-reduce in FP32 in every iteration sends 32.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from codings import CODINGS
from frontier_runs import ANNEALED, ORTHOGONAL, PARTS, all_runs
from law import markdown
from records import Survey
from rows import ADAM, MUON, SYNCHRONOUS
from simulation import Run, config_of

NAMES = {ADAM: "AdamW", MUON: "Muon"}
"""Inner optimizers, as pages call them."""
# Where it was tried against delay, the gap is that to synchronous Muon at its best rate.
_LOWER_MUON_RATE = 3e-2
_RESULTS = ("bits", "loss", "gap", "seeds", "rho", "step")
_SEEDS, _USUAL = (1, 2, 3), Run()
_TICKS = (0.02, 0.1, 0.5, 2, 10, 32)


def main() -> None:
    """Trains what is missing, if asked to, prints the tables and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("docs/frontier.jsonl"), help="file of the runs (%(default)s)")
    parser.add_argument(
        "--baselines", type=Path, default=Path("docs/survey.jsonl"), help="file of synchronous and FP32 runs (%(default)s)"
    )
    parser.add_argument(
        "--search", type=Path, default=Path("docs/search.jsonl"), help="file of runs with orthogonal steps (%(default)s)"
    )
    parser.add_argument("--train", action="store_true", help="train what is missing: hours")
    parser.add_argument("--processes", type=int, help="runs trained at a time (as many as there are processors)")
    parser.add_argument("--corpus", type=Path, default=Path("runs/study/corpus"), help="folder of the text (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder of the picture (%(default)s)")
    options = parser.parse_args()
    survey = Survey(options.runs, options.corpus.resolve(), options.processes, is_brief=True)
    earlier = Survey(options.baselines, options.corpus.resolve())
    orthogonal = Survey(options.search, options.corpus.resolve())
    if options.train:
        survey.train(run for run in all_runs() if run not in earlier)
    points = Points(survey, earlier, orthogonal)
    for title, runs in PARTS.items():
        if any(run in survey for run in runs):
            print(f"## {title}\n\n{points.table(runs)}\n")
    _draw(points, options.output / "frontier.png")


@dataclasses.dataclass(frozen=True)
class Point:
    """A run over its seeds.

    Attributes:
        run: Settings, with seed 0.
        losses: Final losses, by seed.
        gaps: What they are above synchronous training, by seed.
        correlation: Mean cosine of successive mean pseudo-gradients; None for what was not recorded.
    """

    run: Run
    losses: dict[int, float]
    gaps: dict[int, float]
    correlation: float | None

    @property
    def gap(self) -> float:
        """Mean over the seeds."""
        return statistics.mean(self.gaps.values())

    @property
    def loss(self) -> float:
        """Mean final loss over the seeds."""
        return statistics.mean(self.losses.values())

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds; 0 of one."""
        return statistics.stdev(self.gaps.values()) if len(self.gaps) > 1 else 0.0

    @property
    def bits(self) -> float:
        """Sent per parameter and iteration."""
        return bits(self.run)

    @property
    def amplification(self) -> float | None:
        """Mean over the outer steps of ``eta (1 + mu / (1 - mu rho))``: how far they go for a pseudo-gradient of 1."""
        if self.correlation is None:
            return None
        config, rho = config_of(self.run), self.correlation
        steps = [(config.momentum_at(step), config.learning_rate_at(step)) for step in config.outer_steps()]
        return statistics.mean(eta * (1 + mu / (1 - mu * rho)) for mu, eta in steps)

    @property
    def exchange(self) -> str:
        """What is sent, and what comes back where that differs."""
        run = self.run
        return run.dtype if run.sum_dtype == run.dtype or CODINGS[run.dtype].is_sparse else f"{run.dtype}, {run.sum_dtype} back"


def bits(run: Run) -> float:
    """Sent per parameter and iteration of the local phase: half of an all-reduce goes there, and half comes back."""
    if run.method == SYNCHRONOUS:
        return 32.0
    if run.groups == 1:
        return 0.0
    if run.dtype in CODINGS and CODINGS[run.dtype].is_sparse:
        return CODINGS[run.dtype].bits_sent(run.groups) / run.interval
    sent, returned = (CODINGS[dtype].bits if dtype in CODINGS else 32.0 for dtype in (run.dtype, run.sum_dtype))
    return (sent + returned) / 2 / run.interval


class Points:
    """Results of runs, grouped by all settings except the seed."""

    def __init__(self, *surveys: Survey) -> None:
        """Takes all trained runs of the surveys."""
        self._outcomes = {run: outcome for survey in reversed(surveys) for run, outcome in survey.items()}

    def of(self, runs: Iterable[Run]) -> list[Point]:
        """Those that have been trained, in the order of their first seeds."""
        points = []
        for run in dict.fromkeys(dataclasses.replace(run, seed=0) for run in runs):
            losses, gaps, correlations = {}, {}, []
            for seed in _SEEDS:
                seeded = dataclasses.replace(run, seed=seed)
                outcome, baseline = (self._outcomes.get(each) for each in (seeded, _synchronous(seeded)))
                if outcome is not None and baseline is not None:
                    losses[seed], gaps[seed] = outcome.final, outcome.final - baseline.final
                    correlations += outcome.correlations
            if gaps:
                points.append(Point(run, losses, gaps, statistics.mean(correlations) if correlations else None))
        return points

    def frontier(self, inner: str, groups: int) -> list[Point]:
        """Exchanges of the plugin that wait, from few bits to many, without those that send more and lose more than another."""
        best: list[Point] = []
        for point in sorted(self.of(self.comparable(inner, groups)), key=lambda point: (point.bits, point.gap)):
            if not best or point.gap < best[-1].gap:
                best.append(point)
        return best

    def comparable(self, inner: str, groups: int, usual: Run = _USUAL) -> list[Run]:
        """Runs of the usual length, batch, model and rule, in the open, in codecs of the plugin."""
        return [run for run in self._outcomes if _is_comparable(run, dataclasses.replace(usual, inner=inner, groups=groups))]

    def between(self, inner: str, other: str) -> float:
        """Final loss of synchronous training with one inner optimizer above that with another."""
        finals = [[self._outcomes[Run(inner=which, seed=seed)].final for seed in _SEEDS] for which in (inner, other)]
        return statistics.mean(finals[0]) - statistics.mean(finals[1])

    def table(self, runs: Iterable[Run]) -> str:
        """Markdown: what differs between rows as columns, and before them what does not."""
        rows = [_cells(point) for point in self.of(runs)]
        alike = [name for name in rows[0] if name not in _RESULTS and len({row[name] for row in rows}) == 1] if rows else []
        columns = [name for name in rows[0] if name not in alike]
        same = ", ".join(f"{name} {rows[0][name]}" for name in alike)
        return f"{same}\n\n{markdown(columns, [[row[name] for name in columns] for row in rows])}"


def _synchronous(run: Run) -> Run:
    """Training on the same batches without groups."""
    alike = ["seed", "iterations", "batch", "layers", "width", "inner", "learning_rate", "muon_positions"]
    if run.muon_rate != _LOWER_MUON_RATE:
        alike.append("muon_rate")
    return Run(SYNCHRONOUS, **{name: getattr(run, name) for name in alike})


def _is_comparable(run: Run, usual: Run) -> bool:
    settings = ("seed", "method", "interval", "dtype", "sum_dtype", "outer_momentum", "outer_lr")
    usual = dataclasses.replace(usual, **{name: getattr(run, name) for name in settings})
    plugins = run.dtype == run.sum_dtype and "," not in run.dtype
    return run == usual and plugins and run.method != SYNCHRONOUS


def _cells(point: Point) -> dict[str, object]:
    run = point.run
    spread = f" ± {point.spread:.3f}" if len(point.gaps) > 1 else ""
    correlation, amplification = (
        "-" if value is None else f"{value:.2f}" for value in (point.correlation, point.amplification)
    )
    return {
        "inner": NAMES[run.inner],
        "width": run.width,
        "iterations": run.iterations,
        "rates": f"{run.learning_rate:g}"
        if run.inner == ADAM
        else f"{run.learning_rate:g}, Muon {run.muon_rate:g}{' and positions' * run.muon_positions}",
        "groups": run.groups,
        "H": run.interval,
        "exchange": point.exchange,
        "outer rule": _rule(run),
        "applied after": _delay(run),
        "bits": f"{point.bits:.3g}",
        "loss": f"{point.loss:.3f}",
        "gap": f"{point.gap:+.3f}{spread}",
        "seeds": len(point.gaps),
        "rho": correlation,
        "step": amplification,
    }


def _rule(run: Run) -> str:
    changes = [
        f"{symbol} {value:g}" for symbol, value in (("mu", run.outer_momentum), ("eta", run.outer_lr)) if value is not None
    ]
    return ", ".join((run.method, *changes))


def _delay(run: Run) -> str:
    prediction = f", own {run.own_share:g}, predicted {run.predicted_share:g}, decay {run.prediction_decay:g}"
    return f"{run.overlap}{prediction if run.own_share != 1 or run.predicted_share else ''}"


def _draw(points: Points, path: Path) -> None:
    """Draws gaps over bits: one panel for each inner optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(4.6, 7.4), layout="constrained")
    for panel, inner in zip(axes, (MUON, ADAM), strict=True):
        _draw_panel(points, panel, inner)
    figure.suptitle("Loss above synchronous training, 8 groups", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(points: Points, axes: Any, inner: str) -> None:
    every = points.of(points.comparable(inner, 8))
    for place, dtype in enumerate(("fp32", "int4", "int2", "int1")):
        found = [point for point in every if point.run.dtype == dtype]
        _draw_points(axes, found, fmt="o", color=f"C{place}", label=dtype)
    steps = points.of(run for run in points.comparable(inner, 8, ORTHOGONAL) if run.method == ANNEALED[inner])
    _draw_points(axes, steps, fmt="*", markersize=9, color="black", label="orthogonal outer steps")
    best = points.frontier(inner, 8)
    axes.plot([point.bits for point in best], [point.gap for point in best], color="grey", linewidth=1, zorder=0)
    labelled = 0.0
    for point in best:
        # Labels of close points would overlap.
        if point.bits > 2 * labelled:
            labelled, place = point.bits, (point.bits, point.gap)
            style = {"fontsize": 9, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
            style |= {"ha": "right"} if point.bits > _TICKS[-2] else {}
            axes.annotate(f"H = {point.run.interval}", place, xytext=(6, 8), textcoords="offset points", **style)
    other = {ADAM: MUON, MUON: ADAM}[inner]
    axes.axhline(0, color="black", linewidth=1.5, label=f"synchronous {NAMES[inner]}")
    axes.axhline(points.between(other, inner), color="black", linewidth=1, linestyle="--", label=f"synchronous {NAMES[other]}")
    axes.set(xscale="log", xlabel="bits sent per parameter and iteration")
    axes.set_title(f"{NAMES[inner]} inside", fontsize=10)
    axes.set_xticks(_TICKS, labels=[f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()
    axes.set_ylabel("nats per byte")
    axes.legend(fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    axes.grid(alpha=0.3)


def _draw_points(axes: Any, found: list[Point], **style: Any) -> None:
    if found:
        places, gaps, spreads = zip(*((point.bits, point.gap, point.spread) for point in found), strict=True)
        axes.errorbar(places, gaps, spreads, capsize=3, **style)


if __name__ == "__main__":
    main()
