"""What groups cost in loss: the share of its iterations after which synchronous training would end alike.

Fitted to the runs of docs/study.md#what-to-expect, all of them of small models, in FP32 and int4: with AdamW inside what is
lost follows the noise that a run has measured, with Muon inside its settings say it before it begins, or the least of it if the
run is long.
"""

import math
from collections.abc import Callable

from pier_megatron.config import PierConfig

SETTLED_AFTER = 10
"""Outer steps after which the noise is what expectations were fitted to; later it grows, as the loss falls."""

LOST_PER_NOISE = 0.13
"""With AdamW: logarithm of the share of iterations that groups lose, per noise that they do not share."""

LEAST_NOISE = 1.5
"""With AdamW: groups whose noise to signal is below lost between nothing and twice what it says."""

LOST_INTERVALS = 2.3
"""With Muon: sync intervals that are lost, per group; of a run with a lazy start of a tenth."""

_FITTED_PRESETS = {"adam": ("pier-rising", "pier-annealed"), "muon": ("pier-muon-annealed",)}

# With fewer outer steps or a shorter interval, groups lose up to twice what is predicted.
_FEWEST_OUTER_STEPS = {"adam": 25, "muon": 10}
_SHORTEST_INTERVAL = 10


def is_covered(config: PierConfig) -> bool:
    """Whether the laws were fitted to runs of this kind."""
    inner = config.inner_optimizer
    return (
        config.preset in _FITTED_PRESETS[inner]
        and config.outer_momentum is None
        and config.outer_lr is None
        and config.sites is None
        # Few bits add noise, which the law would attribute to the groups.
        and not config.codec.needs_error_feedback
        and config.sync_interval >= _SHORTEST_INTERVAL
        and config.local_intervals >= _FEWEST_OUTER_STEPS[inner]
    )


def share_by_noise(noise: float, measured_groups: int, groups: int) -> float:
    """With AdamW inside, the share of its iterations after which synchronous training would have the loss of groups.

    Args:
        noise: Noise to signal, in the outer step ``SETTLED_AFTER``.
        measured_groups: Number of groups that trained then.
        groups: Number of groups that are to train, on the same global batch: the fewer they are, the less noise has each.

    Returns:
        A share from 0 to 1; 1 for one group.
    """
    return math.exp(-LOST_PER_NOISE * noise * groups / measured_groups * (1 - 1 / groups))


def share_by_settings(config: PierConfig, groups: int) -> float:
    """Does the same as :func:`share_by_noise` with Muon inside: it loses at least a number of intervals, however long the run.

    Args:
        config: Settings of the run.
        groups: Number of groups that are to train, on the same global batch.

    Returns:
        A share from 0 to 1; 1 for one group.
    """
    return math.exp(-LOST_INTERVALS * groups * config.sync_interval / config.train_iters) if groups > 1 else 1.0


def shares(config: PierConfig, noise: float | None = None, measured_groups: int = 1) -> Callable[[int], float] | None:
    """What is known of a run's loss.

    Args:
        config: Settings of the run.
        noise: Noise of a run that has begun, see :func:`share_by_noise`; None before that.
        measured_groups: Number of groups that trained then.

    Returns:
        The share of its iterations after which synchronous training would have the same loss, by the number of groups: with
        Muon inside the settings say it, with AdamW the noise. None if the run is not :func:`is_covered`, or its noise is
        needed and either not known or below :data:`LEAST_NOISE`.
    """
    if not is_covered(config):
        return None
    if config.inner_optimizer == "muon":
        return lambda groups: share_by_settings(config, groups)
    return None if noise is None or noise < LEAST_NOISE else lambda groups: share_by_noise(noise, measured_groups, groups)


def noise_to_signal(own_square: float, mean_square: float, groups: int) -> float:
    """Variance of a group's pseudo-gradient, over the square of what it would be without noise.

    The gradient noise scale of McCandlish et al. (arXiv 1812.06162, appendix A.1), computed from pseudo-gradients: one group
    is the small batch and all of them are the large one. The unit is the tokens that a group trains on between outer steps.

    Args:
        own_square: Squared norm of a group's pseudo-gradient, mean over the groups.
        mean_square: Squared norm of the mean pseudo-gradient.
        groups: Number of groups whose mean that is, at least 2.

    Returns:
        0 where all groups moved alike; infinity where their common part is within the noise.
    """
    variance = (own_square - mean_square) * groups / (groups - 1)
    signal = (groups * mean_square - own_square) / (groups - 1)
    return max(variance, 0.0) / signal if signal > 0 else math.inf
