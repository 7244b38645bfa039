"""The search for a better outer step: ``python study/search.py > study/search.md``; ``--train`` trains what is missing.

Six families, simulated with AdamW inside, eight groups and H = 20. Seeds 1 to 3 chose, 11 to 13 were not looked at before.
"""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from frontier_runs import ORTHOGONAL
from long_runs import CLAIM, spread
from records import Survey
from rows import ITERATIONS, MUON, SYNCHRONOUS
from simulation import Run

_DOCS = Path(__file__).resolve().parents[1] / "docs"
CHOSEN_ON, REPORTED_ON = (1, 2, 3), (11, 12, 13)
_replace = dataclasses.replace

BASE = Run("pier-annealed")
"""The plugin's best rule of before."""

_STEP = _replace(BASE, rule="muon")
_INSIDE = _replace(BASE, rule="muon inside")
_EACH = _replace(BASE, rule="muon of each")

WINNER = _replace(ORTHOGONAL, method=BASE.method)
"""``--pier-preset pier-orthogonal``."""

# What won before lengths were compared near the critical batch.
_TWICE = _replace(BASE, rule="muon of each inside", rule_rate=2.0)

_MUON_INSIDE = Run("pier-muon-annealed", inner=MUON)
_LONGER = {"iterations": 2400}
_WIDER = {"width": 128, "learning_rate": 4e-3}
_CRITICAL = {"width": 32, "batch": 1024, "learning_rate": 1.6e-2}
_TWO_BITS = {"dtype": "int2", "sum_dtype": "int2"}
_FOUR_BITS = {"dtype": "int4", "sum_dtype": "int4"}
_LATE = _replace(BASE, overlap=10)

# A thousand and more outer steps, as in long_runs.
_LONG = _replace(CLAIM, method="pier", learning_rate=1e-3)
_LONG_WINNER = _replace(_LONG, rule=WINNER.rule, rule_rate=WINNER.rule_rate)
_LONG_TWICE = _replace(_LONG, rule=_TWICE.rule, rule_rate=_TWICE.rule_rate)


def _iterations(number: int) -> str:
    return f"{number} iteration{'s' * (number > 1)}"


