"""The optimizer of the training under way, for seams that Megatron gives no optimizer to."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer

_optimizer: "PierOptimizer | None" = None


def set_optimizer(optimizer: "PierOptimizer | None") -> None:
    """Names the optimizer that Megatron trains with from now on; None for one that is not Pier's."""
    global _optimizer
    _optimizer = optimizer


def local_optimizer() -> "PierOptimizer | None":
    """The optimizer, if this iteration belongs to its local phase; None in the lazy start and in runs without Pier."""
    return _optimizer if _optimizer is not None and _optimizer.loop.is_local else None


def pier_optimizer() -> "PierOptimizer | None":
    """The optimizer, or None in runs without Pier."""
    return _optimizer
