"""Elastic islands: their outcome when some of them die, hang or join, and how soon."""

import signal
import time

import pytest
from archipelago import INTERVAL, ISLAND_TIMEOUT, PARTS, Archipelago, Plan

from pier_megatron.outer.verdicts import ABSENT, GOOD, NOT_FINITE

pytestmark = pytest.mark.processes

of_three = pytest.mark.parametrize("sea", [3], indirect=True)


@of_three
def test_undisturbed_islands_are_the_simulated_ones(sea: Archipelago) -> None:
    for index in range(3):
        sea.start(Plan(index, train_iters=30))
    assert [island.wait(60) for island in sea.islands] == [["done"] * PARTS] * 3
    steps = sea.check()
    assert all(step["verdicts"] == [GOOD] * 3 for step in steps.values())
    assert max(steps) == 30


@of_three
def test_slower_islands_rest_and_count_by_what_they_have_read(sea: Archipelago) -> None:
    plans = [Plan(index, train_iters=30, rests_after=2 if index == 1 else INTERVAL) for index in range(3)]
    for plan in plans:
        sea.start(plan)
    assert [island.wait(60) for island in sea.islands] == [["done"] * PARTS] * 3
    sea.check()
    # Had it trained as long as the others.
    sea.islands[1].plan = Plan(1)
    with pytest.raises(AssertionError, match="from that of the simulation"):
        sea.check()


@of_three
def test_a_rank_that_fails_alone_keeps_the_others_of_its_island_in_step(sea: Archipelago) -> None:
    for index in range(3):
        sea.start(Plan(index, train_iters=30, fails_alone_in=4 if index == 1 else None))
    assert [island.wait(60) for island in sea.islands] == [["done"] * PARTS] * 3
    assert all(step["verdicts"] == [GOOD] * 3 for step in sea.check().values())


def test_those_left_take_the_step_again_and_new_ones_join(sea: Archipelago) -> None:
    first, second = sea.start(Plan(0)), sea.start(Plan(1))
    sea.go_on([first, second], seconds=60)
    third = sea.start(Plan(2, dies_after=2))
    third.wait(60)
    died_at = third.last_step() + INTERVAL
    sea.go_on([first, second])
    anew = sea.start(Plan(2))
    sea.go_on([first, second, anew], seconds=60)
    second.die_in_a_sum()
    sea.go_on([first, anew])
    steps = sea.check()
    assert steps[died_at]["islands"] == [0, 1]
    joined = min(anew.steps())
    assert steps[joined]["islands"] == [0, 1, 2]
    assert steps[joined]["verdicts"] == [GOOD, GOOD, ABSENT]
    assert steps[joined + INTERVAL]["verdicts"] == [GOOD] * 3
    assert steps[max(steps)]["islands"] == [0, 2]


def test_an_island_that_slept_too_long_ends_on_all_its_ranks(sea: Archipelago) -> None:
    first, second, sleeper = [sea.start(Plan(index)) for index in range(3)]
    sea.go_on(sea.islands, seconds=60)
    sleeper.send(signal.SIGSTOP)
    sea.go_on([first, second])
    time.sleep(ISLAND_TIMEOUT)
    sleeper.send(signal.SIGCONT)
    ends = sleeper.wait()
    assert len(ends) == PARTS
    for said in ends:
        assert said.startswith("LeftBehindError: Island 2 missed the outer step after iteration")
        assert "--max-restarts" in said
        assert "other groups" not in said
    # The others took a step with it once more, rather than end an attempt because of it.
    assert "islands end" not in first.log() + second.log()
    sea.go_on([first, second])
    sea.check()


def test_an_island_that_misses_the_last_message_counts_in_that_step_and_is_left_behind(sea: Archipelago) -> None:
    others, missing = [sea.start(Plan(index)) for index in range(2)], sea.start(Plan(2, misses_last_message_of=3))
    ends = missing.wait(60)
    assert len(ends) == PARTS
    missed = missing.last_step() + INTERVAL
    assert all(said.startswith(f"LeftBehindError: Island 2 missed the outer step after iteration {missed}") for said in ends)
    sea.go_on(others)
    steps = sea.check()
    assert (steps[missed]["islands"], steps[missed]["verdicts"]) == ([0, 1, 2], [GOOD] * 3)


