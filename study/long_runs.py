"""Runs of many outer steps: ``python study/long_runs.py [--train] [--only PART]`` prints what they end at.

The schedule of arXiv 2511.17849 on a model that two cores can train: 100,000 iterations, H = 50, 8 groups, 1,800 outer steps.
``--train`` takes hours, and continues where it stopped.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from frontier import NAMES as INNER
from frontier import bits
from frontier_runs import ANNEALED, AVERAGING, coded
from law import markdown
from records import Survey, be_worker
from rows import ADAM, MUON, SYNCHRONOUS
from run import MALLOC
from simulation import Outcome, Run
from small_gpt import Text, losses
from text import data_arguments
from together import batches, train_together

_replace = dataclasses.replace

# Runs that train together: enough to fill a core, with few enough rows for its cache.
_TOGETHER = 8

CLAIM = Run(SYNCHRONOUS, groups=8, interval=50, iterations=100_000, layers=1, width=16, batch=8)
MUON_CLAIM = _replace(CLAIM, inner=MUON, learning_rate=1.6e-2)

RATES = {
    ADAM: {
        SYNCHRONOUS: (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        "pier": (5e-4, 1e-3, 2e-3, 4e-3),
        "pier-long": (5e-4, 1e-3, 2e-3),
        "diloco": (2e-3, 4e-3, 8e-3),
        "pier-annealed": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        "pier-rising": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    },
    MUON: {
        SYNCHRONOUS: (5e-3, 1e-2, 2e-2, 4e-2),
        "pier": (6e-4, 1.25e-3, 2.5e-3, 5e-3, 1e-2),
        "diloco": (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2),
        "pier-muon-annealed": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2),
    },
}
"""Inner learning rates that each method chooses from."""

# Those near the best, for other seeds.
_CLOSE = {SYNCHRONOUS: (1e-3, 2e-3), "pier": (1e-3,), "pier-long": (1e-3,), "diloco": (4e-3,), "pier-annealed": (4e-3,)}


def at_rate(run: Run, method: str, rate: float) -> Run:
    """The same by another method, at an inner rate: that of AdamW, or that of Muon's matrices."""
    return _replace(run, method=method, **{"learning_rate" if run.inner == ADAM else "muon_rate": rate})


