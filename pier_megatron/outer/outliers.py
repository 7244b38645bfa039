"""Which pseudo-gradients are too long to be trusted."""

import math

# Weight of the newest norm in the moving statistics: a memory of some fifty outer steps.
_WEIGHT = 0.02

# Norms that are only looked at before the first is judged.
_WARMUP = 10


class OutlierDetector:
    """Judges the norm of one group's pseudo-gradient by its own history.

    Keeps an exponentially weighted mean and variance of the norms and calls one an outlier that is more than ``zscore``
    standard deviations above the mean. Outliers do not enter the statistics.

    Reference: "EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models", arXiv 2412.07210,
    anomaly elimination of the pseudo-gradient penalty.
    """

    def __init__(self, zscore: float) -> None:
        """Starts without history.

        Args:
            zscore: Standard deviations above the mean from which on a norm is an outlier.
        """
        self._zscore = zscore
        self._history: dict[int, tuple[int, float, float]] = {}

    def judge(self, norm: float, fragment: int) -> bool:
        """Whether a norm is an outlier among those of its fragment; takes it into the statistics if not.

        Args:
            norm: Of the group's pseudo-gradient, finite.
            fragment: First fragment of the round: different parts of a model have norms of different size.
        """
        seen, mean, variance = self._history.get(fragment, (0, 0.0, 0.0))
        if seen >= _WARMUP and norm - mean > self._zscore * math.sqrt(variance):
            return True
        # In the beginning every norm weighs the same, so that the first one does not stay for long.
        weight = max(_WEIGHT, 1 / (seen + 1))
        difference = norm - mean
        mean += weight * difference
        variance = (1 - weight) * (variance + weight * difference**2)
        self._history[fragment] = (seen + 1, mean, variance)
        return False

    def state_dict(self) -> dict[int, tuple[int, float, float]]:
        """The statistics by fragment: norms seen, mean, variance."""
        return dict(self._history)

    def load_state_dict(self, state: dict[int, tuple[int, float, float]]) -> None:
        """Goes on from saved statistics."""
        self._history = dict(state)
