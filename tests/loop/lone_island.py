"""An island of one rank, without a loop: ``lone_island.py INDEX LIGHTHOUSE ADDRESS HALTS_AT FOLDER``.

It sums a vector in each meeting, and writes down who has. In one of its meetings it may halt, connected with the others.
"""

import datetime
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.membership import Membership, Outcome

ISLANDS, TIMEOUT_SECONDS = 3, 300


def main() -> None:
    index, lighthouse, address, halts_at = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    folder = Path(sys.argv[5])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world, timeout = dist.group.WORLD, datetime.timedelta(seconds=TIMEOUT_SECONDS)
    assert world is not None
    membership = Membership(index, lighthouse, address, world, CODECS["int8"], timeout, {}, ISLANDS)
    agreed = 0
    while True:
        exchange, outcome = None, Outcome.SUCCEEDED
        try:
            exchange = membership.meet(timeout)
            if agreed == halts_at:
                (folder / "halts").touch()
                time.sleep(2 * TIMEOUT_SECONDS)
            under_way = exchange.sum([torch.ones(100_000)])
            under_way.advance()
            under_way.finish()
        except RuntimeError:
            outcome = Outcome.FAILED
        if membership.agree(exchange, outcome) == Outcome.SUCCEEDED:
            assert exchange is not None
            agreed += len(exchange.groups) == ISLANDS
            with (folder / f"agreed-{index}").open("a") as file:
                file.write("".join(map(str, exchange.groups)) + "\n")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
