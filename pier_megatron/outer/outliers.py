"""Which pseudo-gradients are too long to be trusted."""

import math
from collections.abc import Mapping

# Weight of the newest norm in the moving statistics: a memory of some fifty outer steps.
_WEIGHT = 0.02

# Norms that are only looked at before the first is judged.
_WARMUP = 10

_NOTHING = (0, 0.0, 0.0)


class OutlierDetector:
    """Judges the norm of one group's pseudo-gradient by its own history.

    Keeps an exponentially weighted mean and variance of the norms and calls one an outlier that is more than ``zscore``
    standard deviations above the mean. Norms that did not count in their round are not to enter the statistics.

    Reference: "EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models", arXiv 2412.07210,
    anomaly elimination of the pseudo-gradient penalty.
    """

    def __init__(self, zscore: float) -> None:
        """Starts without history."""
        self._zscore = zscore
        self._history: dict[int, tuple[int, float, float]] = {}

    def is_outlier(self, norm: float, fragment: int) -> bool:
        """Judges a norm.

        Args:
            norm: Norm of the group's pseudo-gradient in one fragment, finite.
            fragment: Which: different parts of a model have norms of different size.
        """
        seen, mean, variance = self._history.get(fragment, _NOTHING)
        return seen >= _WARMUP and norm - mean > self._zscore * math.sqrt(variance)

    def add(self, norm: float, fragment: int) -> None:
        """Takes a norm into the statistics of its fragment."""
        seen, mean, variance = self._history.get(fragment, _NOTHING)
        # In the beginning every norm weighs the same, so that the first one does not stay for long.
        weight = max(_WEIGHT, 1 / (seen + 1))
        difference = norm - mean
        mean += weight * difference
        variance = (1 - weight) * (variance + weight * difference**2)
        self._history[fragment] = (seen + 1, mean, variance)

    def state_dict(self) -> dict[int, tuple[int, float, float]]:
        """The statistics by fragment: norms seen, mean, variance."""
        return dict(self._history)

    def load_state_dict(self, state: Mapping[int, tuple[int, float, float]]) -> None:
        """Restores saved statistics."""
        self._history = dict(state)
