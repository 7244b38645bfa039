"""One of two ranks: ``rank.py JOB FILE``, started by ``two_ranks.py``. It answers with JSON in FILE."""

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import device_memory
import limits
import one_gpu
import torch
import torch.distributed as dist
from measuring import is_gpu, matrix_products

from pier_megatron import PierConfig
from pier_megatron.outer import GroupExchange, OuterLoop, Shards


def _loop(parameters: int, **settings: Any) -> OuterLoop:
    config = PierConfig(train_iters=10**9, groups=2, lazy_start_iters=0, **settings)
    shards = Shards([torch.zeros(parameters // 50, device=one_gpu.device()) for _ in range(50)])
    return OuterLoop([[shards]], config, GroupExchange(dist.group.WORLD, config.codec))


def overlap() -> dict[str, float]:
    """Mean seconds of an iteration of matrix products, by what is exchanged during them."""
    interval, overlapped, intervals, parameters = (40, 30, 3, 50_000_000) if is_gpu() else (8, 6, 2, 200_000)
    work = matrix_products(0.02 if is_gpu() else 0.005)
    kinds: dict[str, dict[str, Any]] = {
        # A loop with the same calls, whose outer step never comes.
        "no exchange": {"sync_interval": 10**6},
        "waited for": {"sync_interval": interval},
        f"overlapped by {overlapped} of {interval}": {"sync_interval": interval, "overlap": overlapped},
        "int8, waited for": {"sync_interval": interval, "exchange_dtype": "int8"},
        f"int8, overlapped by {overlapped}": {"sync_interval": interval, "overlap": overlapped, "exchange_dtype": "int8"},
    }
    found = {}
    for name, settings in kinds.items():
        loop = _loop(parameters, **settings)

        def train(iterations: int, loop: OuterLoop = loop) -> None:
            for _ in range(iterations):
                loop.begin_iteration(loop.iteration + 1)
                work()
                loop.end_iteration()
            one_gpu.synchronize()

        train(interval + interval // 2)
        dist.barrier()
        begin = time.perf_counter()
        train(intervals * interval)
        dist.barrier()
        found[name] = (time.perf_counter() - begin) / (intervals * interval)
    return found


def memory() -> dict[str, tuple[int, int]]:
    """Bytes that an outer loop took at once and those of the start-up block, by its settings."""
    numel = 64_000_000 if is_gpu() else 4_000_000
    found = {}
    for dtype in ("fp32", "bf16", "int8", "int4"):
        for overlapped in (0, 2):
            for offload in (False, True):
                settings = {"exchange_dtype": dtype, "overlap": overlapped, "offload": offload}
                chunk_mib = 16 if is_gpu() else 1
                config = PierConfig(
                    train_iters=10**9, groups=2, sync_interval=4, lazy_start_iters=0, chunk_mib=chunk_mib, **settings
                )
                name = f"{dtype}, overlap {overlapped}, {'offloaded' if offload else 'on the device'}"
                found[name] = device_memory.used_and_said(config, GroupExchange(dist.group.WORLD, config.codec), numel)
    return found


def killed() -> None:
    """Trains until the other rank kills itself, which it does between two outer steps."""
    loop = _loop(1_000_000, sync_interval=5)
    for iteration in range(1, 1000):
        if iteration == 13 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        loop.skip_iteration()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    one_gpu.become_rank(rank)
    # Time that a collective waits for a killed rank, before both are ended.
    dist.init_process_group(one_gpu.backend(), timeout=datetime.timedelta(seconds=min(limits.left() / 3, 45)))
    answer = {"overlap": overlap, "memory": memory, "killed": killed}[sys.argv[1]]()
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
