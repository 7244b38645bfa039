"""Routes of micro-batches through a grid of stages and replicas, and the order of all passes: a schedule as data.

After SkipPipe (arXiv 2502.19913): a micro-batch goes from the rank of one stage to the rank of the next stage on its route, in
its own replica or in another one. What it skips receives nothing and sends nothing.
"""

import dataclasses
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Self

from pier_megatron.errors import PierConfigError

FORMAT = 1
"""Version of the file."""

MOST_SWAPS = 2
"""Stages that a route may visit after one that is behind them (the authors' bound); each is one back at most."""

FARTHEST = 4
"""Stages by which a route may go beyond the farthest one that it has visited (the authors' bound)."""


class Place(NamedTuple):
    """A stage of a replica."""

    stage: int
    replica: int


class MicroBatch(NamedTuple):
    """A micro-batch, by the replica whose data it is of and its number in the step, from 0."""

    replica: int
    number: int


class Visit(NamedTuple):
    """A pass of a micro-batch through a place of its route.

    Attributes:
        is_backward: Whether it is the backward pass.
        micro_batch: Micro-batch that passes.
        hop: Index of the place in its route.
    """

    is_backward: bool
    micro_batch: MicroBatch
    hop: int


class Action(NamedTuple):
    """What a rank does next.

    Attributes:
        kind: Whether it takes a pass, sends the result of one, or receives that of another rank.
        visit: Pass that is meant.
        peer: Rank that the result is sent to or received from; None for a pass of its own.
    """

    kind: Literal["pass", "send", "receive"]
    visit: Visit
    peer: Place | None


