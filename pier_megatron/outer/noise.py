"""How much of what a group learns between outer steps is noise of its own samples."""

import math
import statistics
from collections.abc import Sequence

UNSETTLED = 4
"""Outer steps in which groups have only begun to come apart."""

SETTLED_AFTER = 10
"""Outer steps after which the noise is what expectations were fitted to; later it grows, as the loss falls."""


def noise_to_signal(own_square: float, mean_square: float, groups: int) -> float:
    """Variance of a group's pseudo-gradient, over the square of what it would be without noise.

    The gradient noise scale of McCandlish et al. (arXiv 1812.06162, appendix A.1) with pseudo-gradients in the place of
    gradients, one group as the small batch and all of them as the large one; in units of the tokens that a group trains on
    between outer steps.

    Args:
        own_square: Squared norm of a group's pseudo-gradient, mean over the groups.
        mean_square: Squared norm of the mean pseudo-gradient.
        groups: Of which that is the mean, at least 2.

    Returns:
        0 where all groups moved alike; infinity where nothing that they have in common can be told from noise.
    """
    variance = (own_square - mean_square) * groups / (groups - 1)
    signal = (groups * mean_square - own_square) / (groups - 1)
    return max(variance, 0.0) / signal if signal > 0 else math.inf


def settled(noises: Sequence[float]) -> float | None:
    """What expectations are made from, of the noise in a run's outer steps from the first; None if there are too few."""
    found = noises[UNSETTLED:SETTLED_AFTER]
    return statistics.median(found) if found else None
