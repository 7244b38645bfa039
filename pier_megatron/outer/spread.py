"""Whether groups that never agree drift apart."""

import collections
import itertools
import math
import statistics

# Outer steps in each of the two stretches that are compared, and how much more the spread may be in the later one. It follows
# the inner learning rate, which warms up over more outer steps than these or begins behind the lazy start.
_STRETCH, _FACTOR = 10, 3.0


class SpreadWatch:
    """Tells growth without bounds from what follows the inner learning rate.

    Two things grow at first: groups that begin alike, for a few outer steps, and a learning rate that warms up. Beyond them
    the spread of NoLoCo's groups falls with the learning rate (arXiv 2506.10911, section 4). A single outer step says little:
    its spread is that of the few groups that were drawn for it.
    """

    def __init__(self) -> None:
        """Begins without a history."""
        self._seen = 0
        self._latest: collections.deque[float] = collections.deque(maxlen=2 * _STRETCH)

    def grows(self, spread: float) -> bool:
        """Takes the spread of one more outer step; whether the latest are far above those before, by their medians."""
        self._seen += 1
        self._latest.append(spread)
        before, after = itertools.batched(self._latest, _STRETCH) if self._seen >= 3 * _STRETCH else ((math.inf,), (0.0,))
        return statistics.median(after) > _FACTOR * statistics.median(before)
