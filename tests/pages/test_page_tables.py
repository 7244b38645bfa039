"""Tables of measured figures are those of the records in ``docs/``, cell by cell."""

import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import long_runs
import published
import pytest
import search
import tried
from frontier import Points, bits
from frontier_runs import coded, short, small
from long_runs import spread
from records import Survey
from router_balance import _RECORDS, _ROWS, Balance
from rows import ADAM, ITERATIONS, MUON, SYNCHRONOUS, Row
from simulation import Run
from sites import _one, _three

from pier_megatron import PierConfig
from pier_megatron.commands.plan.cluster import TCP_EFFICIENCY

_REPOSITORY = Path(__file__).parents[2]
_DOCS = _REPOSITORY / "docs"
sys.path.append(str(_REPOSITORY / "benchmarks"))

import interconnect  # noqa: E402

pytestmark = pytest.mark.slow

_SEEDS = (1, 2, 3)
_INNER = {"AdamW": ADAM, "Muon": MUON}
_CURVES = json.loads((_DOCS / "study.json").read_text())


def page(name: str) -> str:
    return (_DOCS / f"{name}.md").read_text().replace("**", "").replace("`", "")


def table(name: str, heading: str, place: int = 0) -> list[list[str]]:
    """Cells of a table of a page that begins so, without its heading."""
    found = re.findall(rf"^{re.escape(heading)}.*\n(?:\|.*\n)+", page(name), re.MULTILINE)[place]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()[2:]]


def rows(method: str, **changes: Any) -> list[Row]:
    rates = {"learning_rate": 8e-3} | ({"muon_rate": 4e-2} if changes.get("inner") == MUON else {})
    return [Row(method, seed, **rates, **changes) for seed in _SEEDS]


def final(row: Row) -> float:
    curve = _CURVES[row.name]
    last: float = curve[max(curve, key=int)]
    return last


def gaps(method: str, **changes: Any) -> list[float]:
    """Gaps of three seeds that were trained through the plugin."""
    return [final(row) - final(row.baseline) for row in rows(method, **changes)]


@pytest.fixture(scope="module")
def points() -> Points:
    return Points(*(Survey(_DOCS / f"{name}.jsonl", Path("none")) for name in ("sites", "frontier", "survey")))


def simulated(points: Points, run: Run) -> str:
    [point] = points.of([run])
    return spread(list(point.gaps.values()))


def test_study_by_number_of_groups() -> None:
    for groups, interval, lazy_start, steps, diloco, rising, share, pier in table("study", "| groups | H | lazy start |"):
        changes = {"groups": int(groups), "interval": int(interval)}
        changes |= {"lazy_start": {"33 %": 1 / 3, "30 %": 0.3}.get(lazy_start, 0.1)}
        found = {method: gaps(method, **changes) for method in ("diloco", "pier-rising")}
        assert [diloco, rising] == [spread(found[method]) for method in found]
        assert share == f"{statistics.mean(found['pier-rising']) / statistics.mean(found['diloco']):.0%}".replace("%", " %")
        assert pier == (spread(gaps("pier", **changes)) if pier else "")
        config = PierConfig(
            train_iters=ITERATIONS,
            groups=int(groups),
            preset="pier",
            sync_interval=int(interval),
            lazy_start_fraction=changes["lazy_start"],
        )
        assert (int(steps), lazy_start) == (
            len([*config.outer_steps()]),
            f"{config.lazy_start / ITERATIONS:.0%}".replace("%", " %"),
        )