@dataclasses.dataclass(frozen=True)
class Routes:
    """A step's routes and order of passes.

    Attributes:
        stages: Number of pipeline stages.
        replicas: Number of model replicas.
        micro_batches: Number of micro-batches of a replica in a step.
        held: Micro-batches at most whose activations a rank keeps at once.
        paths: Places that a micro-batch visits, in order.
        order: All passes of the step, each behind the passes that it needs. Ranks that follow it, each its own part, never wait
            for each other in a circle, and the messages of two ranks have one order on both.
        hosts: Names of hosts in the order of ranks for which the routes were searched; nothing if none were named.
    """

    stages: int
    replicas: int
    micro_batches: int
    held: int
    paths: Mapping[MicroBatch, tuple[Place, ...]]
    order: tuple[Visit, ...]
    hosts: tuple[str, ...] = ()

    @property
    def fraction(self) -> float:
        """Share of all pairs of a stage and a micro-batch that are skipped."""
        return 1 - sum(map(len, self.paths.values())) / (self.stages * len(self.paths))

    @property
    def swaps(self) -> int:
        """Number of visits of a stage behind one that the micro-batch has visited, of all micro-batches."""
        return sum(map(_swaps, self.paths.values()))

    @property
    def crossings(self) -> int:
        """Number of messages between replicas, one way."""
        return sum(one.replica != other.replica for path in self.paths.values() for one, other in itertools.pairwise(path))

    @property
    def messages(self) -> int:
        """Number of messages of a step: activations, and as many gradients."""
        return 2 * sum(len(path) - 1 for path in self.paths.values())

    def actions(self, place: Place) -> list[Action]:
        """What the rank at a place does in a step, in its order."""
        found = []
        for visit in self.order:
            path = self.paths[visit.micro_batch]
            after = visit.hop + (-1 if visit.is_backward else 1)
            here, peer = path[visit.hop], path[after] if 0 <= after < len(path) else None
            if place == here:
                found.append(Action("pass", visit, None))
                if peer is not None:
                    found.append(Action("send", visit, peer))
            elif place == peer:
                found.append(Action("receive", visit, here))
        return found

    def check(self) -> None:
        """Refuses routes that are not those of whole steps within the paper's bounds, or whose passes could wait for ever.

        Raises:
            PierConfigError: With what is wrong.
        """
        within = all(key.replica < self.replicas and key.number < self.micro_batches for key in self.paths)
        if not within or len(self.paths) != self.replicas * self.micro_batches or not self.paths:
            raise PierConfigError(
                f"routes: {len(self.paths)} micro-batches have one, of {self.replicas} replicas x {self.micro_batches} "
                f"micro-batches = {self.replicas * self.micro_batches}"
            )
        for micro_batch, path in self.paths.items():
            wrong = _trouble(path, micro_batch, self.stages, self.replicas)
            if wrong:
                raise PierConfigError(
                    f"routes: micro-batch {micro_batch.number} of replica {micro_batch.replica} goes through "
                    f"{', '.join(f'{stage} of {replica}' for stage, replica in path)} (stages of replicas): {wrong}"
                )
        visits = Counter(place for path in self.paths.values() for place in path)
        idle = [Place(stage, replica) for stage in range(self.stages) for replica in range(self.replicas)]
        idle = [place for place in idle if not visits[place]]
        if idle:
            raise PierConfigError(
                f"routes: no micro-batch visits stage {idle[0].stage} of replica {idle[0].replica}, whose rank would have no "
                "gradients to reduce"
            )
        by_stage = [sum(visits[Place(stage, replica)] for replica in range(self.replicas)) for stage in range(self.stages)]
        if len(by_stage) > 2 and max(by_stage[1:-1]) - min(by_stage[1:-1]) > 1:
            raise PierConfigError(f"routes: stages are visited {by_stage} times; the inner ones must be within one visit")
        self._check_order()

    def _check_order(self) -> None:
        remaining = {micro_batch: passes(path, micro_batch) for micro_batch, path in self.paths.items()}
        held, most = defaultdict[Place, set[MicroBatch]](set), 0
        for visit in self.order:
            expected = next(remaining.get(visit.micro_batch, iter(())), None)
            if visit != expected:
                raise PierConfigError(f"routes: the order has {visit}, where {expected} comes next on its route")
            keeps = held[self.paths[visit.micro_batch][visit.hop]]
            (keeps.discard if visit.is_backward else keeps.add)(visit.micro_batch)
            most = max(most, len(keeps))
        for micro_batch, rest in remaining.items():
            missing = next(rest, None)
            if missing is not None:
                raise PierConfigError(f"routes: the order lacks {missing} of {micro_batch}")
        if most != self.held:
            raise PierConfigError(f"routes: a rank keeps {most} micro-batches at once, where held says {self.held}")

    def text(self) -> str:
        """The routes as a file."""
        content = {
            "format": FORMAT,
            "stages": self.stages,
            "replicas": self.replicas,
            "micro_batches": self.micro_batches,
            "held": self.held,
            "hosts": self.hosts,
            # A place is [stage, replica]; a pass is [replica, micro-batch], the next one on its way there and back.
            "routes": [
                [self.paths[MicroBatch(replica, index)] for index in range(self.micro_batches)]
                for replica in range(self.replicas)
            ],
            "order": [visit.micro_batch for visit in self.order],
        }
        return json.dumps(content, separators=(",", ":")) + "\n"

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Reads what :meth:`text` has made, and checks it.

        Raises:
            PierConfigError: If it is something else.
        """
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise PierConfigError(f"routes: format {content['format']}, and this release reads {FORMAT}")
            paths = {
                MicroBatch(replica, number): tuple(Place(_whole(stage), _whole(of)) for stage, of in path)
                for replica, paths_of_replica in enumerate(content["routes"])
                for number, path in enumerate(paths_of_replica)
            }
            rest = {micro_batch: passes(path, micro_batch) for micro_batch, path in paths.items()}
            order = tuple(next(rest[MicroBatch(_whole(replica), _whole(number))], None) for replica, number in content["order"])
            sizes = {name: _whole(content[name]) for name in ("stages", "replicas", "micro_batches", "held")}
            if not isinstance(content["hosts"], list):
                raise TypeError("hosts must be a list")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PierConfigError(f"routes: no file of routes: {type(error).__name__}: {error}") from error
        whole = tuple(visit for visit in order if visit is not None)
        if len(whole) < len(order):
            raise PierConfigError("routes: the order has passes of a micro-batch that has taken all of its own")
        found = cls(**sizes, paths=paths, order=whole, hosts=tuple(map(str, content["hosts"])))
        found.check()
        return found


def _whole(value: object) -> int:
    """A number of a file, not negative.

    Raises:
        TypeError: If it is none.
    """
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no whole number")
    return value


def passes(path: Sequence[Place], micro_batch: MicroBatch) -> Iterator[Visit]:
    """The passes of a micro-batch on its route: forward ones there, backward ones back."""
    hops = range(len(path))
    yield from (Visit(False, micro_batch, hop) for hop in hops)
    yield from (Visit(True, micro_batch, hop) for hop in reversed(hops))


def _swaps(path: Sequence[Place]) -> int:
    farthest, found = -1, 0
    for stage, _ in path:
        found += stage < farthest
        farthest = max(farthest, stage)
    return found


def _trouble(path: Sequence[Place], micro_batch: MicroBatch, stages: int, replicas: int) -> str | None:
    """What is wrong with a route, if something is."""
    own = micro_batch.replica
    if len(path) < 2 or path[0] != Place(0, own) or path[-1] != Place(stages - 1, own):
        return f"it must begin at stage 0 and end at stage {stages - 1} of its own replica, which reads its data"
    if any(not (0 <= stage < stages and 0 <= replica < replicas) for stage, replica in path):
        return f"there are {stages} stages and {replicas} replicas"
    if len({stage for stage, _ in path}) < len(path):
        return "a stage comes twice"
    return bounds(path)


def bounds(path: Sequence[Place]) -> str | None:
    """Which of the paper's bounds a route breaks, if it breaks one."""
    farthest = 0
    for stage, _ in path:
        if stage < farthest - 1:
            return f"stage {stage} comes after stage {farthest}, and a swap may go one stage back"
        if stage > farthest + FARTHEST:
            return f"stage {stage} is more than {FARTHEST} beyond stage {farthest}"
        farthest = max(farthest, stage)
    if _swaps(path) > MOST_SWAPS:
        return f"it has {_swaps(path)} swaps, and may have {MOST_SWAPS}"
    return None


def plain(stages: int, replicas: int, micro_batches: int) -> dict[MicroBatch, tuple[Place, ...]]:
    """The routes of a pipeline that skips nothing: each micro-batch through all stages of its own replica."""
    return {
        MicroBatch(replica, index): tuple(Place(stage, replica) for stage in range(stages))
        for replica in range(replicas)
        for index in range(micro_batches)
    }
