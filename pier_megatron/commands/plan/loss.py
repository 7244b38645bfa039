"""What groups will cost in loss, from a job's settings or from the log of a run that has begun."""

import math
from pathlib import Path

from pier_megatron.commands.plan.model import Plan
from pier_megatron.commands.tensorboard_log import TensorBoardLog
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.outer.expectation import FORESEEABLE, LEAST_NOISE, fewer, is_foreseeable, shares
from pier_megatron.outer.noise import UNSETTLED, settled
from pier_megatron.outer.report import SCALAR_PREFIX

_NOISE = SCALAR_PREFIX + "noise-to-signal"

PUBLISHED = "+0.2 % with 8 groups, -0.2 % with 64, +1.2 % with 32 and +4.1 % with 128 of a smaller model"
"""Final validation loss of the authors' runs against AdamW: small, XL, medium, medium."""


def expected_shares(log: TensorBoardLog | None, config: PierConfig, global_batch: int) -> Plan:
    """What to expect of a planned job.

    Args:
        log: Log of a run with the job's text, model and batch that has begun; None if there is none.
        config: Settings of the job.
        global_batch: Global batch of the job, in samples.

    Returns:
        Shares, for the job's number of groups and others, of its iterations after which synchronous training would have the
        same loss, with the noise and the groups of the run that the log is of; ``why`` where nothing is known.

    Raises:
        PierConfigError: If there is a log, but its noise is not known or says nothing of the job.
    """
    alternatives = (config.groups * 2, config.groups, *fewer(config.groups))
    share_of = shares(config)
    if log is None:
        return _unknown(config) if share_of is None else {"shares": {groups: share_of(groups) for groups in alternatives}}
    if not is_foreseeable(config):
        raise PierConfigError(
            f"--log: the loss is foreseen with {FORESEEABLE}; the job has {config.inner_optimizer}, {config.preset}, "
            f"{config.exchange_dtype}, {int(config.local_intervals)} outer steps and an interval of {config.sync_interval}."
        )
    if share_of is not None:
        raise PierConfigError(
            f"--log: with {config.inner_optimizer} inside the loss is foreseen from the settings, and noise says nothing of "
            "it: leave --log out."
        )
    noise, measured = _noise(log, global_batch)
    share_of = shares(config, noise, measured)
    if share_of is None:
        raise PierConfigError(
            f"--log: noise to signal is {noise:.2f} in that run; below {LEAST_NOISE} what groups lose was not found to follow "
            "it (docs/study.md#what-to-expect)."
        )
    return {
        "noise to signal": noise,
        "groups of the run": measured,
        "shares": {groups: share_of(groups) for groups in alternatives},
    }


def _noise(log: TensorBoardLog, global_batch: int) -> tuple[float, int]:
    """The settled noise of a run, and its number of groups."""
    noise = settled([noise for _, noise in log.mean(_NOISE)])
    if noise is None:
        raise PierConfigError(
            f"--log: no noise of pseudo-gradients in it, which takes two groups or more and at least {UNSETTLED + 1} outer "
            "steps."
        )
    batch = int(log.arguments["global_batch_size"])
    if batch != global_batch:
        raise PierConfigError(
            f"--log: that run has --global-batch-size {batch}, the job {global_batch}. A batch changes learning rate and noise "
            "alike: let a run begin with the job's own."
        )
    return noise, int(log.arguments["pier_groups"])


def read(folder: Path) -> TensorBoardLog:
    """Opens a run's log.

    Raises:
        PierConfigError: If there is none.
    """
    try:
        return TensorBoardLog(folder)
    except FileNotFoundError as error:
        raise PierConfigError(f"--log {error}") from None


def has_noise(log: TensorBoardLog) -> bool:
    """Whether the run has measured the noise of pseudo-gradients."""
    return _NOISE in log.scalars


def text(loss: Plan, groups: int) -> str:
    """The plan's line of it."""
    if "shares" not in loss:
        return f"Loss: not known. {loss['why']}"
    others = ", ".join(f"{share:.1%} with {number}" for number, share in loss["shares"].items() if number != groups)
    known_from = "the settings, by the median of small runs"
    if "noise to signal" in loss:
        known_from = f"noise to signal {loss['noise to signal']:.2f} with {loss['groups of the run']} groups"
    return (
        f"Loss: as synchronous training of {loss['shares'][groups]:.1%} of the iterations with {groups} groups; {others} "
        f"(from {known_from}, docs/study.md#what-to-expect)"
    )


def _unknown(config: PierConfig) -> Plan:
    """Why nothing is known of a job's loss, and what others have seen."""
    if config.groups == 1:
        return {
            "why": "There is one group: with AdamW inside, small runs ended below synchronous training "
            "(docs/frontier.md#one-group)."
        }
    if is_foreseeable(config):
        return {"why": "It follows the noise of a run's pseudo-gradients: give --log of a run with ten outer steps."}
    # The last one, after the last iteration, may end a shorter interval.
    steps = f"This job takes {math.ceil(config.local_intervals)}"
    if config.preset != "pier":
        return {
            "why": f"It was not studied for {config.preset}, {config.inner_optimizer} and these settings. {steps} outer steps. "
            "docs/study.md has what was."
        }
    return {
        "why": f"Published for --pier-preset pier at 1,800 outer steps: {PUBLISHED} (validation loss against AdamW, arXiv "
        f"2511.17849). With 27 outer steps it lost 0.37 nats per byte and more (docs/study.md). {steps}."
    }
