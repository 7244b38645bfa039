"""Prints ``study/tried.md``, what was tried and did not help, from the records: ``python study/tried.py > study/tried.md``."""

import dataclasses
from pathlib import Path

from frontier import Points
from frontier_runs import annealed, averaging, coded, hidden, predicted, short
from long_runs import spread
from records import Survey
from rows import ADAM, ITERATIONS, MUON
from simulation import Run

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_replace = dataclasses.replace

_HEAD = f"""# What was tried and did not help

Simulated as in [Bytes against loss](../docs/frontier.md): 8 groups, {ITERATIONS} iterations of 64 sequences, width 64. Gap:
final loss above synchronous training with the same inner optimizer, nats per byte; mean ± standard deviation where several
seeds were trained. "Instead": what the plugin can do, and its gap on the same seeds. `python study/tried.py` prints this page
from the records in `docs/`.
"""

_TAIL = """
## Other experiments

| tried | outcome |
|---|---|
| the lag correlation of pseudo-gradients, to choose the outer momentum | it orders some schedules and not others |
| an entropy coder behind `int2` | an ideal one takes 17 to 18 % off (`python study/entropy.py`) |
| swaps in [routes past skipped stages](../docs/skipping.md#measured) | nothing that the searches can tell |
| skipped stages at equal tokens | [twice the loss of halving the layers](../docs/skipping.md#where-depth-pays) |
| loads of all groups in the [balance of routers](../docs/status.md) | 1.34 instead of 1.44, by a collective an iteration |
"""

_ANNEALED, _RISING = annealed(ADAM, 20), Run("pier-rising")
_BIT, _TWO_BITS = averaging(MUON, 1, "int1"), averaging(MUON, 2, "int2")
_LATE_BIT, _LATE_BITS = hidden(_BIT), hidden(_TWO_BITS)

# Sections: what was tried, its run, what the plugin can do, and its run.
_TRIED: dict[str, tuple[tuple[str, Run, str, Run], ...]] = {
    "Inner state and step": (
        (
            "groups divide the noise in AdamW's second moment by their number, to have the steps of all",
            *(_replace(_RISING, divides_noise=True), "each its own", _RISING),
        ),
        (
            "half of AdamW's step follows a slow momentum, averaged in outer steps (MT-DAO, arXiv 2510.05361)",
            *(_replace(_RISING, slow_share=0.5), "none", _RISING),
        ),
        ("the same, slower (0.999)", _replace(_RISING, slow_share=0.5, slow_beta=0.999), "none", _RISING),
    ),
    "Start and end": (
        (
            "the last 5 % synchronous again, AdamW inside, `pier-rising`",
            *(_replace(_RISING, tail=0.05), "`pier-annealed`, nothing synchronous", _ANNEALED),
        ),
        (
            "the last 5 % synchronous again, Muon inside, `pier-muon`",
            *(Run("pier-muon", inner=MUON, tail=0.05), "`pier-muon-annealed`, nothing synchronous", annealed(MUON, 20)),
        ),
        (
            "no lazy start at H = 5, Muon, `int2`",
            _replace(short(averaging(MUON, 5, "int2")), lazy_start=0.0),
            "10 %",
            short(averaging(MUON, 5, "int2")),
        ),
    ),
    "Few bits": (
        (
            "`int1` every 5 iterations, Muon",
            short(averaging(MUON, 5, "int1")),
            "`int2` there",
            short(averaging(MUON, 5, "int2")),
        ),
        (
            "`int2` every 2 iterations, AdamW",
            short(averaging(ADAM, 2, "int2")),
            "every 10: no lower loss, a fifth of the bits",
            annealed(ADAM, 10, "int2"),
        ),
        (
            "the mean magnitude of a block as the level of `int1`",
            averaging(MUON, 1, "1 bit, mean"),
            "half of the largest",
            _BIT,
        ),
        ("a power of two as that level", averaging(MUON, 1, "1 bit, power of two"), "half of the largest", _BIT),
        (
            "SparseLoCo's constants, 0.06 bits, H = 15",
            coded(Run("local-sgd", inner=MUON, interval=15), "SparseLoCo"),
            "`int2` at H = 20, 0.11 bits",
            annealed(MUON, 20, "int2"),
        ),
        (
            "MuLoCo's constants, 0.19 bits, H = 30",
            coded(Run("diloco", inner=MUON, interval=30), "MuLoCo"),
            "`int2` at H = 20, 0.11 bits",
            annealed(MUON, 20, "int2"),
        ),
    ),
    "A delayed exchange": (
        (
            "0.6 of the own progress kept while `int1` is under way, H = 1",
            predicted(_LATE_BIT, 0.6, 0.0, 0.0),
            "all of it",
            _LATE_BIT,
        ),
        ("0.2 of it, and 0.8 of the mean expected", predicted(_LATE_BIT, 0.2, 0.8, 0.8), "all of it", _LATE_BIT),
        ("all of it, and 0.3 of the mean expected", predicted(_LATE_BIT, 1.0, 0.3, 0.5), "all of it alone", _LATE_BIT),
        ("the same at H = 2, `int2`, and 0.6 of it", predicted(_LATE_BITS, 1.0, 0.6, 0.0), "all of it alone", _LATE_BITS),
    ),
}


def page() -> str:
    """The page."""
    points = Points(*(Survey(_DOCS / f"{name}.jsonl", Path("none")) for name in ("sites", "frontier", "survey")))

    def gap_of(run: Run, seeds: set[int] | None = None) -> dict[int, float]:
        [point] = points.of([run])
        return {seed: gap for seed, gap in point.gaps.items() if seeds is None or seed in seeds}

    lines = [_HEAD]
    for title, rows in _TRIED.items():
        lines += [f"## {title}", "", "| tried | gap | instead | gap |", "|---|---|---|---|"]
        for what, tried, instead, other in rows:
            found = gap_of(tried)
            those = gap_of(other, {*found})
            lines.append(f"| {what} | {spread([*found.values()])} | {instead} | {spread([*those.values()])} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n" + _TAIL


if __name__ == "__main__":
    print(page(), end="")
