"""The simulation of rounds against closed forms, the planner's model, and single rounds counted by hand."""

import dataclasses
import math
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, Way, predict
from pier_megatron.commands.plan.rounds import (
    Faults,
    Groups,
    Islands,
    Membership,
    elastic,
    kept_share,
    kept_share_expected,
    one_launch,
    young_interval,
)

_TEN = Groups(10, 10, 1.0)
_TICK = Membership.tick / 2


@pytest.mark.parametrize(("mtbf", "restart", "save"), [(3600, 60, 10), (900, 600, 30), (100_000, 600, 30)])
def test_restarts_from_saves_are_those_of_daly(mtbf: float, restart: float, save: float) -> None:
    lives = np.random.default_rng(1).exponential(mtbf, 200_000)
    for factor in (0.5, 1.0, 2.0):
        faults = Faults(mtbf, restart, save, factor * young_interval(mtbf, save))
        assert kept_share(lives, faults) == pytest.approx(kept_share_expected(mtbf, faults), rel=0.02)


def test_young_interval_is_the_best_one_where_saves_are_short() -> None:
    best = young_interval(10_000, 10)

    def kept(seconds: float) -> float:
        return one_launch(_TEN, Faults(100_000, 300, 10, seconds)).trains

    assert kept(best) > max(kept(best / 3), kept(3 * best))
    assert kept(best) == pytest.approx(kept_share_expected(10_000, Faults(0, 300, 10, best)), rel=0.02)


def test_all_groups_wait_for_the_largest_of_their_draws() -> None:
    """Exponential iterations: the largest of n is the n-th harmonic number."""
    groups = dataclasses.replace(_TEN, interval=1, jitter=1.0)
    assert one_launch(groups, Faults(), rounds=20_000).round == pytest.approx(sum(1 / n for n in range(1, 11)), rel=0.02)


@pytest.mark.parametrize(("number", "largest"), [(2, 0.564), (10, 1.539), (100, 2.508), (10_000, 3.852)])
def test_speeds_have_the_expected_largest_of_so_many_normal_draws(number: int, largest: float) -> None:
    speeds = Groups(number, 1, 1.0, spread=0.01).speeds
    assert speeds.mean() == pytest.approx(1)
    assert (speeds.max() - 1) / 0.01 == pytest.approx(largest, rel=0.06)


def test_one_group_alone_has_its_whole_time() -> None:
    alone = Groups(1, 10, 1.0, exchange=5.0)
    assert one_launch(alone, Faults()) == dataclasses.replace(one_launch(alone, Faults()), trains=1.0, cost=1.0, round=10.0)


@pytest.mark.parametrize("way", [Way(50), Way(50, 25), Way(50, 50), Way(10, 2), Way(20, in_pairs=True), Way(50, dtype="int8")])
def test_without_troubles_it_is_the_planner(way: Way) -> None:
    job = Job(flops=8e12, shard=1e9, gpus=16, tensor_parallel=4, replicas=4, groups=4)
    prediction = predict(job, Cluster(4, 80e9, 1e12, 1e9, 1e12, 2e12, overhead=0.0))
    wire = prediction.pairs if way.in_pairs else prediction.exchange[way.dtype]
    work = prediction.outer_step(way.dtype) - prediction.exchange[way.dtype]
    groups = Groups(4, way.interval, prediction.local, exchange=wire, work=work, overlap=way.overlap, in_pairs=way.in_pairs)
    cost = one_launch(groups, Faults(), rounds=2000).cost
    assert cost * prediction.local == pytest.approx(prediction.mean_iteration(way), rel=2e-3)


def test_islands_without_failures_are_groups_of_one_launch() -> None:
    groups = dataclasses.replace(_TEN, spread=0.1, jitter=0.1, exchange=3.0)
    launched, islands = one_launch(groups, Faults()), elastic(groups, Faults(), Membership(6))
    assert islands.round == pytest.approx(launched.round + _TICK, rel=1e-9)
    assert (islands.counts, islands.trains) == (1.0, pytest.approx(launched.trains, rel=0.01))


def test_islands_are_there_for_the_share_of_time_that_none_has_failed() -> None:
    groups, membership = Groups(1000, 1, 1.0), Membership(1, heartbeat_timeout=0.0, tick=0.0)
    found = elastic(groups, Faults(400.0, restart=100.0), membership, rounds=2000)
    assert found.counts == pytest.approx(400 / (400 + 100), rel=0.01)
    assert found.round == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("lives", "met"),
    [
        # Given up before the others are there, after it, and one after the other.
        ([1.0, math.inf, math.inf], 10.0),
        ([9.0, math.inf, math.inf], 14.0),
        ([9.0, 13.0, math.inf], 18.0),
        ([9.0, 9.5, 9.9], math.inf),
    ],
)
def test_a_quorum_waits_until_the_dead_are_given_up(lives: list[float], met: float) -> None:
    islands = Islands(Groups(3, 10, 1.0), Faults(), Membership(2), seed=0)
    assert islands.quorum(np.full(3, 10.0), np.array(lives)) == pytest.approx(met + _TICK)


