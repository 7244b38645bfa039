"""Routes as data: what is refused, what a rank does by them, how long they take, and what a search finds."""

import contextlib
import dataclasses
import io
import itertools
import math
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import grids
import pytest
from route_search import search as searches
from route_search.play import play
from route_search.search import Wishes, search

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.skipping import executor
from pier_megatron.experiments.skipping.pipeline.routes import (
    FARTHEST,
    MOST_SWAPS,
    MicroBatch,
    Place,
    Routes,
    Visit,
    bounds,
    passes,
    plain,
)
from pier_megatron.experiments.skipping.pipeline.schedule import Pipeline
from pier_megatron.experiments.skipping.pipeline.simulator import makespan

pytestmark = pytest.mark.slow

_EXAMPLES = Path(__file__).parents[2] / "examples"
_WHOLE = grids.whole(4, 2, 2)
_TEXT = _WHOLE.text()


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "_MOST_TRIALS", 400)


@pytest.mark.parametrize("shape", [(2, 1, 1), (4, 1, 8), (4, 2, 3), (6, 3, 4)])
def test_whole_steps_take_what_megatrons_order_takes_and_no_rank_keeps_more(shape: tuple[int, int, int]) -> None:
    stages, replicas, micro_batches = shape
    played = play(grids.even(stages, replicas), plain(stages, replicas, micro_batches), stages)
    assert played.seconds == makespan(Pipeline(stages, 1, micro_batches, micro_batches), [1.0] * stages)
    assert played.held == min(stages, micro_batches)


@pytest.mark.parametrize("shape", [(4, 1, 8), (5, 3, 5)])
@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_ranks_that_follow_their_lists_end_even_if_every_message_blocks(shape: tuple[int, int, int], fraction: float) -> None:
    routes = grids.searched(*shape, fraction)
    places = [Place(stage, replica) for stage in range(shape[0]) for replica in range(shape[1])]
    lists = {place: routes.actions(place) for place in places}
    # One action at a time, and no message without both sides: as a single queue of a GPU would have it.
    arrived: set[tuple[Place, Visit]] = set()
    taken = Counter[Place]()
    while any(lists.values()):
        moved = False
        for place, actions in lists.items():
            if not actions:
                continue
            now = actions[0]
            if now.kind == "pass":
                path = routes.paths[now.visit.micro_batch]
                before = now.visit.hop + (1 if now.visit.is_backward else -1)
                if 0 <= before < len(path):
                    assert (place, now.visit._replace(hop=before)) in arrived
                taken[place] += 1
                actions.pop(0)
                moved = True
            elif now.kind == "send":
                assert now.peer is not None
                other = lists[now.peer]
                if other and other[0] == now._replace(kind="receive", peer=place):
                    actions.pop(0)
                    other.pop(0)
                    arrived.add((now.peer, now.visit))
                    moved = True
        assert moved, {place: actions[:1] for place, actions in lists.items()}
    assert sum(taken.values()) == 2 * sum(map(len, routes.paths.values()))


@pytest.mark.parametrize("fraction", [0.1, 0.33])
@pytest.mark.parametrize("replicas", [1, 3])
def test_searched_routes_are_within_all_bounds(fraction: float, replicas: int) -> None:
    routes = grids.searched(6, replicas, 4, fraction)
    routes.check()
    assert routes.fraction == pytest.approx(round(fraction * 24 * replicas) / (24 * replicas))
    lengths = [len(path) for path in routes.paths.values()]
    assert max(lengths) - min(lengths) <= 1
    assert routes.held <= 6


def test_a_search_shortens_the_step_and_each_freedom_helps() -> None:
    def seconds(held: int = 6, **wishes: bool) -> float:
        found = search(grids.uneven(6, 2), 6, [range(2)], Wishes(0.25, held, **wishes))
        return found.played.seconds

    found = seconds()
    assert found < 0.95 * seconds(is_searched=False)
    assert found < seconds(avoids_collisions=False)
    assert seconds(may_move=True) < found
    assert seconds(held=2) > found