def test_a_silent_island_is_given_up_long_before_the_time_out_and_a_slow_one_is_not(sea: Archipelago) -> None:
    minutes, interrupted = 300, "the exchange is interrupted"
    first, second = [sea.start(Plan(index, timeout=minutes)) for index in range(2)]
    sea.go_on([first, second], seconds=60)
    halts = sea.start(Plan(2, timeout=minutes, halts_after=(1, 3)))
    sea.until(lambda: halts.is_halted, 60)
    slow_in = first.last_step() + INTERVAL
    time.sleep(1.5)
    halts.send(signal.SIGCONT)
    sea.until(lambda: halts.is_halted and first.last_step() > slow_in, 60)
    assert interrupted not in first.log() + second.log()
    silent_in = first.last_step() + INTERVAL
    seconds = sea.until(lambda: min(first.last_step(), second.last_step()) > silent_in, minutes)
    halts.send(signal.SIGCONT)
    ends = halts.wait(60)
    assert len(ends) == PARTS
    assert all(said.startswith("LeftBehindError: Island 2 missed the outer step after iteration") for said in ends)
    sea.go_on([first, second, sea.start(Plan(2, timeout=minutes))], seconds=60)
    steps = sea.check()
    assert (steps[slow_in]["islands"], steps[silent_in]["islands"]) == ([0, 1, 2], [0, 1])
    assert interrupted in first.log() + second.log()
    assert seconds < minutes / 5


def test_an_island_that_is_silent_while_others_connect_with_it_is_given_up_too(sea: Archipelago) -> None:
    others = [sea.start(Plan(index, timeout=300, islands=4)) for index in (0, 1, 3)]
    sea.go_on(others, seconds=60)
    silent = sea.start(Plan(2, timeout=300, islands=4, halts_connecting=True))
    sea.until(lambda: silent.is_halted, 60)
    waits = others[0].last_step()
    sea.until(lambda: min(island.last_step() for island in others) > waits + INTERVAL, 60)
    # Islands 0 and 1 ask it, and island 3 asks them.
    assert any("the exchange is interrupted: island 2 does not answer" in island.log() for island in others)
    silent.kill()
    sea.go_on(others)
    assert {2 in step["islands"] for step in sea.check().values()} == {False}


def test_islands_that_hear_from_different_others_do_not_wait_for_each_other(sea: Archipelago) -> None:
    islands = [sea.start(Plan(index, timeout=300)) for index in range(2)]
    sea.go_on(islands, seconds=60)
    # As an island may whose question is under way when a fault begins or ends.
    islands.append(sea.start(Plan(2, timeout=300, misses_answer_of=0)))
    sea.go_on(islands, seconds=60)
    assert any("island 2 meets other islands" in island.log() for island in islands)
    sea.check()


def test_islands_go_on_when_the_lighthouse_is_back(sea: Archipelago) -> None:
    islands = [sea.start(Plan(index)) for index in range(3)]
    sea.go_on(islands, seconds=60)
    sea.darken()
    time.sleep(1)
    before = [island.last_step() for island in islands]
    time.sleep(1)
    assert [island.last_step() for island in islands] == before
    sea.light()
    sea.go_on(islands)
    islands.pop().die_in_a_sum()
    sea.darken()
    sea.light()
    sea.go_on(islands)
    sea.check()


@of_three
def test_an_island_that_diverges_is_left_out_and_restarted(sea: Archipelago) -> None:
    for index in range(3):
        sea.start(Plan(index, train_iters=30, bad_at=12 if index == 1 else None))
    assert [island.wait(60) for island in sea.islands] == [["done"] * PARTS] * 3
    steps = sea.check()
    assert [list(step["verdicts"]) for step in steps.values()] == [
        [GOOD, NOT_FINITE if iteration == 15 else GOOD, GOOD] for iteration in range(INTERVAL, 31, INTERVAL)
    ]
