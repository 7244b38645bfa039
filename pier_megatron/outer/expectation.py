"""What groups cost in loss: the share of its iterations after which synchronous training would end alike.

Fitted to the runs of docs/study.md#what-to-expect, all of them of small models, in FP32 and int4: with AdamW inside what is
lost follows the noise that a run has measured, with Muon inside its settings say it before it begins, or the least of it if the
run is long.
"""

import math
from collections.abc import Callable

from pier_megatron.config import PierConfig
from pier_megatron.outer.noise import SETTLED_AFTER

LOST_PER_NOISE = 0.13
"""With AdamW: logarithm of the share of iterations that groups lose, per noise that they do not share."""

LEAST_NOISE = 1.5
"""With AdamW: groups whose noise to signal is below lost between nothing and twice what it says."""

LOST_INTERVALS = 2.3
"""With Muon: sync intervals that are lost, per group; of a run with a lazy start of a tenth."""

_FITTED_PRESETS = {"adam": ("pier-rising", "pier-annealed"), "muon": ("pier-muon-annealed",)}

# With fewer outer steps, and in shorter intervals, groups lose up to twice what is foreseen.
_FEWEST_OUTER_STEPS = {"adam": 25, "muon": 10}
_SHORTEST_INTERVAL = 10


def is_foreseeable(config: PierConfig) -> bool:
    """Whether runs of this kind are among those that expectations were fitted to."""
    inner = config.inner_optimizer
    return (
        config.preset in _FITTED_PRESETS[inner]
        and config.outer_momentum is None
        and config.outer_lr is None
        and config.sites is None
        # Fewer bits have noise of their own, which the law would take for that of groups.
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
    """As :func:`share_by_noise`, with Muon inside: it loses so many intervals at least, however long the run.

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
        Muon inside the settings say it, with AdamW the noise. None if the run is not :func:`is_foreseeable`, or its noise is
        needed and either not known or below :data:`LEAST_NOISE`.
    """
    if not is_foreseeable(config):
        return None
    if config.inner_optimizer == "muon":
        return lambda groups: share_by_settings(config, groups)
    return None if noise is None or noise < LEAST_NOISE else lambda groups: share_by_noise(noise, measured_groups, groups)


def fewer(groups: int) -> list[int]:
    """Half as many groups, half of that and so on, down to two."""
    return [groups >> halved for halved in range(1, groups.bit_length() - 1)]


def at_start(config: PierConfig) -> str | None:
    """What to expect of the loss, for the start-up block; None where the settings do not say it."""
    share_of = shares(config)
    return None if share_of is None or config.groups == 1 else _text("expect about", config, share_of)


def after(config: PierConfig, noise: float | None, iteration: int) -> str | None:
    """What to expect of the loss, for the log; None where nothing is known, or nothing to be said after this iteration."""
    is_due = iteration == config.lazy_start + SETTLED_AFTER * config.sync_interval
    is_said_already = shares(config) is not None
    share_of = shares(config, noise, config.groups)
    if share_of is None or is_said_already or not is_due:
        return None
    return _text(f" after {SETTLED_AFTER} outer steps: expect", config, share_of)


def _text(what: str, config: PierConfig, share_of: Callable[[int], float]) -> str:
    of_fewer = "".join(f", with {groups} groups {share_of(groups):.1%}" for groups in fewer(config.groups))
    share = f"{share_of(config.groups):.1%}"
    return f"{what} the loss of a synchronous run of {share} of the iterations{of_fewer} (docs/study.md#what-to-expect)"
