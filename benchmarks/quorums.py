"""Quorums of up to 1,000 elastic islands at the real lighthouse: ``python benchmarks/quorums.py [--islands 10 100 1000]``.

An island here is the first rank of a job: torchft's manager with its heartbeat, the client that asks for a quorum, and the port
where other islands ask who it is. All islands share the cores of this machine, so seconds are upper bounds for islands on
separate machines. Nothing trains, and no communicator is made.
"""

import argparse
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import date, timedelta
from typing import Any

from pier_megatron.exchange import torchft_api
from pier_megatron.exchange.authentication import answer_peers, ask

_ADDRESS, _PATIENCE = "127.0.0.1", timedelta(seconds=120)

# A description of a run as long as Megatron's: about 400 arguments.
_RUN = {f"--argument-{number}": number for number in range(400)}


class Island:
    """What the first rank of an island runs."""

    def __init__(self, index: int, lighthouse: str, secret: bytes) -> None:
        """Announces itself, as ``Membership`` does."""
        said = {"is_new": False, "run": _RUN, "store": "127.0.0.1:0"}
        self.name = answer_peers(index, _ADDRESS, secret, lambda: said)
        coordination = torchft_api.torchft("coordination")
        self.server = coordination.ManagerServer(
            replica_id=self.name,
            lighthouse_addr=lighthouse,
            hostname=_ADDRESS,
            bind=f"{_ADDRESS}:0",
            store_addr=f"{_ADDRESS}:0",
            world_size=1,
            heartbeat_interval=torchft_api.HEARTBEAT,
            connect_timeout=_PATIENCE,
            quorum_retries=torchft_api.RETRIES,
        )
        self._client = coordination.ManagerClient(self.server.address(), connect_timeout=_PATIENCE)

    def quorum(self) -> Sequence[str]:
        """Asks for a quorum; returns the names of the islands in it."""
        found: Any = self._client._quorum(
            group_rank=0,
            step=time.time_ns(),
            checkpoint_metadata="",
            shrink_only=False,
            timeout=_PATIENCE,
            commit_failures=0,
            init_sync=False,
        )
        names: Sequence[str] = found.replica_ids
        return names


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--islands", type=int, nargs="+", default=[10, 100, 1000], help="(%(default)s)")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _measure(options.one)
        return
    print(f"`python {' '.join(sys.argv)}`, {date.today().isoformat()}\n")
    print(
        "| islands | start, s | first quorum, s | the next ones, s | without one that died, s | one asks all who they are, s |"
    )
    print("|---" * 6 + "|", flush=True)
    for number in options.islands:
        # A process of its own: what managers have left behind would slow down the next ones.
        process = subprocess.run(
            [sys.executable, __file__, "--one", str(number)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        print(process.stdout.strip() or f"| {number:,} | ended with {process.returncode} |", flush=True)


def _measure(number: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    command = [sys.executable, "-m", "pier_megatron.cli", "lighthouse", "--islands", str(number), "--port", "0"]
    lighthouse = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert lighthouse.stdout is not None
    address = lighthouse.stdout.readline().split()[1].rstrip(":")
    secret = secrets.token_bytes(32)
    torchft_api.keep_quiet(number)
    try:
        with futures.ThreadPoolExecutor(number) as pool:
            starts, islands = _seconds(lambda: list(pool.map(lambda i: Island(i, address, secret), range(number))))
            print(f"| {number:,} | {starts:.1f} |", end="", flush=True)
            first = _of_all(pool, islands)
            print(f" {first:.2f} |", end="", flush=True)
            later = min(_of_all(pool, islands) for _ in range(3))
            print(f" {later:.2f} |", end="", flush=True)
            *left, dead = islands
            dead.server.shutdown()
            print(f" {_of_all(pool, left):.2f} |", end="", flush=True)
        seconds, answers = _seconds(lambda: ask([island.name for island in left], secret, 600))
        assert len(left) == sum(answer is not None for answer in answers.values())
        print(f" {seconds:.2f} |", flush=True)
    finally:
        lighthouse.terminate()
    # The managers' threads would outlast the end of the interpreter.
    os._exit(0)


def _of_all(pool: futures.Executor, islands: Sequence[Island]) -> float:
    """Seconds until all islands have the same quorum of all."""
    seconds, found = _seconds(lambda: list(pool.map(lambda island: island.quorum(), islands)))
    assert all(sorted(names) == sorted(island.name for island in islands) for names in found), sorted(map(len, found))
    return seconds


def _seconds[R](function: Callable[[], R]) -> tuple[float, R]:
    begun = time.monotonic()
    result = function()
    return time.monotonic() - begun, result


if __name__ == "__main__":
    main()
