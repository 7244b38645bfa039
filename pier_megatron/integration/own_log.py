"""What Megatron logs in the local phase: losses, norms and times of this rank's group alone. No group waits for another.

The means over all groups are part of the next outer step's report.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.integration import current
from pier_megatron.integration.communication import confined_to_group
from pier_megatron.integration.own_group import own_ranks
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.timers import TimerBase

    from pier_megatron.integration.optimizer import PierOptimizer


@current.in_the_local_phase
def log_own_group[R](training_log: Callable[..., R], optimizer: "PierOptimizer", /, *args: object, **kwargs: object) -> R:
    """Logs what this group has seen, marked as such, and keeps its loss and gradient norm for the next outer step's report."""
    loop = optimizer.loop
    given = versions.given(training_log, args, kwargs)
    # Megatron's first loss is that of the language model; stages before the last one have none.
    losses = [] if given["skipped_iter"] else list(given["loss_dict"].values())
    loop.note_training(losses[0] if losses else None, given["grad_norm"])
    settings = versions.megatron_args()
    # Megatron averages the losses of experts and of sparse attention's indexer here, over a group without context parallelism.
    averages = any(getattr(settings, name, None) for name in ("num_experts", "dsa_indexer_loss_coeff"))
    with confined_to_group(optimizer.model_chunks[0], averages), _marked(training_log, optimizer):
        return training_log(*args, **kwargs)


def _marked(training_log: Callable[..., object], optimizer: "PierOptimizer") -> AbstractContextManager[None]:
    """Inside, Megatron's line ends with the group that it is of."""
    module = sys.modules[inspect.unwrap(training_log).__module__]
    print_line: Callable[[str], None] = module.print_rank_last
    config, group = optimizer.loop.config, optimizer.loop.exchange.rank
    index = group if config.island is None else config.island
    if config.groups == 1:
        return versions.replaced(module, {})
    return versions.replaced(
        module, {"print_rank_last": lambda line: print_line(f"{line} losses and norms: group {index} of {config.groups} |")}
    )


def wait_for_own_group(timer_by_name: "Callable[..., TimerBase]", /, *args: object, **kwargs: object) -> "TimerBase":
    """Lets a timer's barriers wait for this group only in the local phase, and for the whole world before it."""
    timer, optimizer = timer_by_name(*args, **kwargs), current.pier_optimizer()
    if optimizer is not None and hasattr(timer, "set_barrier_group"):
        timer.set_barrier_group(own_ranks() if optimizer.loop.is_local else None)
    return timer


@current.in_the_local_phase
def gather_times_of_own_group(
    all_gather: Callable[..., object], optimizer: "PierOptimizer", /, times: torch.Tensor, own: torch.Tensor
) -> None:
    """Gathers the times of this group's ranks; those of the others stay zero, for which Megatron shows nothing.

    Args:
        all_gather: Gathers over the whole world.
        optimizer: Optimizer of the run.
        times: Times of all ranks, one after the other; float32, shape ``[ranks x timers]``.
        own: Times of this rank; float32, shape ``[timers]``.
    """
    group = own_ranks()
    if times.numel() == group.size() * own.numel():
        all_gather(times, own)
        return
    found = torch.empty(group.size() * own.numel(), dtype=own.dtype, device=own.device)
    all_gather(found, own, group=group)
    times.view(-1, own.numel())[dist.get_process_group_ranks(group)] = found.view(-1, own.numel())
