"""Time limits: a part ends in time, whatever its checks do."""

import os
import time
from collections.abc import Sequence

_DEADLINE = "PIER_GPU_DEADLINE"

# For what comes after a check that has used all its time: its processes end, and its rows are written down.
_RESERVE = 0.03


def share(left: float, weights: Sequence[float]) -> float:
    """Seconds that the first of some checks may take; what it leaves is for the others.

    Args:
        left: Seconds for all of them.
        weights: Expected seconds of each, in order.
    """
    return max((1 - _RESERVE) * left * weights[0] / sum(weights), 0.0)


def environment(seconds: float) -> dict[str, str]:
    """Variables that tell a process, and all that it starts, when it is ended."""
    return {_DEADLINE: str(time.time() + (1 - _RESERVE) * seconds)}


def left() -> float:
    """Seconds until this process is ended, at least one; an hour where nobody ends it."""
    return max(float(os.environ.get(_DEADLINE, time.time() + 3600)) - time.time(), 1.0)
