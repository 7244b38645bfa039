"""What belongs to the training under way and ends with it, in place of globals in the modules that need it."""

import gc
from typing import Any

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