FAMILIES: Mapping[str, Mapping[str, Run]] = {
    "Before": {
        "`pier-annealed`": BASE,
        "the same, half the learning rate": _replace(BASE, learning_rate=4e-3),
        "the same, twice the learning rate": _replace(BASE, learning_rate=1.6e-2),
    },
    "Inner moments at outer steps": {
        "the mean of second moments": _replace(BASE, moments="second"),
        "the mean of both moments (local Adam)": _replace(BASE, moments="both"),
        "both, every 2 outer steps": _replace(BASE, moments="both", moments_interval=2),
        "both, every 4": _replace(BASE, moments="both", moments_interval=4),
        "the first each time, the second every 4 (DES-LOC)": _replace(BASE, moments="both", second_interval=4),
        "both, in `int8`": _replace(BASE, moments="both", moments_dtype="int8"),
        "both, in `int4`": _replace(BASE, moments="both", moments_dtype="int4"),
        "both, in `int4`, every 4": _replace(BASE, moments="both", moments_dtype="int4", moments_interval=4),
        "both, the second with the noise of a mean over 8 groups": _replace(BASE, moments="denoised", moments_groups=8),
        "both, the second with the noise of a mean over 2 groups": _replace(BASE, moments="denoised", moments_groups=2),
    },
    "Rules": {
        "Nesterov's step made orthogonal, all matrices": _STEP,
        "the same, 1.5 times as long": _replace(_STEP, rule_rate=1.5),
        "the same, twice as long": _replace(_STEP, rule_rate=2.0),
        "the same, three times as long": _replace(_STEP, rule_rate=3.0),
        "the same, twice as long, except embeddings": _replace(_INSIDE, rule_rate=2.0),
        "each pseudo-gradient made orthogonal, all matrices": _EACH,
        "the same, 1.5 times as long ": _replace(_EACH, rule_rate=1.5),
        "the same, twice as long ": _replace(_EACH, rule_rate=2.0),
        "the same, twice as long, except embeddings ": _TWICE,
        "the same, three times as long, except embeddings": _replace(_TWICE, rule_rate=3.0),
        "the same, half as long as groups' own": _replace(WINNER, rule_rate=0.5),
        "the same, 0.7 times as long as groups' own": _replace(WINNER, rule_rate=0.7),
        "**the same, as long as groups' own: `--pier-outer-rule muon`**": WINNER,
        "the same, 1.2 times as long as groups' own": _replace(WINNER, rule_rate=1.2),
        "Adam's direction, as long as Nesterov's step": _replace(BASE, rule="adam"),
        "as long as a fifth of the weights (trust ratio)": _replace(BASE, rule="trust", rule_rate=0.2),
        "schedule-free": _replace(BASE, rule="schedule-free", rule_rate=1.5),
        "a tensor's step by how much groups agree": _replace(BASE, rule="agreement"),
        "a number's step by how much groups agree": _replace(BASE, rule="element agreement", rule_rate=0.5),
        "a number's step by how many signs agree": _replace(BASE, rule="sign agreement", rule_rate=0.5),
        "a number's step as long as groups' own, where their mean is small": _replace(BASE, rule="restored"),
        "a tensor's step as long as groups' own": _replace(BASE, rule="restored tensor"),
    },
    "Mixing at a delayed apply": {
        "after 10 iterations: result plus progress": _LATE,
        "half own weights, half new anchor (torchft's alpha)": _replace(_LATE, mixing=0.5),
        "the new anchor alone": _replace(_LATE, mixing=0.0),
        **{
            f"after {_iterations(overlap)}, `{dtype}`: {what}": _replace(
                BASE, overlap=overlap, dtype=dtype, sum_dtype=dtype, mixing=mixing
            )
            for overlap in (1, 5, 10)
            for dtype in ("int8", "int2")
            for what, mixing in (("result plus progress", None), ("half and half", 0.5))
        },
    },
    "Intervals, as many outer steps": {
        "from H / 2 to 3 H / 2": _replace(BASE, intervals="rising"),
        "from 3 H / 2 to H / 2": _replace(BASE, intervals="falling"),
        "by signal over noise of pseudo-gradients": _replace(BASE, intervals="by noise"),
    },
    "Four fragments": {
        "in turn": _replace(BASE, fragments=4),
        "that which has moved most": _replace(BASE, fragments=4, by_change=True),
    },
    "The winner with other settings": {
        "one group": _replace(WINNER, groups=1),
        "`int2`": _replace(WINNER, **_TWO_BITS),
        "`int2`, H = 10": _replace(WINNER, **_TWO_BITS, interval=10),
        "`int2`, H = 5": _replace(WINNER, **_TWO_BITS, interval=5),
        "`int2`, H = 2": _replace(WINNER, **_TWO_BITS, interval=2),
        "`int4`": _replace(WINNER, **_FOUR_BITS),
        "`int4`, H = 5": _replace(WINNER, **_FOUR_BITS, interval=5),
        "overlap 1": _replace(WINNER, overlap=1),
        "overlap 5": _replace(WINNER, overlap=5),
        "overlap 20": _replace(WINNER, overlap=20),
        "overlap 20, Nesterov's rule": _replace(BASE, overlap=20),
        "H = 50": _replace(WINNER, interval=50),
        "`pier`": _replace(WINNER, method="pier"),
        "`diloco`": _replace(WINNER, method="diloco"),
        "`local-sgd`": _replace(WINNER, method="local-sgd"),
        "half the learning rate": _replace(WINNER, learning_rate=4e-3),
        "twice the learning rate": _replace(WINNER, learning_rate=1.6e-2),
        "H = 50, `pier-rising`": _replace(WINNER, interval=50, method="pier-rising"),
        "H = 50, `pier-rising`, Nesterov's rule": _replace(BASE, interval=50, method="pier-rising"),
        "H = 100, `pier-rising`": _replace(WINNER, interval=100, method="pier-rising"),
        "H = 100, `pier-rising`, Nesterov's rule": _replace(BASE, interval=100, method="pier-rising"),
        "H = 2": _replace(WINNER, interval=2),
        "H = 5": _replace(WINNER, interval=5),
        "H = 5, `pier-frequent`": _replace(WINNER, interval=5, method="pier-frequent"),
        "H = 5, `pier-frequent`, Nesterov's rule": _replace(BASE, interval=5, method="pier-frequent"),
    },
    "Twice as long as the mean pseudo-gradient, with other settings": {
        "one group": _replace(_TWICE, groups=1),
        "`int2`": _replace(_TWICE, **_TWO_BITS),
        "`int2`, H = 10": _replace(_TWICE, **_TWO_BITS, interval=10),
        "overlap 1": _replace(_TWICE, overlap=1),
        "overlap 5": _replace(_TWICE, overlap=5),
        "overlap 20": _replace(_TWICE, overlap=20),
        "H = 50": _replace(_TWICE, interval=50),
        "`pier`": _replace(_TWICE, method="pier"),
        "`diloco`": _replace(_TWICE, method="diloco"),
        "`local-sgd`": _replace(_TWICE, method="local-sgd"),
        "half the learning rate": _replace(_TWICE, learning_rate=4e-3),
        "twice the learning rate": _replace(_TWICE, learning_rate=1.6e-2),
        "H = 50, `pier-rising`": _replace(_TWICE, interval=50, method="pier-rising"),
        "H = 100, `pier-rising`": _replace(_TWICE, interval=100, method="pier-rising"),
        "H = 5": _replace(_TWICE, interval=5),
        "H = 5, `pier-frequent`": _replace(_TWICE, interval=5, method="pier-frequent"),
        "and the mean of both moments": _replace(_TWICE, moments="both"),
        "and both moments in `int4`": _replace(_TWICE, moments="both", moments_dtype="int4"),
        "and both moments, the second with the noise of 2 groups": _replace(_TWICE, moments="denoised", moments_groups=2),
        "4 groups": _replace(_TWICE, groups=4),
        "2400 iterations": _replace(_TWICE, **_LONGER),
        "width 128": _replace(_TWICE, **_WIDER),
        "Muon inside, pier-muon-annealed": _replace(_MUON_INSIDE, rule=_TWICE.rule, rule_rate=2.0),
        "Muon inside, as long as the mean": _replace(_MUON_INSIDE, rule=_TWICE.rule),
        "100,000 iterations, with `pier`, at the rate best for `pier` alone": _LONG_TWICE,
        "100,000 iterations, half the rate": _replace(_LONG_TWICE, learning_rate=5e-4),
        "100,000 iterations, as long as the mean, the same rate": _replace(_LONG_TWICE, rule_rate=1.0),
        "100,000 iterations, as long as the mean, half the rate": _replace(_LONG_TWICE, rule_rate=1.0, learning_rate=5e-4),
        "100,000 iterations, as long as the mean, a quarter": _replace(_LONG_TWICE, rule_rate=1.0, learning_rate=2.5e-4),
        "100,000 iterations, `pier-annealed`": _replace(_LONG_TWICE, method="pier-annealed"),
    },
    "Other set-ups": {
        "4 groups, pier-annealed": _replace(BASE, groups=4),
        "4 groups, the winner": _replace(WINNER, groups=4),
        "2 groups, pier-annealed": _replace(BASE, groups=2),
        "2 groups, the winner": _replace(WINNER, groups=2),
        "16 groups, pier-annealed": _replace(BASE, groups=16),
        "16 groups, the winner": _replace(WINNER, groups=16),
        "2400 iterations, pier-annealed": _replace(BASE, **_LONGER),
        "2400 iterations, the winner": _replace(WINNER, **_LONGER),
        "near the critical batch, pier-annealed": _replace(BASE, **_CRITICAL),
        "near the critical batch, the winner": _replace(WINNER, **_CRITICAL),
        "near the critical batch, 0.7 times as long as groups' own": _replace(WINNER, rule_rate=0.7, **_CRITICAL),
        "near the critical batch, half as long as groups' own": _replace(WINNER, rule_rate=0.5, **_CRITICAL),
        "near the critical batch, twice as long as the mean": _replace(_TWICE, **_CRITICAL),
        "near the critical batch, as long as the mean": _replace(_TWICE, rule_rate=1.0, **_CRITICAL),
        "width 128, pier-annealed": _replace(BASE, **_WIDER),
        "width 128, the winner": _replace(WINNER, **_WIDER),
        "100,000 iterations, H = 50, width 16, `pier` at its best rate": _LONG,
        "the same with a momentum that falls at the end, `pier-long`": _replace(_LONG, method="pier-long"),
        "100,000 iterations, the winner, the same rate": _LONG_WINNER,
        "100,000 iterations, the winner, half the rate": _replace(_LONG_WINNER, learning_rate=5e-4),
        "100,000 iterations, the winner, 0.7 times the rate": _replace(_LONG_WINNER, learning_rate=7e-4),
        "100,000 iterations, half as long as groups' own, the same rate": _replace(_LONG_WINNER, rule_rate=0.5),
        "100,000 iterations, 0.7 times as long as groups' own, 1.4 times the rate": _replace(
            _LONG_WINNER, rule_rate=0.7, learning_rate=1.4e-3
        ),
        "100,000 iterations, the winner with `pier-annealed`": _replace(_LONG_WINNER, method="pier-annealed"),
        "Muon inside, pier-muon-annealed": _MUON_INSIDE,
        "Muon inside, the winner": _replace(_MUON_INSIDE, rule=WINNER.rule),
    },
}

