"""How long something takes on the device, and how many kernels it starts."""

import statistics
import time
from collections.abc import Callable

import one_gpu
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")


def is_gpu() -> bool:
    """Whether the device is a GPU; sizes depend on it."""
    return one_gpu.device().type == "cuda"


def median_seconds(run: Callable[[], object], prepare: Callable[[], object] = lambda: None, repetitions: int = 7) -> float:
    """Times something, after one time that does not count; ``prepare`` comes before each time and does not count either."""
    seconds = []
    for _ in range(repetitions + 1):
        prepare()
        one_gpu.synchronize()
        begin = time.perf_counter()
        run()
        one_gpu.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def launches(run: Callable[[], object]) -> int:
    """Kernels, copies and fills that are put on the GPU; on the CPU, operators that call no others."""
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu() else [])]) as profiled:
        run()
        one_gpu.synchronize()
    if is_gpu():
        return sum(entry.count for entry in profiled.key_averages() if entry.key.startswith(_LAUNCHES))
    return sum(event.name.startswith("aten::") and not event.cpu_children for event in profiled.events())


def gigabytes_per_second(nbytes: int, seconds: float) -> float:
    """A rate."""
    return nbytes / seconds / 1e9


def copy_rate(numel: int) -> float:
    """Bytes that are read and written per second by a copy of FP32 within the device, in GB/s."""
    source, target = (torch.ones(numel, device=one_gpu.device()) for _ in range(2))
    return gigabytes_per_second(2 * source.nbytes, median_seconds(lambda: target.copy_(source)))


def matrix_products(seconds: float) -> Callable[[], None]:
    """Matrix products that keep the device busy for about ``seconds``, equally many on every rank."""
    size, dtype = (4096, torch.bfloat16) if is_gpu() else (128, torch.float32)
    left, right = (torch.randn(size, size, device=one_gpu.device(), dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    one = median_seconds(lambda: torch.mm(left, right, out=out))
    number = torch.tensor([max(round(seconds / one), 1)], device=one_gpu.device())
    dist.broadcast(number, 0)
    times = int(number)

    def work() -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    return work
