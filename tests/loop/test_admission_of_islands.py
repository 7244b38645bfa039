"""Elastic islands: which of them are admitted to a run, from where, and what the others print."""

import dataclasses
import signal

import pytest
from archipelago import ANOTHER_SECRET, INTERVAL, PARTS, Archipelago, Plan
from stranger import Stranger

from pier_megatron.outer.verdicts import ABSENT, GOOD

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("sea", [3], indirect=True)
def test_an_island_of_another_run_is_refused_before_anything_is_exchanged(sea: Archipelago) -> None:
    refusal = "PierConfigError: --pier-island {} is of another run than the other islands: --tensor-model-parallel-size {}"
    # At the start most are right; later the islands that have met before are, however many others arrive.
    first, second, other = [sea.start(Plan(index, layout=PARTS + (index == 2))) for index in range(3)]
    ends = other.wait(60)
    assert len(ends) == PARTS
    assert all(said.startswith(refusal.format(2, "3 here and 2 there")) for said in ends)
    sea.go_on([first, second, sea.start(Plan(2))], seconds=60)
    second.die_in_a_sum()
    others = [sea.start(Plan(index, layout=4)) for index in (3, 4, 5)]
    for other in others:
        assert all(said.startswith(refusal.format(other.index, "4 here and 2 there")) for said in other.wait(60))
    sea.go_on([first, sea.start(Plan(1))], seconds=60)
    sea.check()


@pytest.mark.parametrize("sea", [3], indirect=True)
def test_an_island_with_other_weights_is_refused(sea: Archipelago) -> None:
    # It comes with the others: it would take over the anchor of islands that have begun.
    first, second, other = [sea.start(Plan(index, seed=int(index == 2))) for index in range(3)]
    ends = other.wait(60)
    assert len(ends) == PARTS
    assert all(said.startswith("PierConfigError: --pier-island 2 is at iteration 0 with another anchor") for said in ends)
    assert all("--seed" in said for said in ends)
    sea.go_on([first, second, sea.start(Plan(2))], seconds=60)
    sea.check()


def test_an_island_without_enough_others_gives_up_and_takes_its_last_step_when_they_are_back(sea: Archipelago) -> None:
    plans = [Plan(0, wait_seconds=12, train_iters=30), Plan(1, train_iters=30, dies_after=5)]
    first, _ = [sea.start(plan) for plan in plans]
    assert first.wait(60) == ["deserted"] * PARTS
    assert first.last_step() == 25
    ends = sea.start(Plan(0, wait_seconds=1)).wait(20)
    assert len(ends) == PARTS
    assert all("--pier-island-wait: too few islands" in said for said in ends)
    for index, iteration in enumerate((30, 25)):
        sea.start(Plan(index, loads=iteration, train_iters=30))
    assert [island.wait(60) for island in sea.islands[-2:]] == [["done"] * PARTS] * 2
    assert sea.check()[30]["verdicts"] == [GOOD, ABSENT]
    # Without a lighthouse there is nobody to wait for.
    sea.darken()
    ends = sea.start(Plan(0)).wait(30)
    assert len(ends) == PARTS
    assert all(said.startswith("PierConfigError: --pier-lighthouse http://127.0.0.1:") for said in ends)


def test_nobody_goes_back_to_an_older_anchor(sea: Archipelago) -> None:
    first, second, sleeper = [sea.start(Plan(index)) for index in range(3)]
    sea.go_on(sea.islands, seconds=60)
    sleeper.send(signal.SIGSTOP)
    sea.go_on([first, second], steps=2)
    second.kill()
    first.kill()
    iteration = sea.saved(0, 1)[-1]
    assert iteration > sleeper.last_step() + INTERVAL
    sea.roll_back_to(iteration, keep=[sleeper])
    again = [sea.start(Plan(index, loads=iteration)) for index in range(2)]
    # It wants the outer step that they have behind them.
    sleeper.send(signal.SIGCONT)
    ends = sleeper.wait(60)
    assert len(ends) == PARTS
    assert all(said.startswith("LeftBehindError: Island 2 missed the outer step") for said in ends)
    sea.go_on(again)
    assert [island.joined_at for island in again] == [iteration] * 2
    sea.check()


def test_an_island_counts_by_what_it_has_read_since_it_joined(sea: Archipelago) -> None:
    # Between them is an iteration that nobody trains, and one is two iterations behind.
    plans = [Plan(index, skips=(12, 14)) for index in range(2)]
    for plan in plans:
        sea.start(plan)
    sea.until(lambda: 12 in sea.saved(0, 1), 60)
    sea.roll_back_to(12)
    again = [sea.start(dataclasses.replace(plan, loads=12 - 2 * plan.index)) for plan in plans]
    sea.go_on(again, seconds=60)
    assert [(island.joined_at, island.took_over) for island in again] == [(12, False), (12, True)]
    sea.check()


def test_strangers_are_refused_and_the_others_go_on(sea: Archipelago) -> None:
    first, second = sea.start(Plan(0)), sea.start(Plan(1))
    sea.go_on([first, second], seconds=60)
    # Islands listen at their addresses only.
    assert {connection.laddr.ip for connection in sea.listening()} == {"127.0.0.1", "127.0.0.2"}
    ends = sea.start(Plan(1)).wait()
    assert len(ends) == PARTS
    assert all(said.startswith("PierConfigError: --pier-island 1: another island of that number is there") for said in ends)
    sea.go_on([first, second])
    ends = sea.start(Plan(2, secret=ANOTHER_SECRET)).wait(60)
    assert len(ends) == PARTS
    assert all("PierConfigError: --pier-secret-file: none of the islands 0000/" in said for said in ends)
    sea.go_on([first, second], seconds=60)
    # A stranger that does not end: it repeats what it once heard from an island, or passes challenges on to one.
    for passes_on in (False, True):
        with Stranger(sea.url, passes_on) as stranger:
            sea.until(lambda name=stranger.name: f"island {name} is refused: it proves nothing" in first.log(), 60)
            sea.go_on([first, second], seconds=60)
            assert stranger.quorums > 0
    sea.go_on([first, second, sea.start(Plan(2))], seconds=60)
    assert all(set(step["islands"]) <= {0, 1, 2} for step in sea.check().values())
