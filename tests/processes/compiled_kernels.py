"""Compiles the kernels for a GPU that is not there, and prints what was compiled at the start and what later calls added.

A process of its own: Triton's interpreter, in which other tests run them, takes the compiler's place. Nothing is launched.
"""

import json
import os
import tempfile
from types import SimpleNamespace
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)
# What was compiled before would be taken from there, whatever the sources import.
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from pier_megatron import PierConfig
from pier_megatron.exchange import coding
from pier_megatron.exchange import kernels as codec_kernels
from pier_megatron.exchange.codecs import BLOCK, CODECS
from pier_megatron.outer import OuterLoop, Shards

_TARGET = GPUTarget("cuda", 90, 32)
_LAUNCHED: list[str] = []
_DRIVER = SimpleNamespace(
    get_current_target=lambda: _TARGET,
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    launcher_cls=lambda source, metadata: lambda *args: _LAUNCHED.append(metadata.name),
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 2**17},
        # Module, function, registers, spilled registers, threads.
        load_binary=lambda *args: (object(), object(), 0, 0, 1024),
    ),
)


def compiled() -> dict[str, CompiledKernel]:
    """Every kernel that was compiled until now, by its function and the key of the call."""
    functions = [value for value in vars(codec_kernels).values() if isinstance(value, JITFunction)]
    return {
        f"{function.__name__} {key}": kernel
        for function in functions
        for cache, *_ in function.device_caches.values()
        for key, kernel in cache.items()
    }


def vector(numel: int, offset: int) -> torch.Tensor:
    """A vector that begins at any multiple of four bytes."""
    return torch.zeros(numel + offset)[offset:]


def call_with_other_shapes() -> None:
    """Calls everything with lengths and alignments that no start has seen."""
    for groups, blocks, offset in ((1, 1, 1), (3, 5, 0), (16, 16, 2), (64, 1, 3)):
        for codec in CODECS.values():
            numel = groups * blocks * BLOCK
            rows = vector(numel, offset).view(groups, -1)
            coding.decode(codec, coding.encode(codec, rows))
            coding.decode(codec, coding.encode(codec, rows, vector(numel - offset, offset)))


def main() -> None:
    """Prints the kernels and, for each, whether it is of the target and contracts products and sums."""
    triton.runtime.driver.set_active(_DRIVER)
    with mock.patch.object(coding, "runs_kernels", return_value=True):
        for name in CODECS:
            config = PierConfig(10, groups=1, sync_interval=2, lazy_start_iters=2, preset="diloco", exchange_dtype=name)
            OuterLoop([[Shards([torch.zeros(3)])]], config, None)
        at_start = compiled()
        call_with_other_shapes()
    found = {
        "at start": list(at_start),
        "later": sorted(compiled().keys() - at_start.keys()),
        "launched": len(_LAUNCHED),
        "fused": [name for name, kernel in at_start.items() if "fma." in kernel.asm["ptx"]],
        "other targets": [name for name, kernel in at_start.items() if ".target sm_90" not in kernel.asm["ptx"]],
        "binaries": all(kernel.asm["cubin"] for kernel in at_start.values()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