@pytest.mark.parametrize(
    ("number", "late", "met", "left"), [(5, 1, 15.0, 1), (5, 2, 15.0, 2), (5, 3, 30.0, 0), (4, 2, 30.0, 0), (4, 1, 15.0, 1)]
)
def test_an_island_that_comes_late_is_left_behind_by_a_majority_only(number: int, late: int, met: float, left: int) -> None:
    islands = Islands(Groups(number, 10, 1.0), Faults(), Membership(2, join_timeout=5.0), seed=0)
    seconds = np.array([10.0] * (number - late) + [30.0] * late)
    assert islands.quorum(seconds, np.full(number, math.inf)) == pytest.approx(met + _TICK)
    assert (~islands.are_members).sum() == left


def island_round(lives: list[float], least: int = 2, **settings: Any) -> Islands:
    """Islands after a round of ten seconds with an exchange of five, in which they live for so long."""
    groups, faults = Groups(len(lives), 10, 1.0, exchange=5.0), Faults(1.0, restart=60.0)
    islands = Islands(groups, faults, Membership(least, takeover=2.0, **settings), seed=0)
    islands.chance = SimpleNamespace(exponential=lambda mtbf, number: np.array(lives))  # type: ignore[assignment]
    islands.take_round()
    return islands


def test_an_exchange_with_a_lost_node_is_retried_after_the_time_out() -> None:
    islands = island_round([math.inf, math.inf, 12.0])
    # What it had learned does not count. It is back a minute after it failed, and joins in the second exchange.
    assert islands.now == pytest.approx(12 + 120 + 5 + 2)
    assert islands.unsaved.tolist() == [20, 20, 1]
    assert islands.are_members.tolist() == [True, True, True]
    sooner = island_round([math.inf, math.inf, 12.0], island_timeout=20.0)
    assert (sooner.now, sooner.are_members.tolist()) == (pytest.approx(12 + 20 + 5), [True, True, False])


def test_too_few_islands_wait_for_those_that_return() -> None:
    islands = island_round([math.inf, 3.0, 2.0])
    # Back a minute after it failed; it takes over anchor and momentum.
    assert islands.now == pytest.approx(2 + 60 + 5 + 2)
    assert islands.are_members.tolist() == [True, False, True]
    assert island_round([math.inf, 3.0, 2.0], least=1).now == pytest.approx(10 + _TICK + 5)
    # Who has waited for too long saves and ends, and is restarted.
    assert island_round([math.inf, 3.0, 2.0], island_wait=30.0).now == pytest.approx(10 + _TICK + 30 + 60 + 5 + 2)


def test_when_all_are_dead_what_was_learned_since_the_save_is_lost() -> None:
    islands = island_round([1.0, 2.0, 3.0])
    assert islands.now == pytest.approx(3 + 60)
    assert islands.unsaved.tolist() == [0, 0, 0]
    assert islands.are_members.all()


def test_islands_rest_when_their_time_is_up_but_not_when_an_outer_step_is_due() -> None:
    groups = Groups(5, 20, 1.0, spread=0.5)
    rests = 20 * float(groups.speeds.min())
    iterations = Islands(groups, Faults(), Membership(3, rests), seed=0).iterations
    for seconds, trained in zip(groups.speeds, iterations, strict=True):
        by_hand = next(done for done in range(1, 21) if done * seconds >= rests - 1e-9 or done == 20)
        assert trained == (20 if by_hand >= 19 else by_hand + 1)
    assert iterations.max() == 20
    assert elastic(groups, Faults(), Membership(3, rests)).round < 0.6 * elastic(groups, Faults(), Membership(3)).round


def test_pairs_wait_less_for_jitter_and_not_less_for_a_slow_group() -> None:
    uneven = dataclasses.replace(_TEN, jitter=0.5)
    slow = dataclasses.replace(_TEN, spread=0.3)
    for groups, low, high in ((uneven, 0.5, 0.95), (slow, 0.95, 1.001)):
        pairs = one_launch(dataclasses.replace(groups, in_pairs=True), Faults())
        assert low < pairs.cost / one_launch(groups, Faults()).cost < high
    together = dataclasses.replace(uneven, in_pairs=True, together_every=1)
    assert one_launch(together, Faults()).cost == pytest.approx(one_launch(uneven, Faults()).cost, rel=0.02)


def test_the_slowest_link_holds_all_groups_and_one_pair() -> None:
    """Two sites with a link of four times the seconds."""
    groups = Groups(8, 10, 1.0, exchange=1.0, slowness=((1.0, 4.0), (4.0, 1.0)))
    assert groups.sites.tolist() == [0] * 4 + [1] * 4
    assert one_launch(groups, Faults()).round == pytest.approx(14)
    pairs = one_launch(dataclasses.replace(groups, in_pairs=True), Faults()).round
    assert 11 < pairs < 14


def test_a_seed_has_one_outcome() -> None:
    groups, faults = dataclasses.replace(_TEN, jitter=0.2), Faults(1000, 60, 5, 100)
    for run in (
        lambda seed: one_launch(groups, faults, seed=seed),
        lambda seed: elastic(groups, faults, Membership(6), seed=seed),
    ):
        assert run(1) == run(1) != run(2)


def test_ten_thousand_groups_are_like_a_hundred_where_nobody_waits() -> None:
    outcomes = [elastic(Groups(number, 50, 1.0), Faults(50_000, 600), Membership(1), 100).counts for number in (100, 10_000)]
    assert statistics.mean(outcomes) == pytest.approx(outcomes[0], rel=0.01)
