"""Searches routes, and hosts for ranks, with which a simulated step is short: annealing from a balanced table.

It stands in for the authors' conflict-based search over shortest paths, and their genetic assignment of nodes to stages.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence

from route_search.play import Grid, Played, play

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.skipping.pipeline.paths import balanced
from pier_megatron.experiments.skipping.pipeline.routes import MicroBatch, Place, bounds

_PASSES = 4_000_000
"""Passes that a search simulates, some seconds' worth."""

_MOST_TRIALS = 6000

_MOST_DRAWS = 1000

# Temperatures at the beginning and at the end, as shares of the time of a step.
_HOT, _COLD = 0.02, 0.0005

type Paths = dict[MicroBatch, tuple[Place, ...]]


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What is searched for.

    Attributes:
        fraction: Share of all pairs of a stage and a micro-batch to skip.
        most_held: Micro-batches whose activations a rank may keep at once (TC1 in the paper).
        seed: Seed of the search.
        is_searched: Whether routes are searched at all, or drawn.
        may_swap: Whether stages may be swapped.
        may_move: Whether hosts may change places.
        avoids_collisions: Whether the time of a step counts (TC2 in the paper), or the longest route of a micro-batch that
            meets no other one.
    """

    fraction: float
    most_held: int
    seed: int = 0
    is_searched: bool = True
    may_swap: bool = True
    may_move: bool = False
    avoids_collisions: bool = True


@dataclasses.dataclass(frozen=True)
class Found:
    """The best that was found.

    Attributes:
        paths: Routes.
        hosts: Host of each device, as of :class:`Grid`.
        played: The step.
    """

    paths: Paths
    hosts: tuple[int, ...]
    played: Played


def search(grid: Grid, micro_batches: int, groups: Sequence[Sequence[int]], wishes: Wishes) -> Found:
    """Searches routes for a step.

    Args:
        grid: Ranks and links.
        micro_batches: Number of micro-batches of a replica.
        groups: Replicas whose micro-batches may go through each other's ranks.
        wishes: What is searched for.

    Raises:
        PierConfigError: If more is to be skipped than there is, or no step ends.
    """
    generator = random.Random(wishes.seed)
    paths = _draw(grid, micro_batches, groups, wishes.fraction, generator)
    group_of = {replica: replicas for replicas in groups for replica in replicas}
    now = Found(paths, grid.hosts, play(grid, paths, wishes.most_held))
    if wishes.is_searched:
        now = _anneal(now, grid, group_of, wishes, generator)
    if math.isinf(now.played.seconds):
        raise PierConfigError(
            f"no step of {micro_batches} micro-batches ends with {wishes.most_held} of them held: ranks with full memory wait "
            "for each other. Allow more, or no swaps."
        )
    return now


def _draw(grid: Grid, micro_batches: int, groups: Sequence[Sequence[int]], fraction: float, generator: random.Random) -> Paths:
    """Balanced routes in their own replicas, with random choices of the skipped stages.

    They are in the order in which micro-batches shall begin: the first of each replica before the second of any.
    """
    stages, replicas = len(grid.devices), sorted(replica for group in groups for replica in group)
    keys = [MicroBatch(replica, number) for number in range(micro_batches) for replica in replicas]
    count = round(fraction * stages * len(keys))
    if count > (stages - 2) * len(keys):
        raise PierConfigError(
            f"a share of {fraction} of {stages} stages x {len(keys)} micro-batches = {count} to skip, but the first and the "
            f"last stage are whole: ({stages} - 2) x {len(keys)} = {(stages - 2) * len(keys)} at most"
        )
    for _ in range(_MOST_DRAWS):
        skipped = balanced(range(1, stages - 1), range(len(keys)), count, generator)
        found = {
            key: tuple(
                Place(stage, key.replica % len(grid.devices[stage]))
                for stage in range(stages)
                if (stage, number) not in skipped
            )
            for number, key in enumerate(keys)
        }
        for group in groups:
            _put_to_work(found, grid, group)
        if not any(map(bounds, found.values())) and not _idle(found, grid, replicas):
            return found
    raise PierConfigError(
        f"no routes were found that skip {fraction} of {stages} stages and give the ranks of all {len(replicas)} replicas "
        f"something to do with {micro_batches} micro-batches each. Skip less, or take more micro-batches."
    )


def _idle(paths: Paths, grid: Grid, replicas: Sequence[int]) -> list[Place]:
    """Places of some replicas that nobody visits: their ranks would have no gradients to reduce."""
    visited = {place for path in paths.values() for place in path}
    places = (
        Place(stage, replica) for stage, devices in enumerate(grid.devices) for replica in replicas if replica < len(devices)
    )
    return [place for place in places if place not in visited]


def _put_to_work(paths: Paths, grid: Grid, replicas: Sequence[int]) -> None:
    """Sends a visitor of the busiest rank of its stage to each rank that has none, as far as there are enough."""
    for idle in _idle(paths, grid, replicas):
        visitors: dict[int, list[MicroBatch]] = {}
        for key, path in paths.items():
            if key.replica in replicas and idle.stage in dict(path):
                visitors.setdefault(dict(path)[idle.stage], []).append(key)
        busiest = max(visitors.values(), key=len, default=[])
        if len(busiest) > 1:
            key = busiest[-1]
            paths[key] = tuple(idle if place.stage == idle.stage else place for place in paths[key])


def _anneal(begin: Found, grid: Grid, group_of: Mapping[int, Sequence[int]], wishes: Wishes, generator: random.Random) -> Found:
    def cost(found: Found) -> float:
        if wishes.avoids_collisions or math.isinf(found.played.seconds):
            return found.played.seconds
        return max(dataclasses.replace(grid, hosts=found.hosts).alone(path) for path in found.paths.values())

    passes = 2 * sum(map(len, begin.paths.values()))
    trials = min(max(_PASSES // passes, 1), _MOST_TRIALS)
    changes: list[Callable[..., Paths | None]] = [_exchange_skips, _exchange_ranks]
    changes += [_swap] if wishes.may_swap else []
    # Without collisions in the cost nothing else would keep all micro-batches from the same rank.
    changes += [_change_rank] if wishes.avoids_collisions else []
    may_move = wishes.may_move and len(set(grid.hosts)) > 1
    now = best = begin
    cost_now = cost_best = cost(begin)
    for trial in range(trials):
        temperature = _HOT * (_COLD / _HOT) ** (trial / trials) * cost_best
        hosts, paths = now.hosts, now.paths
        if may_move and generator.random() < 0.25:
            hosts = _exchange_hosts(hosts, generator)
        else:
            changed = generator.choice(changes)(paths, grid, group_of, generator)
            if changed is None or _idle(changed, grid, list(group_of)):
                continue
            paths = changed
        then = Found(paths, hosts, play(dataclasses.replace(grid, hosts=hosts), paths, wishes.most_held))
        cost_then = cost(then)
        worse = cost_then - cost_now
        if worse <= 0 or generator.random() < math.exp(-worse / temperature):
            now, cost_now = then, cost_then
            if cost_now < cost_best:
                best, cost_best = now, cost_now
    return best


def _exchange_hosts(hosts: tuple[int, ...], generator: random.Random) -> tuple[int, ...]:
    one, other = generator.sample(sorted(set(hosts)), 2)
    exchanged = {one: other, other: one}
    return tuple(exchanged.get(host, host) for host in hosts)


def _exchange_skips(paths: Paths, grid: Grid, group_of: Mapping[int, Sequence[int]], generator: random.Random) -> Paths | None:
    """Two micro-batches each visit a stage that the other one visited."""
    one, other = generator.sample(list(paths), 2)
    if group_of[one.replica] is not group_of[other.replica]:
        return None
    lacks = {key: {stage for stage, _ in paths[key]} for key in (one, other)}
    only_one, only_other = sorted(lacks[one] - lacks[other]), sorted(lacks[other] - lacks[one])
    if not only_one or not only_other:
        return None
    given, taken = generator.choice(only_one), generator.choice(only_other)
    return _checked(
        paths,
        {
            one: _moved(paths[one], given, next(place for place in paths[other] if place.stage == taken)),
            other: _moved(paths[other], taken, next(place for place in paths[one] if place.stage == given)),
        },
    )


def _moved(path: tuple[Place, ...], away: int, place: Place) -> tuple[Place, ...]:
    """A route that visits another place in the stead of a stage, before the first stage that is behind it."""
    rest = [each for each in path if each.stage != away]
    index = next(index for index, each in enumerate(rest) if each.stage > place.stage)
    return (*rest[:index], place, *rest[index:])


def _exchange_ranks(paths: Paths, grid: Grid, group_of: Mapping[int, Sequence[int]], generator: random.Random) -> Paths | None:
    """Two micro-batches take each other's rank of a stage."""
    one, other = generator.sample(list(paths), 2)
    if group_of[one.replica] is not group_of[other.replica]:
        return None
    ranks = {key: dict(paths[key]) for key in (one, other)}
    both = [stage for stage, _ in paths[one][1:-1] if ranks[other].get(stage, ranks[one][stage]) != ranks[one][stage]]
    if not both:
        return None
    stage = generator.choice(both)
    return _checked(
        paths,
        {
            key: tuple(Place(stage, ranks[peer][stage]) if each.stage == stage else each for each in paths[key])
            for key, peer in ((one, other), (other, one))
        },
    )