def test_study_of_orthogonal_steps() -> None:
    found = search.gaps()

    def simulated(run: Run, seeds: Sequence[int] = search.CHOSEN_ON) -> str:
        return spread(found.of(run, seeds))

    for groups, interval, dtype, without, orthogonal, reported, plugin in table("study", "| groups | H | exchange |"):
        changes = {"groups": int(groups), "interval": int(interval), "dtype": dtype, "sum_dtype": dtype}
        winner = dataclasses.replace(search.WINNER, **changes)
        assert [without, orthogonal] == [simulated(dataclasses.replace(search.BASE, **changes)), simulated(winner)]
        if reported or plugin:
            assert reported == simulated(winner, search.REPORTED_ON)
            assert plugin == spread(gaps("pier-orthogonal", groups=int(groups), interval=int(interval)))
    other = search.FAMILIES["Other set-ups"]
    longest = (
        "100,000 iterations, the winner, the same rate",
        "100,000 iterations, H = 50, width 16, `pier` at its best rate",
        "the same with a momentum that falls at the end, `pier-long`",
    )
    late = [dataclasses.replace(search.WINNER, overlap=overlap) for overlap in (1, 5, 20)]
    said = {
        "one group ends {} below synchronous AdamW": [dataclasses.replace(search.WINNER, groups=1)],
        "Near the critical batch it gains, too: {} ({} without": [
            other[f"near the critical batch, {which}"] for which in ("the winner", "pier-annealed")
        ],
        "after 2,400 iterations it ends at {} ({} without)": [
            other[f"2400 iterations, {which}"] for which in ("the winner", "pier-annealed")
        ],
        "pier ends at {} with such steps and at {} without; auto takes pier-long, which ends at {}": [
            other[name] for name in longest
        ],
        "At width 128 it ends at {} ({} without)": [other[f"width 128, {which}"] for which in ("the winner", "pier-annealed")],
        "A delay costs: {} at an overlap of 1, {} at 5, {} at 20 (without the rule {})": [
            *late,
            dataclasses.replace(search.BASE, overlap=20),
        ],
        "With Muon inside it loses: {} against {}": [
            other[f"Muon inside, {which}"] for which in ("the winner", "pier-muon-annealed")
        ],
        "Steps twice as long as the mean pseudo-gradient end at {} here, and at {} near the critical batch": [
            search.FAMILIES["Rules"]["the same, twice as long, except embeddings "],
            other["near the critical batch, twice as long as the mean"],
        ],
    }
    settings = search.FAMILIES["The winner with other settings"]
    few_bits = "orthogonal outer steps lose less: {} at H = 10 in int2, {} at 5. At 2 they lose more in int2 ({} against {}), "
    few_bits += "and {} in fp32"
    names = ("`int2`, H = 10", "`int2`, H = 5", "`int2`, H = 2")
    frequent = short(coded(Run("local-sgd", interval=2), "int2"))
    figures = [*(simulated(settings[name]) for name in names), simulated(frequent), simulated(settings["H = 2"])]
    linked = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(page("frontier").split()))
    assert few_bits.format(*figures) in linked
    text = " ".join(page("study").split()).replace("**", "")
    for words, runs in said.items():
        figures = [simulated(run) for run in runs]
        assert words.format(*figures if "below" not in words else [figures[0].removeprefix("-")]) in text, words


def test_search_is_in_the_records() -> None:
    assert (_REPOSITORY / "study" / "search.md").read_text() == search.page()


def test_study_with_muon_inside() -> None:
    for what, *cells in table("study", "| preset | 2 groups | 4 groups | 8 groups | 16 groups |"):
        of = re.fullmatch(r"(?:H = (\d+), (int\d), )?([\w-]+)(?:, what auto takes)?", what)
        assert of
        changes = {"inner": MUON} | ({"interval": int(of[1]), "dtype": of[2]} if of[1] else {})
        for groups, cell in zip((2, 4, 8, 16), cells, strict=True):
            assert not cell or cell == spread(gaps(of[3], groups=groups, **changes)), what


def test_study_of_gossip_pairs() -> None:
    for groups, *cells in table("study", "| groups | diloco, H = 20 | pier-rising, H = 20 | noloco, H = 20 | noloco, H = 10 |"):
        of = (("diloco", 20), ("pier-rising", 20), ("noloco", 20), ("noloco", 10))
        assert cells == [spread(gaps(method, groups=int(groups), interval=interval)) for method, interval in of]


def test_study_by_outer_steps(points: Points) -> None:
    for settings, steps, *cells in table("study", "| iterations, H | outer steps |"):
        numbers = re.match(r"(\d+), H = (\d+)", settings)
        assert numbers
        iterations, interval = map(int, numbers.groups())
        named = settings.split(", ")[2:] or ["pier-annealed", "pier-muon-annealed"]
        runs = [
            Run(method, iterations=iterations, interval=interval, inner=inner)
            for method, inner in zip(named, (ADAM, MUON), strict=True)
        ]
        assert cells == [f"{points.of([run])[0].gaps[1]:.3f}" for run in runs], settings
        assert int(steps) == len([*config_of(runs[0]).outer_steps()])


def config_of(run: Run) -> PierConfig:
    return PierConfig(
        train_iters=run.iterations,
        groups=run.groups,
        preset=run.method,
        sync_interval=run.interval,
        lazy_start_fraction=run.lazy_start,
    )


def test_losses_of_synchronous_training() -> None:
    text = " ".join(page("study").split())
    for inner, words in ((ADAM, "ends at {} synchronously"), (MUON, "Synchronous Muon ends at {} at its best rate")):
        assert words.format(spread([final(row.baseline) for row in rows("diloco", inner=inner)])) in text


