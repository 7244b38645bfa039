"""What groups will cost in loss, from the log of a run that has begun."""

from pathlib import Path
from typing import Any

from pier_megatron.commands.tensorboard_log import TensorBoardLog
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.outer.noise import (
    FEWEST_OUTER_STEPS,
    FITTED_PRESETS,
    UNSETTLED,
    equivalent_share,
    fewer,
    is_foreseeable,
    settled,
)
from pier_megatron.outer.report import SCALAR_PREFIX


def expected_shares(log: TensorBoardLog, config: PierConfig, global_batch: int) -> dict[str, Any]:
    """What to expect of a planned job with the text, model and batch of a run that has begun.

    Args:
        log: Of that run.
        config: Of the job.
        global_batch: Of the job, in samples.

    Returns:
        The run's groups, the noise of their pseudo-gradients, and for the job's number of groups and others the share of its
        iterations after which synchronous training would have the same loss.

    Raises:
        PierConfigError: If the run's noise is not known, or says nothing of the job.
    """
    noise = settled([noise for _, noise in log.mean(SCALAR_PREFIX + "noise-to-signal")])
    if noise is None:
        raise PierConfigError(
            f"--log: no noise of pseudo-gradients in it, which takes two groups or more and at least {UNSETTLED + 1} outer "
            "steps."
        )
    measured = int(log.arguments["pier_groups"])
    batch = int(log.arguments["global_batch_size"])
    if batch != global_batch:
        raise PierConfigError(
            f"--log: that run has --global-batch-size {batch}, the job {global_batch}. A batch changes learning rate and noise "
            "alike: let a run begin with the job's own."
        )
    if not is_foreseeable(config):
        raise PierConfigError(
            f"--log: the loss is foreseen with AdamW inside, --pier-preset {' or '.join(FITTED_PRESETS)}, and "
            f"{FEWEST_OUTER_STEPS} outer steps or more; the job has {config.inner_optimizer}, {config.preset} and "
            f"{int(config.local_intervals)}."
        )
    alternatives = (config.groups * 2, config.groups, *fewer(config.groups))
    shares = {groups: equivalent_share(noise, measured, groups) for groups in alternatives}
    return {"groups of the run": measured, "noise to signal": noise, "shares": shares}


def read(folder: Path) -> TensorBoardLog:
    """Opens a run's log.

    Raises:
        PierConfigError: If there is none.
    """
    try:
        return TensorBoardLog(folder)
    except FileNotFoundError as error:
        raise PierConfigError(f"--log {error}") from None


def text(loss: dict[str, Any], groups: int) -> list[str]:
    """The plan's lines of it."""
    others = ", ".join(f"{share:.0%} with {number}" for number, share in loss["shares"].items() if number != groups)
    return [
        f"loss: as synchronous training of {loss['shares'][groups]:.0%} of the iterations with {groups} groups; {others} "
        f"(noise to signal {loss['noise to signal']:.2f} with {loss['groups of the run']} groups, "
        "docs/study.md#what-to-expect)"
    ]
