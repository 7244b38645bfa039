"""Small grids of ranks, and routes through them."""

import dataclasses

from route_search.play import Grid, Link, play
from route_search.search import Wishes, search

from pier_megatron.experiments.skipping.pipeline.routes import Routes, plain


def even(stages: int, replicas: int, busy: float = 0.0, latency: float = 0.0) -> Grid:
    """Equal ranks, each on a host of its own, and equal links."""
    devices = tuple(tuple(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages))
    count = stages * replicas
    links = [[Link(busy, latency)] * count] * count
    return Grid(devices, (1.0,) * stages, (2.0,) * stages, tuple(range(count)), (1.0,) * count, links)


def uneven(stages: int, replicas: int) -> Grid:
    """Every third rank half as fast, and links from none to slow: what is searched for it crosses replicas and swaps."""
    hosts = range(stages * replicas)
    links = [[Link(0.5 * ((one + other) % 4), 0.1) for other in hosts] for one in hosts]
    return dataclasses.replace(even(stages, replicas), speeds=tuple(1.0 if host % 3 else 0.5 for host in hosts), links=links)


def whole(stages: int, replicas: int, micro_batches: int) -> Routes:
    """Routes that skip nothing."""
    paths = plain(stages, replicas, micro_batches)
    played = play(even(stages, replicas), paths, stages)
    return Routes(stages, replicas, micro_batches, played.held, paths, played.order)


def searched(stages: int, replicas: int, micro_batches: int, fraction: float) -> Routes:
    """Routes that were searched for an uneven grid."""
    found = search(uneven(stages, replicas), micro_batches, [range(replicas)], Wishes(fraction, stages))
    return Routes(stages, replicas, micro_batches, found.played.held, found.paths, found.played.order)
