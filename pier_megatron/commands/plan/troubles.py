"""What is expected to go wrong with a job: flags of ``pier-megatron plan``."""

import argparse
import dataclasses
import math

from pier_megatron.errors import PierConfigError
from pier_megatron.values import Number, positive

_MOST = 1e6
_RESTART_MINUTES, _SAVE_SECONDS = 10.0, 30.0


@dataclasses.dataclass(frozen=True)
class Troubles:
    """What is expected to go wrong.

    Attributes:
        mtbf: Mean hours between failures of a node; infinite where none fails.
        spread: Standard deviation of the groups' seconds per iteration, as a share of their mean.
        restart: Seconds from a failure to the first iteration of what has restarted.
        save: Seconds for which a save holds up training.
    """

    mtbf: float
    spread: float
    restart: float
    save: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what goes wrong."""
    parser.add_argument(
        "--mtbf",
        type=positive(_MOST),
        metavar="HOURS",
        help="simulate failures: mean time between failures of one node (--optimizer pier)",
    )
    parser.add_argument(
        "--spread",
        type=Number(float, 0.0, 100.0),
        metavar="PERCENT",
        help="simulate uneven speeds: standard deviation of the groups' time of an iteration (--optimizer pier)",
    )
    parser.add_argument(
        "--restart",
        type=positive(_MOST),
        metavar="MINUTES",
        help=f"with --mtbf: from a failure to the first iteration after it. Default: {_RESTART_MINUTES:g}",
    )
    parser.add_argument(
        "--save-seconds",
        type=positive(_MOST),
        metavar="SECONDS",
        help=f"with --mtbf: for how long a save holds up training. Default: {_SAVE_SECONDS:g}",
    )


def troubles_of(options: argparse.Namespace) -> Troubles | None:
    """What the flags say; None if nothing is to be simulated.

    Raises:
        PierConfigError: If a flag says something of failures and there are none.
    """
    if options.mtbf is None:
        for flag, value in (("--restart", options.restart), ("--save-seconds", options.save_seconds)):
            if value is not None:
                raise PierConfigError(f"{flag} {value:g} is of failures, and none are simulated: add --mtbf HOURS, or drop it.")
        if options.spread is None:
            return None
    return Troubles(
        math.inf if options.mtbf is None else options.mtbf,
        (options.spread or 0.0) / 100,
        60 * (options.restart or _RESTART_MINUTES),
        options.save_seconds or _SAVE_SECONDS,
    )
