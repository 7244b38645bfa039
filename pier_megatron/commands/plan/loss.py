"""What groups will cost in loss, from the log of a run that has begun."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pier_megatron.commands.tensorboard_log import TensorBoardLog
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.outer.noise import SETTLED_AFTER, equivalent_share, is_foreseeable
from pier_megatron.outer.report import SCALAR_PREFIX

# In the first outer steps groups have only begun to come apart.
_SKIPPED = 4


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
    noises = [noise for _, noise in log.mean(SCALAR_PREFIX + "noise-to-signal")][_SKIPPED:SETTLED_AFTER]
    if not noises:
        raise PierConfigError(
            f"--log: no noise of pseudo-gradients in it, which takes two groups or more and at least {_SKIPPED + 1} outer "
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
            "--log: the loss is foreseen with AdamW inside, --pier-preset pier-rising or pier-annealed, and 25 outer steps or "
            f"more; the job has {config.inner_optimizer}, {config.preset} and "
            f"{(config.train_iters - config.lazy_start) // config.sync_interval}."
        )
    noise = statistics.median(noises)
    shares = {groups: equivalent_share(noise, measured, groups) for groups in _alternatives(config.groups)}
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


def _alternatives(groups: int) -> Sequence[int]:
    """Half as many and so on down to two, and twice as many."""
    return [groups * 2, *(groups >> halved for halved in range(groups.bit_length() - 1))]


def text(loss: dict[str, Any], groups: int) -> list[str]:
    """The plan's lines of it."""
    others = ", ".join(f"{share:.0%} with {number}" for number, share in loss["shares"].items() if number != groups)
    return [
        f"loss: as synchronous training of {loss['shares'][groups]:.0%} of the iterations with {groups} groups; {others} "
        f"(noise to signal {loss['noise to signal']:.2f} with {loss['groups of the run']} groups, "
        "docs/study.md#what-to-expect)"
    ]