def _exchanges(run: Run) -> list[Run]:
    """Ever fewer bits: among all groups, and among two sites whose groups meet often."""
    preset = ANNEALED[run.inner]
    groups = [coded(_replace(run, method=preset), dtype) for dtype in ("fp32", "int2", "int1")]
    sites = {"sites": 2, "site_interval": run.interval, "site_method": preset, "site_dtype": "int2"}
    return [*groups, _replace(run, method=AVERAGING, interval=run.interval // 3, **sites)]


def _at_rates(runs: Iterable[Run], rates: Sequence[float]) -> tuple[Run, ...]:
    return tuple(at_rate(run, run.method, rate) for run in runs for rate in rates)


def _tuned(run: Run) -> tuple[Run, ...]:
    return tuple(at_rate(run, method, rate) for method, rates in RATES[run.inner].items() for rate in rates)


def _of_seeds(run: Run, rates_of: Mapping[str, Sequence[float]]) -> tuple[Run, ...]:
    seeds = (_replace(run, seed=seed) for seed in (2, 3))
    return tuple(at_rate(each, method, rate) for each in seeds for method, rates in rates_of.items() for rate in rates)


_RATES_OF_BITS = {ADAM: (2e-3, 4e-3, 8e-3), MUON: (5e-3, 1e-2, 2e-2, 4e-2)}
_BITS = _replace(CLAIM, interval=30, iterations=33_300, batch=32)
_MUON_BITS = _replace(_BITS, inner=MUON, learning_rate=1.6e-2)
_MUON_LONGER = _replace(_MUON_BITS, interval=48, iterations=53_280)
_FP32, _INT2, _, _SITES = _exchanges(_MUON_BITS)

# Next to the rates that were best.
_MORE_RATES = (*_at_rates((_MUON_BITS, _INT2), (4e-2,)), *_at_rates((_SITES,), (5e-3,)))
_AT_BEST = (*_at_rates((_MUON_BITS, _INT2), (2e-2,)), *_at_rates((_SITES,), (1e-2,)))
_OTHERS_AT_BEST = (*_at_rates((_FP32,), (2e-2,)), *_at_rates((_BITS, *_exchanges(_BITS)[:2]), (2e-3,)))
_RARELY = _at_rates((_MUON_LONGER, _exchanges(_MUON_LONGER)[1]), (2e-2,))

PARTS: dict[str, tuple[Run, ...]] = {
    "AdamW, 8 sequences": _tuned(CLAIM),
    "AdamW, 8 sequences, other seeds": _of_seeds(CLAIM, _CLOSE),
    "Muon, 8 sequences": _tuned(MUON_CLAIM),
    "Few bits, Muon, H = 30": (*_at_rates((_MUON_BITS, *_exchanges(_MUON_BITS)), (1e-2, 2e-2)), *_MORE_RATES),
    "Few bits, Muon, H = 30, other seeds": tuple(_replace(run, seed=seed) for seed in (2, 3) for run in _AT_BEST),
    "Few bits, other seeds": tuple(_replace(run, seed=seed) for seed in (2, 3) for run in _OTHERS_AT_BEST),
    "Few bits, Muon, H = 48": _RARELY,
    "Few bits, AdamW, H = 30": _at_rates((_BITS, *_exchanges(_BITS)[:2]), _RATES_OF_BITS[ADAM]),
}
"""What is trained, in this order."""


def train(survey: Survey, runs: Iterable[Run], corpus: Path, saves: Path, processes: int | None) -> None:
    """Trains those that are missing, several in each process of one thread."""
    missing = [run for run in runs if run not in survey]
    print(f"{len(missing)} runs are to be done", flush=True)
    if not missing:
        return
    data_arguments(corpus)
    saves.mkdir(parents=True, exist_ok=True)
    os.environ.update(MALLOC, OMP_NUM_THREADS="1")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context, be_worker) as pool:
        under_way = {pool.submit(_train, corpus, saves, together): together for together in batches(missing, _TOGETHER)}
        for done in concurrent.futures.as_completed(under_way):
            for run, outcome in zip(under_way[done], done.result(), strict=True):
                survey.add(run, outcome)


def _train(corpus: Path, saves: Path, runs: Sequence[Run]) -> list[Outcome]:
    name = hashlib.sha256(repr(runs).encode()).hexdigest()[:16]
    # Two thirds of the time.
    return train_together(runs, Text(corpus), saves / f"{name}.pt", torch.compile(losses, dynamic=False))


def rate_of(run: Run) -> float:
    """Inner learning rate of a run."""
    return run.learning_rate if run.inner == ADAM else run.muon_rate


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A method at the best of its rates.

    Attributes:
        method: Its name.
        rate: The rate.
        losses: Final losses by seed, at this rate.
        others: Final losses of the first seed by rate.
    """

    method: str
    rate: float
    losses: Mapping[int, float]
    others: Mapping[float, float]


def tuned(survey: Survey, run: Run) -> dict[str, Tuned]:
    """All methods that were trained as a run is, except for the rates; by name, each at its best."""
    found = {method: _at_best(survey, _replace(run, method=method), rates) for method, rates in RATES[run.inner].items()}
    return {method: best for method, best in found.items() if best is not None}


def _at_best(survey: Survey, run: Run, rates: Sequence[float]) -> Tuned | None:
    at_rates = {rate: at_rate(_replace(run, seed=1), run.method, rate) for rate in rates}
    finals = {rate: survey[each].final for rate, each in at_rates.items() if each in survey}
    if not finals:
        return None
    best = min(finals, key=lambda rate: finals[rate])
    seeds = {seed: _replace(at_rates[best], seed=seed) for seed in (1, 2, 3)}
    losses = {seed: survey[each].final for seed, each in seeds.items() if each in survey}
    return Tuned(run.method, best, losses, finals)


def claim(survey: Survey, run: Run) -> str:
    """The order of all methods, as pages show it; gaps are those of the same seeds."""
    found = tuned(survey, run)
    synchronous = found[SYNCHRONOUS]
    rows = []
    for method in found.values():
        gaps = [loss - synchronous.losses[seed] for seed, loss in method.losses.items() if seed in synchronous.losses]
        at_its_rate = method.others.get(synchronous.rate)
        rows.append(
            (
                "synchronous" if method is synchronous else f"`{method.method}`",
                "" if method is synchronous else spread(gaps, "+"),
                f"{method.rate:g}",
                spread(list(method.losses.values())),
                "" if method is synchronous or at_its_rate is None else f"{at_its_rate - synchronous.losses[1]:+.3f}",
            )
        )
    return markdown(("method", "gap", "best rate", "final loss", f"gap at a rate of {synchronous.rate:g}"), rows)


@dataclasses.dataclass(frozen=True)
class FewBits:
    """An exchange at the better of its rates.

    Attributes:
        run: What is trained, at any rate.
        found: What it ended at.
        gaps: Losses above the synchronous run of the same seed, by seed.
    """

    run: Run
    found: Tuned
    gaps: Mapping[int, float]

    @property
    def bits(self) -> float:
        """Sent per parameter and iteration; between sites where there are some."""
        return bits(self.run.between_sites if self.run.sites > 1 else self.run)

    @property
    def exchange(self) -> str:
        """What crosses."""
        run = self.run
        return f"{run.site_dtype} between 2 sites, averages every {run.interval} inside" if run.sites > 1 else run.dtype


def few_bits(survey: Survey) -> list[FewBits]:
    """All exchanges that have been trained."""
    rows = []
    for run in (_MUON_BITS, _MUON_LONGER, _BITS):
        rates = _RATES_OF_BITS[run.inner]
        synchronous = _at_best(survey, run, rates)
        for exchange in _exchanges(run):
            found = _at_best(survey, exchange, rates)
            if synchronous is not None and found is not None:
                gaps = {
                    seed: loss - synchronous.losses[seed] for seed, loss in found.losses.items() if seed in synchronous.losses
                }
                rows.append(FewBits(exchange, found, gaps))
    return rows


def table_of_bits(survey: Survey) -> str:
    """The same as pages show it."""
    rows = [
        (
            INNER[row.run.inner],
            max(row.run.interval, row.run.site_interval),
            row.exchange,
            spread(list(row.gaps.values()), "+"),
            f"{row.bits:.2g}",
            f"{row.found.rate:g}",
        )
        for row in few_bits(survey)
    ]
    return markdown(("inner", "H", "exchange", "gap", "bits", "rate"), rows)


def draw(survey: Survey, path: Path) -> None:
    """Draws final losses over inner rates, with AdamW and with Muon inside, and gaps over bits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 9.6), layout="constrained")
    *of_rates, of_bits = figure.subplots(3, 1)
    for axes, run in zip(of_rates, (CLAIM, MUON_CLAIM), strict=True):
        for method in tuned(survey, run).values():
            rates = sorted(method.others)
            is_baseline = method.method == SYNCHRONOUS
            label, color = ("synchronous", "black") if is_baseline else (method.method, None)
            axes.plot(rates, [method.others[rate] for rate in rates], marker=".", label=label, color=color)
        axes.set(xscale="log", xlabel="inner learning rate", ylabel="final loss, nats per byte")
        axes.set_title(f"1,800 outer steps, H = 50, {INNER[run.inner]} inside, seed 1", fontsize=10)
    for place, inner in enumerate((MUON, ADAM)):
        for shape, in_sites in (("o", False), ("s", True)):
            rows = [row for row in few_bits(survey) if row.run.inner == inner and (row.run.sites > 1) == in_sites]
            points = [(row.bits, statistics.mean(row.gaps.values()), _deviation(list(row.gaps.values()))) for row in rows]
            label = f"{INNER[inner]} inside{', between 2 sites' if in_sites else ''}"
            if points:
                of_bits.errorbar(*zip(*points, strict=True), fmt=shape, capsize=3, color=f"C{place}", label=label)
    of_bits.axhline(0, color="black", linewidth=1)
    of_bits.set(xscale="log", xlabel="bits sent per parameter and iteration", ylabel="gap to synchronous training")
    of_bits.set_title("About 1,000 outer steps in few bits", fontsize=10)
    for axes in (*of_rates, of_bits):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.savefig(path, dpi=150)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean, and standard deviation of several."""
    deviation = f" ± {_deviation(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.3f}{deviation}"


def main() -> None:
    """Trains what is missing, if asked to, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("docs/long.jsonl"), help="file of the runs (%(default)s)")
    parser.add_argument("--train", action="store_true", help="train what is missing: hours")
    parser.add_argument("--only", choices=PARTS, help="one part (all)")
    parser.add_argument("--processes", type=int, help="processes at a time (as many as there are processors)")
    parser.add_argument("--corpus", type=Path, default=Path("runs/study/corpus"), help="folder of the text (%(default)s)")
    parser.add_argument("--saves", type=Path, default=Path("runs/study/long"), help="folder of what continues (%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw it")
    options = parser.parse_args()
    survey = Survey(options.runs, options.corpus.resolve())
    parts = {title: runs for title, runs in PARTS.items() if options.only in (None, title)}
    if options.train:
        train(
            survey, (run for runs in parts.values() for run in runs), options.corpus.resolve(), options.saves, options.processes
        )
    for run in (CLAIM, MUON_CLAIM):
        if tuned(survey, run):
            print(f"{claim(survey, run)}\n")
    print(f"{table_of_bits(survey)}\n")
    if options.picture is not None:
        draw(survey, options.picture)
    for title, runs in parts.items():
        print(f"## {title}\n")
        for run in (run for run in runs if run in survey):
            sent = f"{run.site_dtype} between {run.sites} sites" if run.sites > 1 else run.dtype
            print(f"{run.method} {rate_of(run):g}, {sent}, H = {run.interval}, seed {run.seed}: {survey[run].final:.4f}")


if __name__ == "__main__":
    main()