def _change_rank(paths: Paths, grid: Grid, group_of: Mapping[int, Sequence[int]], generator: random.Random) -> Paths | None:
    """A micro-batch takes another rank of a stage."""
    key = generator.choice(list(paths))
    hop = generator.randrange(len(paths[key]))
    place = paths[key][hop]
    width = len(grid.devices[place.stage])
    others = [replica for replica in group_of[key.replica] if replica < width and replica != place.replica]
    if not 0 < hop < len(paths[key]) - 1 or not others:
        return None
    return _checked(paths, {key: _with(paths[key], hop, Place(place.stage, generator.choice(others)))})


def _swap(paths: Paths, grid: Grid, group_of: Mapping[int, Sequence[int]], generator: random.Random) -> Paths | None:
    """A micro-batch visits two stages in the other order."""
    key = generator.choice(list(paths))
    path = paths[key]
    if len(path) < 4:
        return None
    hop = generator.randrange(1, len(path) - 2)
    return _checked(paths, {key: (*path[:hop], path[hop + 1], path[hop], *path[hop + 2 :])})


def _with(path: tuple[Place, ...], hop: int, place: Place) -> tuple[Place, ...]:
    return (*path[:hop], place, *path[hop + 1 :])


def _checked(paths: Paths, changed: Paths) -> Paths | None:
    """The routes with some changed, unless these break the bounds."""
    return None if any(map(bounds, changed.values())) else {**paths, **changed}
