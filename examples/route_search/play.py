"""Plays a step on unequal ranks and links, with routes: each rank takes passes that are ready, backward passes first.

Real ranks will take their passes in the order of the simulated ones.
"""

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pier_megatron.experiments.skipping.pipeline.routes import MicroBatch, Place, Visit


class Link(NamedTuple):
    """One message at a time in each direction.

    Attributes:
        busy: Seconds that a message occupies it.
        latency: Seconds until it has arrived after that.
    """

    busy: float
    latency: float = 0.0


@dataclasses.dataclass(frozen=True)
class Grid:
    """Ranks that compute, at the places of a pipeline, and what lies between them.

    Attributes:
        devices: What computes, by stage and replica. Stages may have unequal numbers of replicas, and a device several stages:
            it takes one pass at a time.
        forward: Seconds of a forward pass through each stage on a host of speed 1.
        backward: Seconds of a backward pass, likewise.
        hosts: Host on which a device is.
        speeds: Relative speeds of hosts.
        links: Links from a host to another, or within one.
    """

    devices: tuple[tuple[int, ...], ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hosts: tuple[int, ...]
    speeds: tuple[float, ...]
    links: Sequence[Sequence[Link]]

    def device(self, place: Place) -> int:
        """What computes at a place."""
        return self.devices[place.stage][place.replica]

    def seconds(self, place: Place, is_backward: bool) -> float:
        """Seconds of a pass at a place."""
        return (self.backward if is_backward else self.forward)[place.stage] / self.speeds[self.hosts[self.device(place)]]

    def link(self, one: Place, other: Place) -> Link:
        """The link from a place to another."""
        return self.links[self.hosts[self.device(one)]][self.hosts[self.device(other)]]

    def alone(self, path: Sequence[Place]) -> float:
        """Seconds that a micro-batch would take there and back if it met no other."""
        passes = sum(self.seconds(place, way) for place in path for way in (False, True))
        hops = itertools.pairwise(path)
        return passes + sum(sum(self.link(one, other)) + sum(self.link(other, one)) for one, other in hops)


class Played(NamedTuple):
    """A simulated step.

    Attributes:
        seconds: Time at which the last pass has ended; infinite if ranks with full memory wait for each other for ever.
        order: All passes by the time at which they began.
        held: Micro-batches at most whose activations a device kept.
    """

    seconds: float
    order: tuple[Visit, ...]
    held: int


def play(grid: Grid, paths: Mapping[MicroBatch, Sequence[Place]], most_held: int) -> Played:
    """Simulates a step.

    Args:
        grid: Ranks and links.
        paths: Routes, of micro-batches in the order in which they shall begin.
        most_held: Micro-batches whose activations a device may keep at once.
    """
    rank_of = {micro_batch: index for index, micro_batch in enumerate(paths)}
    # By device: what could begin, what it keeps activations of and since which hop, and whether it computes.
    ready: list[list[tuple[bool, int, Visit]]] = [[] for _ in grid.hosts]
    kept: list[dict[MicroBatch, int]] = [{} for _ in grid.hosts]
    computes = [False] * len(grid.hosts)
    free: dict[tuple[int, int], float] = {}
    order: list[Visit] = []
    held, clock = 0, 0.0
    events: list[tuple[float, int, Visit, bool]] = []
    count = itertools.count()

    def arrive(visit: Visit) -> int:
        device = grid.device(paths[visit.micro_batch][visit.hop])
        bisect.insort(ready[device], (not visit.is_backward, rank_of[visit.micro_batch], visit))
        return device

    def begin(device: int) -> None:
        nonlocal held
        if computes[device]:
            return
        is_full = len(kept[device]) >= most_held
        entry = next(
            (entry for entry in ready[device] if entry[2].is_backward or not is_full or entry[2].micro_batch in kept[device]),
            None,
        )
        if entry is None:
            return
        ready[device].remove(entry)
        visit = entry[2]
        if not visit.is_backward:
            kept[device].setdefault(visit.micro_batch, visit.hop)
            held = max(held, len(kept[device]))
        computes[device] = True
        order.append(visit)
        place = paths[visit.micro_batch][visit.hop]
        heapq.heappush(events, (clock + grid.seconds(place, visit.is_backward), next(count), visit, True))

    for micro_batch in paths:
        arrive(Visit(False, micro_batch, 0))
    for device in range(len(grid.hosts)):
        begin(device)
    while events:
        clock, _, visit, has_ended = heapq.heappop(events)
        if not has_ended:
            begin(arrive(visit))
            continue
        path = paths[visit.micro_batch]
        device = grid.device(path[visit.hop])
        computes[device] = False
        if visit.is_backward and kept[device].get(visit.micro_batch) == visit.hop:
            del kept[device][visit.micro_batch]
        after = visit.hop + (-1 if visit.is_backward else 1)
        if after == len(path):
            arrive(Visit(True, visit.micro_batch, visit.hop))
        elif after >= 0:
            link = grid.link(path[visit.hop], path[after])
            pair = device, grid.device(path[after])
            free[pair] = max(clock, free.get(pair, 0.0)) + link.busy
            heapq.heappush(
                events, (free[pair] + link.latency, next(count), Visit(visit.is_backward, visit.micro_batch, after), False)
            )
        begin(device)
    is_whole = len(order) == 2 * sum(map(len, paths.values()))
    return Played(clock if is_whole else math.inf, tuple(order), held)
