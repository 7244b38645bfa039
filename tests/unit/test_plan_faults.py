"""Which way to run a job the planner advises where nodes fail and speeds differ, and what its page says of it."""

import argparse
import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import pytest

from pier_megatron.commands.plan import faults
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.faults import Choice, Simulation
from pier_megatron.commands.plan.model import Job
from pier_megatron.commands.plan.rounds import kept_share_expected, young_interval
from pier_megatron.commands.plan.troubles import Troubles, add_arguments, troubles_of
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import rounds

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_JOB = Job(flops=8e14, shard=1e9, gpus=64, tensor_parallel=4, replicas=16, groups=8)
_NONE = Troubles(math.inf, 0.0, 600.0, 30.0)


def simulation(troubles: Troubles, **settings: object) -> Simulation:
    config = PierConfig(groups=8, train_iters=10_000, **({"sync_interval": 50} | settings))  # type: ignore[arg-type]
    return Simulation(_JOB, Cluster(8, 80e9, 1e12, 1e10, 1e12), config, troubles, log_interval=100)


def advised(troubles: Troubles, **settings: object) -> dict[str, object]:
    found = faults.make_plan(simulation(troubles, **settings), 10_000)
    json.dumps(found, allow_nan=False)
    assert faults.lines(found, 8)[-1].endswith(f"{found['advice']['flags']}") == (found["advice"]["way"] == faults.ONE_LAUNCH)
    return found["advice"]


def test_one_launch_where_nothing_goes_wrong() -> None:
    advice = advised(_NONE)
    assert (advice["way"], advice["save interval"]) == (faults.ONE_LAUNCH, None)
    assert advice["flags"] == f"--pier-sync-interval {advice['interval']}"


def test_islands_that_rest_where_speeds_differ() -> None:
    advice = advised(dataclasses.replace(_NONE, spread=0.2))
    assert advice["way"] == faults.RESTING
    assert f"--pier-sync-seconds {advice['rest_after']:g}" in str(advice["flags"])
    assert "--save-interval" not in str(advice["flags"])


def test_islands_where_nodes_fail_often() -> None:
    often = dataclasses.replace(_NONE, mtbf=5.0)
    advice = advised(often)
    assert advice["way"] == faults.ELASTIC
    assert re.search(r"--pier-lighthouse URL --pier-island K .*--save-interval \d+", str(advice["flags"]))
    assert int(str(advice["save interval"])) % int(str(advice["interval"])) == 0
    # Bits that need error feedback, which elastic islands refuse, are not simulated there.
    exact, few = (simulation(often, exchange_dtype=dtype).groups(Choice(faults.ELASTIC, 50)) for dtype in ("fp32", "int2"))
    assert exact.exchange == few.exchange


@pytest.mark.parametrize(
    ("settings", "flags", "without"),
    [
        ({"overlap": 5, "exchange_dtype": "int8"}, "--pier-no-error-feedback", ["--pier-overlap"]),
        ({"fragments": 2, "exchange_dtype": "int2"}, "--pier-exchange-dtype fp32", ["--pier-fragments"]),
        ({"preset": "noloco"}, "", ["--pier-subgroup-size and --pier-preset noloco"]),
    ],
)
def test_what_islands_refuse_is_named(settings: dict[str, object], flags: str, without: list[str]) -> None:
    advice = advised(dataclasses.replace(_NONE, mtbf=5.0), **settings)
    assert flags in str(advice["flags"])
    assert advice["without"] == without


def test_elastic_islands_whose_job_would_be_better_off_without_are_told_what_to_drop() -> None:
    elastic = {"lighthouse": "http://h:1", "lazy_start_iters": 0, "sync_seconds": 100.0}
    found = faults.make_plan(simulation(_NONE, **elastic), 10_000)
    assert found["advice"]["way"] == faults.ONE_LAUNCH
    assert faults.lines(found, 8)[-1].endswith(", without --pier-lighthouse and the flags that need it")
    failing = faults.make_plan(simulation(dataclasses.replace(_NONE, mtbf=5.0), **elastic), 10_000)
    assert failing["advice"]["without"] == ["--pier-sync-seconds"]


def test_a_job_that_never_gets_to_a_save_never_ends() -> None:
    found = faults.make_plan(simulation(dataclasses.replace(_NONE, mtbf=0.01)), 10_000)
    json.dumps(found, allow_nan=False)
    *table, advice = faults.lines(found, 8)
    assert any("never ends" in line for line in table)
    assert advice == "Advice: none. Failures come sooner than saves, whatever the way: no run ends."


def test_a_job_of_one_launch_fails_with_any_node_and_an_island_with_its_own() -> None:
    found = simulation(dataclasses.replace(_NONE, mtbf=8.0))
    assert (found.mtbf(faults.ONE_LAUNCH), found.mtbf(faults.ELASTIC)) == (3600, 8 * 3600)
    # Alike, but for what is lost: without waiting it is Daly's.
    choice = Choice(faults.ONE_LAUNCH, 50)
    every = found.save_every(choice.way)
    assert every == young_interval(3600, 30)
    given = dataclasses.replace(rounds.Faults(), restart=600, save=30, save_every=every)
    calm = simulation(_NONE).run(choice).trains
    assert found.run(choice).trains == pytest.approx(calm * kept_share_expected(3600, given), rel=0.02)


def test_intervals_that_would_not_start_are_not_advised() -> None:
    assert advised(_NONE, overlap=40)["interval"] in (50, 100, 200, 500)


def test_groups_of_the_same_size_do_the_same_work() -> None:
    found = simulation(_NONE)
    assert faults.of_size(found, 8) == found
    larger = faults.of_size(found, 10_000)
    assert (larger.job.gpus, larger.job.replicas_in_group) == (80_000, 2)
    assert larger.prediction.compute == pytest.approx(found.prediction.compute)


@pytest.mark.parametrize(
    ("words", "troubles"),
    [
        ("", None),
        ("--spread 5", Troubles(math.inf, 0.05, 600, 30)),
        ("--mtbf 500 --restart 5 --save-seconds 10", Troubles(500, 0.0, 300, 10)),
    ],
)
def test_flags(words: str, troubles: Troubles | None) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert troubles_of(parser.parse_args(words.split())) == troubles


@pytest.mark.parametrize("flag", ["--restart", "--save-seconds"])
def test_flags_of_failures_need_failures(flag: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(PierConfigError, match=f"{flag} 5 is of failures, and none are simulated: add --mtbf HOURS, or drop it"):
        troubles_of(parser.parse_args([flag, "5", "--spread", "3"]))


def figures(line: str) -> list[float]:
    return [float(figure.replace(",", "")) for figure in re.findall(r"[-+]?[\d,]*\.?\d+", line)]


def test_page_says_what_the_benchmark_prints() -> None:
    """To a percent: draws may differ between releases of NumPy."""
    page = (_DOCS / "planner.md").read_text().splitlines()
    printed = [*rounds.summary(_DOCS / "rounds.json"), *rounds.published(), *rounds.of_sizes((10,))]
    for line in printed:
        if not figures(line):
            continue
        key = line.split("|")[1:3] if line.split("|")[1].strip().endswith(" h") else line.split("|")[1:2]
        [shown] = [row for row in page if row.split("|")[1 : 1 + len(key)] == key]
        assert figures(shown) == pytest.approx(figures(line), rel=0.02, abs=1.0), line