@pytest.mark.parametrize(
    ("shape", "fraction", "size"),
    [((4, 4, 6), 0.1, 1), ((4, 4, 6), 0.33, 1), ((6, 3, 4), 0.1, 1), ((6, 3, 4), 0.33, 1), ((4, 4, 4), 0.25, 2)],
)
def test_micro_batches_stay_in_their_group_or_replica(shape: tuple[int, int, int], fraction: float, size: int) -> None:
    stages, replicas, micro_batches = shape
    groups = [[*range(first, first + size)] for first in range(0, replicas, size)]
    found = search(grids.uneven(stages, replicas), micro_batches, groups, Wishes(fraction, stages))
    Routes(stages, replicas, micro_batches, found.played.held, found.paths, found.played.order).check()
    assert all(place.replica // size == key.replica // size for key, path in found.paths.items() for place in path)
    assert any(place.replica != key.replica for key, path in found.paths.items() for place in path) == (size > 1)


def test_no_step_ends_where_ranks_wait_for_each_others_memory() -> None:
    swapped = {
        key: tuple(Place(stage, 0 if stage in (1, 2) else key.replica) for stage in ((0, 1, 2, 3), (0, 2, 1, 3))[key.replica])
        for key in (MicroBatch(0, 0), MicroBatch(1, 0))
    }
    assert math.isinf(play(grids.even(4, 2), swapped, 1).seconds)
    assert play(grids.even(4, 2), swapped, 2).seconds < math.inf


def test_links_carry_one_message_at_a_time() -> None:
    paths = plain(2, 1, 2)
    # 1 forward, link 5 + 1, 1 + 2 there, 5 + 1 back, 2: of the second micro-batch all but the link's turn is hidden.
    alone = play(grids.even(2, 1, 5.0, 1.0), {MicroBatch(0, 0): paths[MicroBatch(0, 0)]}, 2)
    assert alone.seconds == 1 + 6 + 3 + 6 + 2
    assert play(grids.even(2, 1, 5.0, 1.0), paths, 2).seconds == alone.seconds + 5


def test_a_file_holds_all_of_it() -> None:
    routes = dataclasses.replace(grids.searched(4, 2, 4, 0.125), hosts=("a", "b"))
    assert routes.swaps > 0
    assert routes.crossings > 0
    assert Routes.of_text(routes.text()) == routes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no file of routes"),
        ('{"format": 2}', "format 2, and this release reads 1"),
        ("[" * 100_000, "no file of routes: RecursionError"),
        (_TEXT.replace('"held":2', '"held":2.0'), "no file of routes: TypeError: 2.0 is no whole number"),
        (_TEXT.replace('"held":2', '"held":true'), "no file of routes: TypeError: True is no whole number"),
        (_TEXT.replace('"replicas":2', '"replicas":1000000000'), "4 micro-batches have one, of 1000000000 replicas"),
        (_TEXT.replace("[0,0],[1,0]", "[0,0],[-1,0]"), "no file of routes: TypeError: -1 is no whole number"),
        (_TEXT.replace('"hosts":[]', '"hosts":"abc"'), "no file of routes: TypeError: hosts must be a list"),
        (_TEXT.replace('"order":[', '"order":[[9,9],'), "no file of routes: KeyError"),
        (_TEXT.replace("]]}", "],[0,0]]}"), "the order has passes of a micro-batch that has taken all of its own"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(PierConfigError, match=message):
        Routes.of_text(text)


def changed(path: list[tuple[int, int]]) -> Routes:
    """Whole routes with one of them replaced."""
    paths = {**_WHOLE.paths, MicroBatch(0, 0): tuple(Place(*place) for place in path)}
    order = tuple(itertools.chain.from_iterable(passes(path, key) for key, path in paths.items()))
    return dataclasses.replace(_WHOLE, paths=paths, order=order)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (changed([(1, 0), (2, 0), (3, 0)]), "must begin at stage 0 and end at stage 3 of its own replica"),
        (changed([(0, 0), (1, 0), (2, 0), (3, 1)]), "must begin at stage 0 and end at stage 3 of its own replica"),
        (changed([(0, 0), (1, 0), (1, 1), (3, 0)]), "a stage comes twice"),
        (changed([(0, 0), (1, 2), (3, 0)]), "there are 4 stages and 2 replicas"),
        (changed([(0, 0), (3, 0)]), "stages are visited \\[4, 3, 3, 4\\] times|within one visit|held says"),
        (dataclasses.replace(_WHOLE, held=1), "a rank keeps 2 micro-batches at once, where held says 1"),
        (dataclasses.replace(_WHOLE, micro_batches=3), "4 micro-batches have one, of 2 replicas x 3 micro-batches = 6"),
        (dataclasses.replace(_WHOLE, order=_WHOLE.order[1:]), "the order has .*, where .* comes next on its route"),
        (dataclasses.replace(_WHOLE, order=_WHOLE.order[:-1]), "the order lacks"),
    ],
)
def test_wrong_routes_are_refused(routes: Routes, message: str) -> None:
    with pytest.raises(PierConfigError, match=message):
        routes.check()


