"""What the groups of a launch decide together, so that none of them does alone what the others wait for."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.integration import current
from pier_megatron.megatron_api import run, versions
from pier_megatron.outer import OuterLoop

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer


def any_group(loop: OuterLoop, values: Sequence[bool]) -> list[bool]:
    """Which of some values are true on any rank of any group; called by all of them."""
    votes = torch.tensor(values, dtype=torch.int32, device=loop.device)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    found: list[bool] = (loop.exchange.gather(votes).result().amax(0) > 0).tolist()
    return found


@current.in_pier_runs
def vote_of_those_who_average(
    vote: Callable[..., bool | tuple[bool, ...]], optimizer: "PierOptimizer", machine: object, value: bool | list[bool]
) -> bool | tuple[bool, ...]:
    """Asks all groups in the lazy start whether an iteration has to be run again: they average its gradients."""
    if optimizer.loop.is_local:
        return vote(machine, value)
    votes = any_group(optimizer.loop, value if isinstance(value, list) else [value])
    return tuple(votes) if isinstance(value, list) else votes[0]


@current.in_pier_runs
def end_together[**P, R](decide: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Looks for signals and at the clock where all groups meet, which is also where they hold equal parameters.

    The answer is the same in all groups, whenever a signal arrives.
    """
    loop, settings = optimizer.loop, versions.megatron_args()
    if loop.is_deserted:
        with versions.with_megatron_args({"exit_duration_in_mins": -1.0}):
            return decide(*args, **kwargs)
    if loop.exchange.size == 1:
        # An elastic island may save and end in any iteration, without others.
        return decide(*args, **kwargs)
    limit, told = settings.exit_duration_in_mins, [False, False]
    handler = _signal_handler() if settings.exit_signal_handler else None
    if (limit or handler) and (loop.groups_meet or not loop.is_local):
        has_signal = handler is not None and any(handler.signals_received())  # type: ignore[attr-defined]
        told = any_group(loop, [has_signal, bool(limit) and time.time() - _begun() > 60 * limit])
    with contextlib.ExitStack() as stack:
        if handler is not None:
            stack.enter_context(versions.replaced(handler, {"signals_received": lambda: told[:1]}))
        stack.enter_context(versions.with_megatron_args({"exit_duration_in_mins": -1.0 if told[1] else None}))
        return decide(*args, **kwargs)


def _signal_handler() -> object:
    loop = run.loop()
    return versions.require("megatron.training.global_vars", "get_signal_handler")() if loop is None else loop.signal_handler()


def _begun() -> float:
    loop = run.loop()
    begun: float = versions.require("megatron.training.training", "_TRAIN_START_TIME") if loop is None else loop.begun()
    return begun


@current.in_pier_runs
def estimate_tokens(consume: Callable[[], tuple[float | None, ...]], optimizer: "PierOptimizer") -> tuple[float | None, ...]:
    """Estimates the tokens of packed sequences in all groups, from which operations are counted, by those of this group."""
    return tuple(count if count is None else count * optimizer.loop.config.groups for count in consume())
