"""Starts the ranks of trainings as forks of one process, which imports once what would take each of them many seconds."""

import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Callable

# Below what Linux gives to connections by default: one of those could take the port before rank 0 does.
_PORTS = range(16_384, 32_768)


def run(world_size: int, rank_main: Callable[[], None]) -> None:
    """Runs a function in every rank, in the environment that torchrun would give it.

    Args:
        world_size: Number of ranks, all on this machine.
        rank_main: What each of them does before its process ends.

    Raises:
        SystemExit: In a rank, at its end.
        RuntimeError: In the calling process if a rank failed, after the others were killed.
    """
    port = free_port()
    ranks = {}
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": rank}
            os.environ |= {name: str(value) for name, value in sizes.items()}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            # The store is the parent's, as torchrun's agent has it.
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            rank_main()
            sys.exit()
        ranks[child] = rank
    import torch.distributed as dist

    # After the forks: its threads are none of theirs.
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    assert store is not None
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            raise RuntimeError(f"Rank {rank} failed with status {os.waitstatus_to_exitcode(status)}.")


def free_port() -> int:
    """A port on which nothing listens, and which no connection is given by default."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port
