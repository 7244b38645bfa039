"""How much of what a group learns between outer steps is noise of its own samples."""

import math
from collections.abc import Sequence

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
        groups: Number of groups whose mean that is, at least 2.

    Returns:
        0 where all groups moved alike; infinity where nothing that they have in common can be told from noise.
    """
    variance = (own_square - mean_square) * groups / (groups - 1)
    signal = (groups * mean_square - own_square) / (groups - 1)
    return max(variance, 0.0) / signal if signal > 0 else math.inf


class IntervalNoise:
    """The noise of whole sync intervals, each put together from the outer steps of all fragments.

    A fragment's outer step covers one part of the parameters: its noise is not the model's, and one interval has several.
    """

    def __init__(self, fragments: int) -> None:
        """Begins without a fragment.

        Args:
            fragments: Number of parts that take their outer steps in turn.
        """
        self._fragments = fragments
        self._found: list[tuple[float, float, int] | None] = []

    def add(self, due: Sequence[int], squares: tuple[float, float, int] | None) -> float | None:
        """Takes note of an outer step.

        Args:
            due: Fragments that took it.
            squares: Arguments of :func:`noise_to_signal` for these fragments; None where they are not known.

        Returns:
            Noise of the interval that this step completes. None before that, after an interval of which a fragment is not
            known or had other participants, and where fragments took it together: their intervals were unequal.
        """
        if len(due) > 1:
            return None
        if due[0] == 0:
            self._found = []
        self._found.append(squares)
        if due[0] < self._fragments - 1 or len(self._found) < self._fragments:
            return None
        known = [found for found in self._found if found is not None]
        if len(known) < self._fragments or len({groups for _, _, groups in known}) > 1:
            return None
        return noise_to_signal(math.fsum(own for own, _, _ in known), math.fsum(mean for _, mean, _ in known), known[0][2])
