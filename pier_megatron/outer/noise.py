"""How much of what a group learns between outer steps is noise of its own samples, and what that costs."""

import math
import statistics
from collections.abc import Sequence

from pier_megatron.config import PierConfig

LOST_PER_NOISE = 0.13
"""Logarithm of the share of iterations that groups lose, per noise that they do not share: docs/study.md#what-to-expect."""

FITTED_PRESETS = ("pier-rising", "pier-annealed")

FEWEST_OUTER_STEPS = 25
"""With fewer, groups lose more than their noise says."""

UNSETTLED = 4
"""Outer steps in which groups have only begun to come apart."""

SETTLED_AFTER = 10
"""Outer steps after which the noise is what the law was fitted to; later it grows, as the loss falls."""


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
    """What :func:`equivalent_share` takes, of the noise in a run's outer steps from the first; None if there are too few."""
    found = noises[UNSETTLED:SETTLED_AFTER]
    return statistics.median(found) if found else None


def equivalent_share(noise: float, measured_groups: int, groups: int) -> float:
    """Share of its iterations after which synchronous training would have the loss that groups end with.

    Args:
        noise: As of :func:`noise_to_signal`, as :func:`settled` or in the outer step :data:`SETTLED_AFTER`.
        measured_groups: That trained then.
        groups: That are to train, on the same global batch: the fewer they are, the less noise has each.

    Returns:
        A share from 0 to 1; 1 for one group. It holds for what :func:`is_foreseeable` says.
    """
    return math.exp(-LOST_PER_NOISE * noise * groups / measured_groups * (1 - 1 / groups))


def is_foreseeable(config: PierConfig) -> bool:
    """Whether :func:`equivalent_share` was fitted to runs of this kind."""
    is_fitted = config.inner_optimizer == "adam" and config.preset in FITTED_PRESETS
    return is_fitted and config.local_intervals >= FEWEST_OUTER_STEPS


def fewer(groups: int) -> list[int]:
    """Half as many groups, half of that and so on, down to two."""
    return [groups >> halved for halved in range(1, groups.bit_length() - 1)]


def expectation(config: PierConfig, noise: float | None, iteration: int) -> str | None:
    """What to expect of the loss, for the log; None where nothing is known, or nothing to be said after this iteration."""
    is_due = iteration == config.lazy_start + SETTLED_AFTER * config.sync_interval
    if noise is None or not is_due or not is_foreseeable(config):
        return None
    share = equivalent_share(noise, config.groups, config.groups)
    others = "".join(
        f", with {groups} groups {equivalent_share(noise, config.groups, groups):.0%}" for groups in fewer(config.groups)
    )
    return (
        f" after {SETTLED_AFTER} outer steps: expect the loss of a synchronous run of {share:.0%} of the iterations{others} "
        "(docs/study.md#what-to-expect)"
    )
