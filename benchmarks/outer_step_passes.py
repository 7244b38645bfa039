"""Times the outer step's own passes over the parameters, without any link, against a memory copy.

``python benchmarks/outer_step_passes.py [--parameters N] [--device cpu|cuda]``. Ratios of one run count; times do not.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from pier_megatron import PierConfig
from pier_megatron.outer import GroupExchange, OuterLoop, Shards

# What no implementation can avoid: read parameters, anchor and momentum, write all three.
_UNAVOIDABLE_PASSES = 6
FLOOR = _UNAVOIDABLE_PASSES / 2
"""Unavoidable passes in units of a copy, which reads once and writes once."""


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=20_000_000, help="FP32 parameters on this rank (%(default)s)")
    parser.add_argument("--shards", type=int, default=200, help="tensors they are spread over (%(default)s)")
    parser.add_argument("--chunk-mib", type=int, default=16, help="value of --pier-chunk-mib (%(default)s)")
    parser.add_argument("--offload", action="store_true", help="keep the outer state in host memory")
    parser.add_argument("--repetitions", type=int, default=7, help="repetitions; prints their median (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    seconds = measure(**vars(options))
    parameters = options.parameters // options.shards * options.shards
    copy, *_ = seconds.values()
    print(f"{parameters:,} FP32 parameters in {options.shards} shards, {options.device}, median of {options.repetitions}")
    print(f"{'':34} {'ms':>9} {'ns/parameter':>13} {'x a copy':>9}")
    for name, median in seconds.items():
        print(f"{name:34} {median * 1e3:9.2f} {median / parameters * 1e9:13.3f} {median / copy:9.2f}")
    print(f"{f'floor ({_UNAVOIDABLE_PASSES} passes of memory)':34} {'':9} {'':13} {FLOOR:9.2f}")


def measure(parameters: int, shards: int, chunk_mib: int, offload: bool, repetitions: int, device: str) -> dict[str, float]:
    """Median seconds of a memory copy, which comes first, and of the passes, by name; as the flags of the command line."""
    of_rank = Shards([torch.randn(parameters // shards, device=device) for _ in range(shards)])
    intervals = {"sync_interval": 1, "lazy_start_iters": 10**6}
    config = PierConfig(10**9, groups=1, preset="pier", chunk_mib=chunk_mib, offload=offload, **intervals)
    lazy, local = (OuterLoop([[of_rank]], config, GroupExchange()) for _ in range(2))
    local.reset(iteration=config.lazy_start)
    source, target = (torch.ones(local.states[0].numel, device=device) for _ in range(2))
    measured: dict[str, Callable[[], object]] = {
        "memory copy (read and write)": lambda: target.copy_(source),
        "momentum warmup": lazy.skip_iteration,
        "outer step without its exchange": local.skip_iteration,
    }
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(repetitions):
        for name, run in measured.items():  # Interleaved, so that a slow moment hits all alike.
            begin = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


if __name__ == "__main__":
    main()
