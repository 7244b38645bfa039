"""Whether groups that never agree drift apart."""

import collections

# Outer steps that are looked back, and how much more the spread may be than then. It follows the inner learning rate, which
# warms up over more outer steps than these or begins behind the lazy start.
_BACK, _FACTOR = 10, 3.0


class SpreadWatch:
    """Tells growth without bounds from what follows the inner learning rate.

    Two things grow at first: groups that begin alike, for a few outer steps, and a learning rate that warms up. Beyond them
    the spread of NoLoCo's groups falls with the learning rate (arXiv 2506.10911, section 4).
    """

    def __init__(self) -> None:
        """Begins without a history."""
        self._seen = 0
        self._latest: collections.deque[float] = collections.deque(maxlen=_BACK + 1)

    def grows(self, spread: float) -> bool:
        """Takes the spread of one more outer step; whether it is far above what it was some outer steps ago."""
        self._seen += 1
        self._latest.append(spread)
        return self._seen > 2 * _BACK and spread > _FACTOR * self._latest[0]
