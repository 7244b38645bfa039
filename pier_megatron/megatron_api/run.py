"""State of the current training, which ends with it; modules keep no globals of their own."""

import dataclasses
import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

_parts: dict[type, Any] = {}


def begin() -> None:
    """Begins a training, in which nothing of an earlier one in this process is left."""
    if _parts:
        _parts.clear()
        # Communicators go here, and not in a helper process that is forked later: that does not have their threads.
        gc.collect()


def part[T](kind: type[T]) -> T:
    """The only object of a class in this training, made without arguments when it is first asked for."""
    if kind not in _parts:
        _parts[kind] = kind()
    found: T = _parts[kind]
    return found


class Loop(Protocol):
    """A training loop other than that of ``megatron.training``, with what Pier asks of it."""

    def arguments(self) -> Any:
        """Its settings, by the names of Megatron's arguments."""

    def with_arguments(self, values: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Inside, some of them have other values, for the loop too."""

    def print_last(self, text: str) -> None:
        """Prints on the rank that logs."""

    def tensorboard(self) -> Any:
        """The writer of TensorBoard, or None on ranks without one."""

    def signal_handler(self) -> object:
        """What has received signals, with Megatron's ``signals_received``."""

    def begun(self) -> float:
        """Time at which training began, in seconds since the epoch."""

    def wandb(self) -> Any:
        """The writer of Weights & Biases, or None."""


@dataclasses.dataclass
class _Loop:
    found: Loop | None = None


def set_loop(loop: Loop) -> None:
    """Names the training loop of the training under way."""
    part(_Loop).found = loop


def loop() -> Loop | None:
    """The training loop; None if it is that of ``megatron.training``."""
    return part(_Loop).found