_HEAD = f"""# The search for a better outer step

Simulated as in [Bytes against loss](../docs/frontier.md): AdamW inside, 8 groups, H = 20, {ITERATIONS} iterations of 64
sequences, width 64, `pier-annealed`, each with what a row changes. Gap: final loss above synchronous training with the
same inner optimizer at its best rate, nats per byte; mean ± standard deviation where several seeds were trained. Seeds 1 to 3
chose; 11 to 13 were not looked at before. One training takes a minute of a core, `python study/search.py --train` all of
them. `pier-orthogonal` is the winner, except that it takes position embeddings for a matrix, too, and query, key and
value for one, as Megatron stores them. What averages of the last anchors bring is in
[survey.jsonl](../docs/survey.jsonl): nothing where the momentum falls.
"""


def synchronous(run: Run) -> Run:
    """What a run is compared with."""
    if run.iterations == CLAIM.iterations:
        return _replace(CLAIM, seed=run.seed, learning_rate=2e-3)
    alike = {name: getattr(run, name) for name in ("seed", "iterations", "width", "inner", "batch")}
    return Run(SYNCHRONOUS, learning_rate={32: 1.6e-2, 128: 4e-3}.get(run.width, 8e-3), **alike)


class Gaps:
    """Gaps of trained runs."""

    def __init__(self, *surveys: Survey) -> None:
        """Takes all of the surveys; the first one that has a run says."""
        self._outcomes = {run: outcome for survey in reversed(surveys) for run, outcome in survey.items()}

    def __contains__(self, run: Run) -> bool:
        """Whether a run is in any of the surveys."""
        return run in self._outcomes

    def of(self, run: Run, seeds: Iterable[int]) -> list[float]:
        """Those of a run with some of these seeds, as far as they have been trained."""
        each = [(seeded, synchronous(seeded)) for seeded in (_replace(run, seed=seed) for seed in seeds)]
        found = [pair for pair in each if all(one in self._outcomes for one in pair)]
        return [self._outcomes[seeded].final - self._outcomes[baseline].final for seeded, baseline in found]


