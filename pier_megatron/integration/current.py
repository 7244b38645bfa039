"""The optimizer of the training under way, for seams that Megatron gives no optimizer to."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate

from pier_megatron.megatron_api import run

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer


@dataclasses.dataclass
class _Training:
    optimizer: "PierOptimizer | None" = None


def set_optimizer(optimizer: "PierOptimizer | None") -> None:
    """Names the optimizer that Megatron trains with from now on; None for one that is not Pier's."""
    run.part(_Training).optimizer = optimizer


def pier_optimizer() -> "PierOptimizer | None":
    """The optimizer, or None in runs without Pier."""
    return run.part(_Training).optimizer


def in_pier_runs[**P, R](
    around: "Callable[Concatenate[Callable[..., R], PierOptimizer, P], R]",
) -> Callable[Concatenate[Callable[..., R], P], R]:
    """Decorates a wrapper of a function of Megatron: runs with Pier call the wrapper, all others the function alone.

    Args:
        around: Called with the function, the optimizer, and the function's arguments.
    """

    @functools.wraps(around)
    def choose(function: Callable[..., R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        optimizer = pier_optimizer()
        return function(*args, **kwargs) if optimizer is None else around(function, optimizer, *args, **kwargs)

    return choose


def in_the_local_phase[**P, R](
    around: "Callable[Concatenate[Callable[..., R], PierOptimizer, P], R]",
) -> Callable[Concatenate[Callable[..., R], P], R]:
    """Does the same as :func:`in_pier_runs`, but only in iterations of the local phase."""

    @in_pier_runs
    @functools.wraps(around)
    def choose(function: Callable[..., R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return around(function, optimizer, *args, **kwargs) if optimizer.loop.is_local else function(*args, **kwargs)

    return choose
