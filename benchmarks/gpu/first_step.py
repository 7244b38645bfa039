"""Outer steps of 7B-shaped shards between two ranks, in four modes: the first thing to run where a GPU is at hand.

``python benchmarks/gpu/first_step.py [--parameters N] [--device cuda|cpu]``. Each rank has a quarter of 7B parameters, in FP32:
groups of four ranks. Blocking and overlapped, on the device and offloaded. Each mode has its own processes: if one does not
fit, the others still run. Times between two ranks on one GPU say nothing about a network.
"""

import argparse
import datetime
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("", "tools", "benchmarks/gpu")]

import limits
import one_gpu
import torch
import torch.distributed as dist
from measuring import is_gpu, matrix_products
from table import Row, checked

from pier_megatron import PierConfig
from pier_megatron.outer import GroupExchange, OuterLoop, Shards

PARAMETERS = 1_750_000_000
_PARAMETERS_ON_CPU = 2_000_000
_RANKS, _INTERVAL, _OVERLAP = 2, 6, 4
MODES = {
    f"{exchange}, {where}": {"overlap": overlap, "offload": offload}
    for exchange, overlap in (("blocking", 0), ("overlapped", _OVERLAP))
    for where, offload in (("on the device", False), ("offloaded", True))
}


def shards(parameters: int) -> list[torch.Tensor]:
    """Zeros in the shapes of a rank of a 7B model: two embeddings of 2 % each, and 32 layers of four matrices and two norms."""
    sizes = [parameters // 50] * 2
    matrices = (parameters - sum(sizes)) // 32
    sizes += [size for _ in range(32) for size in (*(matrices * part // 12 for part in (3, 1, 4, 4)), 4, 4)]
    return [torch.zeros(size, device=one_gpu.device()) for size in sizes]


def measured(mode: str, parameters: int) -> dict[str, float]:
    """Two outer steps in this process, which is one of two ranks."""
    work, of_rank = matrix_products(0.25 if is_gpu() else 0.02), shards(parameters)
    config = PierConfig(10**9, groups=_RANKS, sync_interval=_INTERVAL, lazy_start_iters=0, **MODES[mode])
    begin = time.perf_counter()
    loop = OuterLoop([[Shards(of_rank)]], config, GroupExchange(dist.group.WORLD, config.codec))
    one_gpu.synchronize()
    found = {"parameters": sum(shard.numel() for shard in of_rank), "seconds to build": time.perf_counter() - begin}

    def seconds_of(iterations: int) -> float:
        one_gpu.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(iterations):
            loop.begin_iteration(loop.iteration + 1)
            work()
            torch._foreach_sub_(of_rank, 0.01 * (dist.get_rank() + 1))
            loop.end_iteration()
        one_gpu.synchronize()
        return time.perf_counter() - begin

    seconds_of(1)
    found["seconds of an iteration"] = alone = seconds_of(_INTERVAL - 2) / (_INTERVAL - 2)
    taken = config.overlap + 1
    for which in ("first", "second"):
        found[f"exposed seconds of the {which} step"] = seconds_of(taken) - taken * alone
        if which == "first":
            seconds_of(_INTERVAL - taken)
    found["seconds of the same bytes alone on the wire"] = _seconds_of_the_wire(found["parameters"])
    found["GB of the device"] = torch.cuda.max_memory_allocated() / 1e9 if is_gpu() else 0.0
    found["GB of the host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    # Offloaded state is written after the step.
    loop.snapshot()
    anchor = torch.stack([torch.stack(state.anchor.aminmax()) for state in loop.states]).to(one_gpu.device())
    lowest, highest = anchor.amin(), anchor.amax()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    # All parameters move alike.
    return found | {"anchor at least": lowest.item(), "anchor at most": highest.item()}


def _seconds_of_the_wire(parameters: float) -> float:
    """What the collectives of an outer step take by themselves: the sum of all parameters, in chunks, and nothing else."""
    chunk = torch.zeros(4 * 2**20, device=one_gpu.device())
    one_gpu.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(round(parameters / len(chunk)) or 1):
        dist.all_reduce(chunk)
    one_gpu.synchronize()
    return time.perf_counter() - begin


def rows(parameters: int | None = None, modes: Sequence[str] = tuple(MODES)) -> Iterator[Row]:
    """A row for each mode."""
    numel = parameters or (PARAMETERS if is_gpu() else _PARAMETERS_ON_CPU)
    for place, mode in enumerate(modes):
        seconds = limits.share(limits.left(), [1.0] * (len(modes) - place))
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            command = [sys.executable, __file__, "--parameters", str(numel), "--rank-of", mode, str(answer)]
            try:
                one_gpu.run(command, _RANKS, Path(folder), seconds, **limits.environment(seconds))
            except one_gpu.RanksFailedError as error:
                yield Row(mode, "", "failed", str(error))
                continue
            found = json.loads(answer.read_text())
        result = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
        is_right = found["anchor at least"] == found["anchor at most"] < 0
        yield checked(mode, is_right, result, "parameters that move alike have different anchors")


def main() -> int:
    """Measures and prints, or is one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, help=f"FP32 parameters of each rank; {PARAMETERS:,}, few on a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="device; by default cuda where there is one")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="between ranks; by default what answers, NCCL first")
    parser.add_argument("--mode", choices=list(MODES), action="append", help="run this one; all by default")
    parser.add_argument("--rank-of", nargs=2, metavar=("MODE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        mode, answer = options.rank_of
        one_gpu.become_rank(int(os.environ["RANK"]))
        dist.init_process_group(one_gpu.backend(), timeout=datetime.timedelta(seconds=limits.left()))
        found = measured(mode, options.parameters)
        if dist.get_rank() == 0:
            Path(answer).write_text(json.dumps(found))
        dist.destroy_process_group()
        return 0
    print(f"Device and backend: {one_gpu.choose(options.device, options.backend)}", flush=True)
    failed = False
    for row in rows(options.parameters, options.mode or list(MODES)):
        print(f"{row.status:8} {row.what}: {row.result}{row.why}", flush=True)
        failed |= row.status == "failed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