def gaps() -> Gaps:
    """Those in the records."""
    return Gaps(*(Survey(_DOCS / f"{name}.jsonl", Path("none")) for name in ("search", "frontier", "survey", "long")))


def page() -> str:
    """The page."""
    found, lines = gaps(), [_HEAD]
    for title, rows in FAMILIES.items():
        lines += [f"## {title}", "", "| tried | gap | gap, seeds 11 to 13 |", "|---|---|---|"]
        for what, run in rows.items():
            chosen, reported = (found.of(run, seeds) for seeds in (CHOSEN_ON, REPORTED_ON))
            cells = [spread(values, "+") if values else "" for values in (chosen, reported)]
            lines.append(" ".join(["|", what.strip(), "|", *(f"{cell} |".lstrip() for cell in cells)]))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Prints the page, after training what is missing if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train what is missing: hours")
    parser.add_argument("--processes", type=int, help="runs trained at a time (as many as there are processors)")
    parser.add_argument("--corpus", type=Path, default=Path("runs/study/corpus"), help="folder of the text (%(default)s)")
    options = parser.parse_args()
    if options.train:
        survey = Survey(_DOCS / "search.jsonl", options.corpus.resolve(), options.processes, is_brief=True)
        first = [run for rows in FAMILIES.values() for run in rows.values()]
        again = [_replace(run, seed=seed) for run in (BASE, WINNER) for seed in (*CHOSEN_ON, *REPORTED_ON)]
        # The longest train together: long_runs.
        runs, known = (run for run in (*first, *again) if run.iterations < CLAIM.iterations), gaps()
        survey.train(each for run in runs for each in (run, synchronous(run)) if each not in known)
    print(page(), end="")


if __name__ == "__main__":
    main()