def test_frontier(points: Points) -> None:
    for what, gap, plugin, sent, interval, exchange in table("frontier", "| inner | gap, simulated |"):
        inner, _, groups = what.removesuffix(" groups").partition(", ")
        dtype, _, overlap = exchange.partition(", overlap ")
        changes = {"inner": _INNER[inner], "groups": int(groups or 8), "interval": int(interval)}
        config = PierConfig(
            train_iters=ITERATIONS,
            groups=int(groups or 8),
            sync_interval=int(interval),
            overlap=int(overlap or 0),
            inner_optimizer="muon" if inner == "Muon" else "adam",
        )
        method, _ = config.suited_preset
        run = coded(Run("local-sgd" if method == "pier-frequent" else method, **changes), dtype)
        run = short(run) if method == "pier-frequent" else run
        assert abs(float(sent) - bits(run)) < 0.006
        assert not gap or gap == simulated(points, run)
        hidden = {"overlap": int(overlap)} if overlap else {}
        assert not plugin or plugin == spread(gaps(method, dtype=dtype, **hidden, **changes)), what


def test_where_the_papers_schedule_begins_to_win(points: Points) -> None:
    lengths = {"27": 600, "108": 2400, "432": 9600, "1,701": 37800}
    for steps, synchronous, *cells in table("frontier", "| outer steps | synchronous |"):
        rate = 1.6e-2 if lengths[steps] < 9600 else 8e-3
        runs = [small(method, lengths[steps], rate) for method in (SYNCHRONOUS, "pier", "diloco", "pier-annealed")]
        [without] = points.of(runs[:1])
        assert [synchronous, *cells] == [f"{without.loss:.3f}", *(simulated(points, run) for run in runs[1:])]
        assert int(steps.replace(",", "")) == len([*config_of(runs[1]).outer_steps()])


def test_groups_in_sites(points: Points) -> None:
    found = table("deploy", "| 2 sites of 4 groups")
    of = (lambda inner: _one(inner, 8, 20), _three, lambda inner: _one(inner, 2, 20), lambda inner: _one(inner, 8, 10))
    for (what, sent, *cells), run in zip(found, of, strict=True):
        assert cells == [simulated(points, run(inner)) for inner in (MUON, ADAM)], what
        between = run(MUON).between_sites if run(MUON).sites > 1 else run(MUON)
        assert sent == f"{bits(between):.3f}"


def test_balance_of_routers() -> None:
    found = [Balance(**json.loads(line)) for line in _RECORDS.read_text().splitlines()]
    of = {row: [each for each in found if (each.groups, each.moved_by) == row] for row in _ROWS}
    loads = {row: statistics.mean(each.own for each in balances) for row, balances in of.items()}
    loss = {row: statistics.mean(each.loss for each in balances) for row, balances in of.items()}
    one, two, four, eight = (f"{loads[groups, 'own']:.2f}" for groups in (1, 2, 4, 8))
    lower = loss[8, "own"] - loss[8, "all"]
    text = " ".join(page("status").split())
    assert (
        f"is {one} synchronously, {two}, {four} and {eight} with 2, 4 and 8 groups, {loads[8, 'fixed']:.1f} without biases"
        in text
    )
    assert f"Loads of all groups would make it {loads[8, 'all']:.2f} with 8, and the loss {lower:.2f} lower" in text


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[float, list[dict[str, Any]]]]:
    """Rows of the emulated network, by series and rate of the link."""
    series = json.loads((_DOCS / "interconnect.json").read_text())
    return {
        name: {rate: interconnect.rows(found, rate) for rate in interconnect.rates(found)} for name, found in series.items()
    }


_THREE = {1000: "80 and 1000 Mbit/s, three", 200: "200 Mbit/s, three", 80: "80 and 1000 Mbit/s, three"}


def test_mean_iterations(measured: dict[str, dict[float, list[dict[str, Any]]]]) -> None:
    of = {
        "stock, 2 instances": "stock, 2 instances",
        "Pier, blocking": "Pier, blocking",
        "Pier, overlapped by 25": "Pier, overlapped by 25",
        "one group alone, no network": "one group alone",
    }
    means = {rate: {row["name"]: row["mean"] for row in measured[series][rate]} for rate, series in _THREE.items()}
    for what, *cells in table("performance", "| | 1000 Mbit/s | 200 Mbit/s | 80 Mbit/s |"):
        if what in of:
            assert cells == [f"{1e3 * mean[of[what]]:.0f} ms" for mean in means.values()], what
        else:
            assert cells == [f"{mean['stock, 2 instances'] / mean['Pier, blocking']:.1f} x" for mean in means.values()]