def test_a_rank_that_nobody_visits_is_refused() -> None:
    routes = _WHOLE
    paths = {
        key: tuple(Place(stage, key.replica if stage in (0, 3) else 0) for stage, _ in path)
        for key, path in routes.paths.items()
    }
    order = tuple(itertools.chain.from_iterable(passes(path, key) for key, path in paths.items()))
    with pytest.raises(PierConfigError, match="no micro-batch visits stage 1 of replica 1, whose rank would have no gradients"):
        dataclasses.replace(routes, paths=paths, order=order).check()


def test_bounds_are_the_authors() -> None:
    def of(*stages: int) -> str | None:
        return bounds([Place(stage, 0) for stage in stages])

    assert of(0, 2, 1, 4, 3, 5) is None
    assert "a swap may go one stage back" in str(of(0, 3, 1, 4))
    assert f"has 3 swaps, and may have {MOST_SWAPS}" in str(of(0, 2, 1, 4, 3, 6, 5, 7))
    assert f"more than {FARTHEST} beyond stage 0" in str(of(0, 5, 6))
    assert of(0, 4, 5) is None


def test_more_than_there_is_cannot_be_skipped() -> None:
    with pytest.raises(
        PierConfigError, match=r"a share of 0.6 of 4 stages x 8 micro-batches = 19 to skip, .* \(4 - 2\) x 8 = 16"
    ):
        search(grids.even(4, 2), 4, [range(2)], Wishes(0.6, 4))


def test_micro_batches_find_their_own_data_in_any_order() -> None:
    batches = executor.Batches(iter("abc"), Place(0, 1))
    read = {number: next(iter(batches.of(MicroBatch(1, number)) or ())) for number in (2, 0, 1)}
    assert read == {0: "a", 1: "b", 2: "c"}
    assert executor.Batches(None, Place(0, 1)).of(MicroBatch(0, 0)) is None


def test_data_of_another_replica_is_refused_when_it_is_read() -> None:
    batches = executor.Batches(iter("abc"), Place(1, 1)).of(MicroBatch(0, 0))
    with pytest.raises(
        PierConfigError, match=r"reads data in stage 1, between the ends .* of replica 1 for .* replica 0. Search .* --stay of"
    ):
        next(batches or iter(()))


def test_a_step_of_other_micro_batches_is_refused() -> None:
    with pytest.raises(PierConfigError, match="routes for steps of 2 micro-batches of a replica, and this one has 4"):
        executor.run(_WHOLE, model=[], num_microbatches=4)


def test_example_searches_routes_over_unequal_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message in three passes the slow link of a whole step; a route that skips a stage may spare it none."""
    file, script = tmp_path / "routes.json", _EXAMPLES / "skip_routes.py"
    words = f"{_EXAMPLES / 'unequal-nodes.yaml'} --stages 4 --micro-batches 8 --fraction 0.25 --output {file}"
    for more in ("", " --place"):
        monkeypatch.setattr(sys, "argv", [str(script), *f"{words}{more}".split()])
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(script), run_name="__main__")
        full, routed = map(float, re.findall(r"([\d.]+) s ", said.getvalue()))
        assert routed < 0.8 * full
        routes = Routes.of_text(file.read_text())
        assert (routes.stages, routes.replicas, routes.micro_batches, routes.fraction) == (4, 2, 8, 0.25)
        assert sorted(routes.hosts) == ["a", "b", "c", "d"]
        assert (routes.hosts == ("a", "b", "c", "d")) or more
        assert f"start the nodes in this order: {', '.join(routes.hosts)}" in said.getvalue()
