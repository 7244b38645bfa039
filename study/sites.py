"""Groups in sites: ``python study/sites.py [--train]`` prints what averages inside sites gain.

Groups of a site meet every H iterations, all sites every H'. Gaps are final losses above synchronous training with the same
inner optimizer on the same batches, in nats per byte.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from frontier import NAMES, Point, Points, bits
from frontier_runs import ANNEALED, AVERAGING, annealed
from law import markdown
from records import Survey
from rows import ADAM, MUON
from simulation import Run
from surveyed import of_all_seeds

_FREQUENT = "pier-frequent"

_replace = dataclasses.replace


def _three(inner: str) -> Run:
    """2 sites of 4 groups: plain averages in FP32 inside a site every 5 iterations, between sites 2 bits every 20."""
    run = Run(AVERAGING, inner=inner, groups=8, interval=5, sites=2)
    return _replace(run, site_interval=20, site_method=ANNEALED[inner], site_dtype="int2")


def _one(inner: str, groups: int, interval: int, dtype: str = "int2") -> Run:
    """One level; with as many groups as sites, each site synchronous."""
    return _replace(annealed(inner, interval, dtype), groups=groups)


def _rarely(run: Run, interval: int) -> Run:
    """All sites every 100 iterations, after a lazy start that is as long."""
    rare = {"site_interval": 100} if run.sites > 1 else {}
    return _replace(run, interval=interval, lazy_start=1 / 6, **rare)


_MUON, _ADAM = _three(MUON), _three(ADAM)
_FOUR_SITES = {"groups": 16, "sites": 4}

PARTS: dict[str, tuple[Run, ...]] = {
    "2 x 4 groups": (
        *of_all_seeds(_MUON, _one(MUON, 8, 20), _ADAM, _one(ADAM, 8, 20)),
        *(_one(inner, 2, 20) for inner in (MUON, ADAM)),
    ),
    "4 x 4 groups": tuple(
        run
        for inner in (MUON, ADAM)
        for run in (_replace(_three(inner), **_FOUR_SITES), _one(inner, 16, 20), _one(inner, 4, 20))
    ),
    "All sites every 100 iterations": (
        *(_rarely(_MUON, interval) for interval in (5, 20)),
        _rarely(_one(MUON, 8, 100), 100),
        _rarely(_one(MUON, 2, 100), 100),
        _rarely(_ADAM, 5),
        _rarely(_one(ADAM, 8, 100), 100),
    ),
    "Momentum": (
        _MUON,
        _replace(_MUON, method=_FREQUENT),
        _replace(_MUON, method=_FREQUENT, site_method=AVERAGING),
        _replace(_MUON, method=ANNEALED[MUON]),
    ),
    "Codecs": (
        *(_replace(_MUON, dtype=dtype, sum_dtype=dtype) for dtype in ("fp32", "int8", "int4")),
        *(_replace(_MUON, site_dtype=dtype) for dtype in ("int4", "int1")),
        _replace(_MUON, site_interval=10),
        *of_all_seeds(_one(MUON, 8, 10)),
    ),
}


def main() -> None:
    """Trains what is missing, if asked to, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("docs/sites.jsonl"), help="file of the runs (%(default)s)")
    parser.add_argument("--train", action="store_true", help="train what is missing: an hour")
    parser.add_argument("--processes", type=int, help="runs trained at a time (as many as there are processors)")
    parser.add_argument("--corpus", type=Path, default=Path("runs/study/corpus"), help="folder of the text (%(default)s)")
    options = parser.parse_args()
    survey = Survey(options.runs, options.corpus.resolve(), options.processes, is_brief=True)
    earlier = [Survey(Path(f"docs/{name}.jsonl"), options.corpus) for name in ("frontier", "survey")]
    if options.train:
        survey.train(run for runs in PARTS.values() for run in runs if not any(run in found for found in earlier))
    points = Points(survey, *earlier)
    for title, runs in PARTS.items():
        print(f"## {title}\n\n{_table(points.of(runs))}\n")


def _table(points: Iterable[Point]) -> str:
    columns = ("inner", "levels", "between sites", "inside a site", "bits between sites", "gap", "seeds")
    return markdown(columns, [_cells(point) for point in points])


def _cells(point: Point) -> tuple[object, ...]:
    run, spread = point.run, f" ± {point.spread:.3f}" if len(point.gaps) > 1 else ""
    if run.sites == 1:
        levels, between, inside = f"{run.groups} groups", run, "-"
    else:
        levels, between = f"{run.sites} x {run.groups // run.sites}", run.between_sites
        inside = f"{run.method}, H = {run.interval}, {run.dtype}"
    what = f"{between.method}, H = {between.interval}, {between.dtype}"
    return NAMES[run.inner], levels, what, inside, f"{bits(between):.3g}", f"{point.gap:+.3f}{spread}", len(point.gaps)


if __name__ == "__main__":
    main()