def test_configurations(measured: dict[str, dict[float, list[dict[str, Any]]]]) -> None:
    heading = "| | 1000 Mbit/s, x alone | 200 Mbit/s | 80 Mbit/s | MB per iteration |"
    for name, *cells, sent in table("performance", heading):
        expected = []
        for rate, title in _THREE.items():
            found = {row["name"]: row for row in measured[title][rate]}
            expected.append(f"{found[name]['best'] / found['one group alone']['best']:.2f}")
        assert cells == expected, name
        assert float(sent) == float(f"{found[name]['bytes'] / 1e6:.2g}")


def test_efficiency_of_tcp_is_what_was_measured(measured: dict[str, dict[float, list[dict[str, Any]]]]) -> None:
    """The median over all blocking FP32 outer steps of the emulated network."""
    times = [
        round(times, 2)
        for series in (_THREE, dict.fromkeys(_THREE, "one repetition"))
        for rate, title in series.items()
        for row in measured[title][rate]
        if row["name"] in ("Pier, blocking", "Pier, blocking, overlap flags")
        and (times := interconnect.times_wire(row, rate)) is not None
    ]
    assert len(times) == 9
    assert round(1 / statistics.median(times), 2) == TCP_EFFICIENCY
    for name, start in (("performance", ""), ("planner", "took ")):
        words = f"{start}{min(times):.2f} to {max(times):.2f} x the time that its bytes take at the link's rate"
        assert words in " ".join(page(name).split())


def test_readme_shows_the_recorded_demo() -> None:
    record, readme = json.loads((_DOCS / "demo.json").read_text()), " ".join((_REPOSITORY / "README.md").read_text().split())
    lines = "\n".join(record["lines"])
    [(sent, without)] = re.findall(r"Crossed the groups: ([\d,]+ MB) with Pier .*, ([\d,]+ MB) without", lines)
    for name, title, crossed in (
        ("synchronous", "synchronous AdamW", f"{without} "),
        ("pier", "Pier with AdamW", f"{sent} "),
        ("synchronous-muon", "synchronous Muon", ""),
        ("pier-muon", "Pier with Muon", ""),
    ):
        curve = record["curves"][name]
        assert f"| {title} | {curve['seconds'][-1]:.0f} s | {curve['losses'][-1]:.3f} | {crossed}|" in readme
    adam, muon, _ = re.findall(r"([\d.]+) x sooner", lines)
    assert f"the same loss {adam} x as fast with AdamW and {muon} x with Muon" in readme
    assert f"{curve['iterations'][-1]} iterations, H = 8, one seed, {record['date']})" in readme


def test_published_runs_and_what_a_law_is_worth() -> None:
    text = (_DOCS / "study.md").read_text()
    assert f"\n\n{published.table()}\n\n" in text
    factors = published.held_back()
    assert statistics.median(factors) > published.WITHIN
    assert f"factor of {statistics.median(factors):.2f} in the median ({min(factors):.2f} to {max(factors):.2f})" in page(
        "study"
    )


def test_why_synchronous_muon_is_lower_through_megatron(points: Points) -> None:
    def finals(**changes: Any) -> str:
        [point] = points.of([Run(SYNCHRONOUS, inner=MUON, **changes)])
        return spread(list(point.losses.values()))

    plugin = spread([final(row.baseline) for row in rows("pier-muon-annealed", inner=MUON, groups=8)])
    said = f"ends at {finals()}; at {plugin} through Megatron, which lets it train position embeddings, and at"
    run = short(coded(Run("local-sgd", inner=MUON, interval=2), "int2"))
    gap, usual = (simulated(points, dataclasses.replace(run, muon_positions=flag)) for flag in (True, False))
    said += f" {finals(muon_positions=True)} if simulated so; then the gap of int2 at H = 2 is {gap} instead of {usual}."
    assert said in " ".join(page("frontier").split())


def test_what_was_tried_is_in_the_records() -> None:
    assert (_REPOSITORY / "study" / "tried.md").read_text() == tried.page()


def test_long_runs_are_those_of_their_records() -> None:
    survey, text = Survey(_DOCS / "long.jsonl", Path("none")), (_DOCS / "frontier.md").read_text()
    assert f"\n\n{long_runs.table_of_bits(survey)}\n\n" in text
    for run in (long_runs.CLAIM, long_runs.MUON_CLAIM):
        assert f"\n\n{long_runs.claim(survey, run)}\n\n" in text
        for method in long_runs.tuned(survey, run).values():
            rates = sorted(method.others)
            assert rates[0] < method.rate < rates[-1], f"{method.method}: the best rate is the last one that was tried"
    found = search.gaps()
    runs = (dataclasses.replace(long_runs.CLAIM, method=method, learning_rate=1e-3) for method in ("pier-long", "pier"))
    long, paper = (spread(found.of(run, search.REPORTED_ON), "+") for run in runs)
    assert f"not looked at before `pier-long` ends at {long}, `pier` at {paper}." in " ".join(text.split())
