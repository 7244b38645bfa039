"""What an outer loop really takes of its device's memory, against what a run's start says of it."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import one_gpu
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pier_megatron import PierConfig
from pier_megatron.exchange.sites import SiteExchange
from pier_megatron.integration import startup
from pier_megatron.outer import GroupExchange, OuterLoop, Shards

_INTERVALS = 3


def used_and_said(
    config: PierConfig, exchange: GroupExchange, numel: int, sites: SiteExchange | None = None
) -> tuple[int, int]:
    """Trains for some intervals; every rank of ``exchange`` calls it.

    Args:
        config: Settings of the outer loop, without a lazy start.
        exchange: Between the groups.
        numel: Number of parameters.
        sites: Between the sites, if groups are in some.

    Returns:
        Peak memory of the loop without the parameters, and the memory that the start-up block reports, in bytes.
    """
    here = one_gpu.device()
    parameters = [torch.zeros(numel // 8, device=here) for _ in range(8)]
    with _peak() as peak:
        loop = OuterLoop([[Shards(parameters)]], config, exchange, sites=sites)
        loop.rehearse()
        for _ in range(_INTERVALS * config.sync_interval):
            loop.skip_iteration()
        loop.reports.write_arrived(waits=True)
    # What is on its way would meet the messages of the next loop on these communicators.
    loop.snapshot()
    in_state = sum(buffer.nbytes for state in loop.states for buffer in state.flats.values())
    reduced = sum(buffer.nbytes for state in loop.states for buffer in state.reduced_residuals.values())
    said = reduced + startup.working_bytes(config, loop.states)
    if not config.offload:
        return peak[0], in_state + said
    # If the host is the device, the peak includes the offloaded state and the buffers kept with it.
    lent = [kept for round_ in loop.steps.rounds for kept in round_.kept]
    waiting = [buffers.tensors["own"] for buffers in (*loop.share.stagings[0].kept, *lent)]
    on_host = in_state + sum(buffer.nbytes for buffer in waiting) if here.type == "cpu" else 0
    return peak[0] - on_host, said


@contextlib.contextmanager
def _peak() -> Iterator[list[int]]:
    """Appends the peak of the bytes that were allocated inside; earlier allocations do not count."""
    found: list[int] = []
    if one_gpu.device().type == "cuda":
        # cuBLAS takes its workspace once, with the first product of a process.
        one = torch.ones(1, device="cuda")
        torch.dot(one, one)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before)
    else:
        with _HostMemory() as memory:
            yield found
        found.append(memory.most)


class _HostMemory(TorchDispatchMode):
    """Counts what operators return, which PyTorch does for GPUs only; what they take inside for a moment is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in given and id(storage) not in self._sizes:
                    self._sizes[id(storage)] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, id(storage), None)
        self.most = max(self.most, sum(self._sizes.values()))
        return result
