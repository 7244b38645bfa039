"""The processes of the test of islands' communicators: ``python communicator_worker.py DIRECTORY``. No Megatron, no torchft."""

import contextlib
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import forked_ranks
import one_gpu
import torch
import torch.distributed as dist
from exchange_worker import DEVICE, vector

from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.communicator import Communicator, connect

ISLANDS, DEAD = 3, 2
COMPARED = ("fp32", "int8")
TIMEOUT_SECONDS = 300

_WAITS: dict[str, Callable[[GroupExchange], object]] = {
    "sum": lambda exchange: _sum(exchange, vector(exchange.rank)),
    "gathering": lambda exchange: exchange.gather(torch.ones(1, device=DEVICE)).result().tolist(),
    "broadcast": lambda exchange: exchange.broadcast(torch.ones(1, device=DEVICE), DEAD, [0, 1]),
}


def _sum(exchange: GroupExchange, values: torch.Tensor) -> torch.Tensor:
    under_way = exchange.sum([values])
    under_way.advance()
    under_way.finish()
    return values


class _Island:
    def __init__(self, rank: int, store: dist.Store, port: int) -> None:
        self._rank, self._store, self._port, self._begun = rank, store, port, 0
        self.communicator = Communicator(
            dist.PrefixStore(f"of island {rank}", store), datetime.timedelta(seconds=TIMEOUT_SECONDS)
        )
        self.silent: str | None = None

    def begin(self, codec: str = "fp32") -> GroupExchange:
        self._begun += 1
        timeout, name = datetime.timedelta(seconds=TIMEOUT_SECONDS), str(self._begun)
        place, store = (self._rank, ISLANDS), ("127.0.0.1", self._port)
        group = self.communicator.begin(name, lambda: self.silent, lambda: connect(store, name, place, "127.0.0.1", timeout))
        return GroupExchange(group, CODECS[codec])

    def end(self) -> None:
        """Ends an exchange and its connection, after the others have its result."""
        key = f"results/{self._begun}"
        self._store.add(key, 1)
        while self._store.add(key, 0) < ISLANDS:
            time.sleep(0.01)
        self.communicator.close()

    def collectives(self, codec: str) -> dict[str, torch.Tensor]:
        """Each of them over the same connection, twice."""
        exchange, found = self.begin(codec), {}
        for _ in range(2):
            found["sum"] = _sum(exchange, vector(self._rank)).cpu()
            found["gathered"] = exchange.gather(torch.tensor([7, self._rank], device=DEVICE)).result().cpu()
            handed = torch.full((3,), float(self._rank), device=DEVICE)
            exchange.broadcast(handed, 1, [DEAD])
            found["handed"] = handed.cpu()
        self.end()
        return found

    def seconds_until_interrupted(self, wait: Callable[[GroupExchange], object], codec: str) -> float:
        """How long this island waits for one that is silent, which the first one hears of."""
        exchange = self.begin(codec)
        begin = time.monotonic()
        if self._rank == DEAD:
            # Connected, and silent; it is here until the others have continued.
            return self._leave_after_the_others(0.0)
        if self._rank == 0:
            threading.Timer(1.0, setattr, (self, "silent", "silent")).start()
        with contextlib.suppress(RuntimeError):
            wait(exchange)
            raise AssertionError("nothing to wait for")
        seconds = time.monotonic() - begin
        assert self.silent or self._rank, "interrupted before it has heard of anything"
        self.communicator.leave(str(self._begun))
        self.silent = None
        return self._leave_after_the_others(seconds)

    def _leave_after_the_others(self, seconds: float) -> float:
        key = f"interrupted/{self._begun}"
        self._store.add(key, int(self._rank != DEAD))
        while self._store.add(key, 0) < ISLANDS - 1:
            time.sleep(0.05)
        self.communicator.close()
        return seconds


def main() -> None:
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    one_gpu.become_rank(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    island = _Island(rank, store, port)
    record = {
        "collectives": {codec: island.collectives(codec) for codec in COMPARED},
        "seconds": {
            (name, codec): island.seconds_until_interrupted(wait, codec)
            for name, wait in _WAITS.items()
            for codec in (COMPARED if name == "sum" else COMPARED[:1])
        },
    }
    torch.save(record, Path(sys.argv[1]) / f"communicator-{rank}.pt")
    store.add("ends", 1)
    while rank == 0 and store.add("ends", 0) < ISLANDS:
        time.sleep(0.01)


if __name__ == "__main__":
    forked_ranks.run(ISLANDS, main)
