"""One group of ``benchmarks/rounds.py``: the real outer loop around iterations that sleep.

``python rounds_worker.py SPECIFICATION GROUP LOG``: a JSON object, see :class:`rounds.Training`. Writes a line of JSON when it
asks to join and one for each outer step that it counts in.
"""

import datetime
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pier_megatron import PierConfig
from pier_megatron.exchange.membership import Membership
from pier_megatron.outer import GroupExchange, OuterLoop, Shards
from pier_megatron.outer.elastic import ElasticMembership


def main() -> None:
    """Trains until it is killed, or has taken the iterations that it was told."""
    specification, group = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    with Path(sys.argv[3]).open("a", buffering=1) as log:
        _train(specification, group, lambda **entry: log.write(json.dumps(entry | {"at": time.time()}) + "\n"))


def _train(specification: dict[str, Any], group: int, note: Callable[..., None]) -> None:
    config = PierConfig(
        groups=specification["groups"],
        train_iters=specification["iterations"],
        sync_interval=specification["interval"],
        preset=specification["preset"],
        overlap=specification["overlap"],
        exchange_dtype=specification["dtype"],
        lazy_start_iters=0,
    )
    loop = _loop(specification, config, group, note)
    interval, trained, begun = config.sync_interval, 0, time.monotonic()
    # Another process of this group draws other times.
    chance = random.Random(time.time_ns())
    while loop.iteration < config.train_iters:
        ends = time.monotonic() + _drawn(specification["seconds"][group], specification["jitter"], chance)
        loop.begin_iteration(loop.iteration + 1)
        time.sleep(max(ends - time.monotonic(), 0.0))
        trained += 1
        loop.end_iteration()
        rests = specification["rest_after"] is not None and time.monotonic() - begun >= specification["rest_after"]
        while rests and loop.iteration % interval and loop.iteration % interval < interval - 1:
            # As integration/resting.py does.
            loop.skip_iteration()
        if loop.iteration % interval == 0:
            note(iteration=loop.iteration, trained=trained)
            trained, begun = 0, time.monotonic()
    # Threads of gloo that are still there would end the process with an error.
    os._exit(0)


def _loop(specification: dict[str, Any], config: PierConfig, group: int, note: Callable[..., None]) -> OuterLoop:
    parameters = [torch.zeros(specification["parameters"])]
    if specification["lighthouse"] is None:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        return OuterLoop([[Shards(parameters)]], config, GroupExchange(dist.group.WORLD, config.codec))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    timeout = datetime.timedelta(seconds=config.island_timeout)
    membership = Membership(
        group, specification["lighthouse"], "127.0.0.1", dist.group.WORLD, config.codec, timeout, {}, config.groups
    )
    islands = ElasticMembership(membership, group, 60 * config.island_wait)
    loop = OuterLoop([[Shards(parameters)]], config, GroupExchange(None, config.codec), islands=islands)
    note(asks=True)
    loop.join()
    return loop


def _drawn(mean: float, jitter: float, chance: random.Random) -> float:
    return chance.gammavariate(1 / jitter**2, mean * jitter**2) if jitter else mean


if __name__ == "__main__":
    main()
