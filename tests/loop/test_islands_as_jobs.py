"""Elastic islands: their outcome when some of them die, hang or join, and how soon."""

import dataclasses
import re
import signal
import time

import pytest
from archipelago import HEARTBEAT_TIMEOUT, INTERVAL, PARTS, Archipelago, Plan

from pier_megatron.outer.verdicts import ABSENT, GOOD, NOT_FINITE

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("sea", [3], indirect=True)
def test_islands_that_all_live_are_the_simulated_ones(sea: Archipelago) -> None:
    """One rests, one diverges, and in one a rank fails alone, whose island stays in step."""
    for plan in (Plan(0, rests_after=2), Plan(1, bad_at=12), Plan(2, fails_alone_in=5)):
        sea.start(dataclasses.replace(plan, train_iters=30))
    assert [island.wait(60) for island in sea.islands] == [["done"] * PARTS] * 3
    assert {iteration: list(step["verdicts"]) for iteration, step in sea.check().items()} == {
        iteration: [GOOD, NOT_FINITE if iteration == 15 else GOOD, GOOD] for iteration in range(INTERVAL, 31, INTERVAL)
    }
    # Had the first trained as long as the others.
    sea.islands[0].plan = Plan(0)
    with pytest.raises(AssertionError, match="from that of the simulation"):
        sea.check()


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
    # On a busy machine one may also have been silent for too long.
    assert {(3, "new: 2"), (2, "gone: 2"), (2, "gone: 1")} <= {
        (int(number), change) for number, change in re.findall(r"Pier: (\d) of 3 islands are there; (.*)", first.log())
    }


def test_a_fresh_island_does_not_begin_a_run_of_its_own_when_those_that_it_was_to_join_die(sea: Archipelago) -> None:
    """With more than half of the islands in a quorum, which is the lighthouse's default."""
    others = [sea.start(Plan(index, seconds=0.4)) for index in range(2)]
    sea.until(lambda: min(island.last_step() for island in others) >= 2 * INTERVAL, 60)
    fresh = sea.start(Plan(2))
    # It asks for a quorum, and they are in the middle of an interval.
    sea.until(lambda: "Start quorum" in fresh.log() if fresh.entries() else False, 60)
    saved = sea.saved(0, 1)[-1]
    sea.roll_back_to(saved, keep=[fresh])
    time.sleep(3 * HEARTBEAT_TIMEOUT)
    assert fresh.is_alive
    assert not fresh.has_joined
    back = sea.start(Plan(0, loads=saved))
    sea.go_on([back, fresh], seconds=60)
    assert fresh.took_over
    sea.check()


def test_an_island_that_misses_the_last_message_counts_in_that_step_and_is_left_behind(sea: Archipelago) -> None:
    others, missing = [sea.start(Plan(index)) for index in range(2)], sea.start(Plan(2, misses_last_message_of=3))
    ends = missing.wait(60)
    assert len(ends) == PARTS
    missed = missing.last_step() + INTERVAL
    assert all(said.startswith(f"LeftBehindError: Island 2 missed the outer step after iteration {missed}") for said in ends)
    sea.go_on(others)
    step = sea.check()[missed]
    assert dict(zip(step["islands"], step["verdicts"], strict=True))[2] == GOOD


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
    # Less than a collective waits for one that is silent.
    sea.until(lambda: min(first.last_step(), second.last_step()) > silent_in, minutes / 2)
    halts.send(signal.SIGCONT)
    ends = halts.wait(60)
    assert len(ends) == PARTS
    assert all(said.startswith("LeftBehindError: Island 2 missed the outer step after iteration") for said in ends)
    assert all("--max-restarts" in said and "other groups" not in said for said in ends)
    assert interrupted in first.log() + second.log()
    # One that is silent while the others connect with it is given up too.
    silent = sea.start(Plan(2, timeout=minutes, halts_connecting=True))
    sea.until(lambda: silent.is_halted, 60)
    waits = first.last_step()
    sea.until(lambda: min(first.last_step(), second.last_step()) > waits + INTERVAL, 60)
    assert any("the exchange is interrupted: island 2 does not answer" in island.log() for island in (first, second))
    silent.kill()
    sea.go_on([first, second])
    steps = sea.check()
    assert (steps[slow_in]["islands"], steps[silent_in]["islands"]) == ([0, 1, 2], [0, 1])


def test_islands_that_hear_from_different_others_do_not_wait_for_each_other(sea: Archipelago) -> None:
    islands = [sea.start(Plan(index)) for index in range(2)]
    sea.go_on(islands, seconds=60)
    # As an island may whose question is under way when a fault begins or ends.
    islands.append(sea.start(Plan(2, misses_answer_of=0)))
    sea.go_on(islands, seconds=60)
    assert any("island 2 meets other islands" in island.log() for island in islands)
    sea.check()
