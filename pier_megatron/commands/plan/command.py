"""``pier-megatron plan``: what a job will cost and win on a cluster, from its launch command alone."""

import argparse
import gc
import json

from pier_megatron.commands.findings import Findings
from pier_megatron.commands.job_script import launch_line
from pier_megatron.commands.launch_command import add_command_argument
from pier_megatron.commands.plan import cluster as clusters
from pier_megatron.errors import PierConfigError
from pier_megatron.values import Removed, existing_file, png_to_write

# What imports torch is imported once the flags are right.

_REMOVED = {
    "--suggest": "compare the rows of plan with flags of your choice",
    **dict.fromkeys(
        ("--mtbf", "--spread", "--restart", "--save-seconds"), "plan simulates no failures; see docs/reliability.md"
    ),
    **dict.fromkeys(("--routes", "--held", "--stay", "--in-order", "--place"), clusters.ROUTES),
}
"""Flags of releases before, with what to do instead."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own flags."""
    clusters.add_arguments(parser)
    parser.add_argument("--log", type=existing_file, metavar="FILE", help="output of a short run of the job, for TFLOP/s")
    parser.add_argument(
        "--plot", type=png_to_write, metavar="PNG", help="draw the time to finish over the link's rate (--optimizer pier)"
    )
    for flag, instead in _REMOVED.items():
        parser.add_argument(flag, action=Removed, const=f"{flag} was removed: {instead}", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--details", action="store_true", help="print more than one screen")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_command_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the plan; returns the exit status."""
    try:
        cluster = clusters.chosen(options)
    except argparse.ArgumentTypeError as error:
        raise PierConfigError(f"--{error}.") from None
    # A sixth of the command's time would go into looking for garbage among the modules that Megatron imports.
    gc.disable()
    try:
        return _print_plan(options, cluster)
    finally:
        gc.enable()


def _print_plan(options: argparse.Namespace, cluster: clusters.Cluster) -> int:
    from pier_megatron.commands.launch_command import LaunchCommand
    from pier_megatron.commands.plan import picture, text
    from pier_megatron.commands.plan.planning import make_plan

    command = LaunchCommand.parse(launch_line(options.command, Findings()))
    plan = make_plan(command, cluster, options.flops is not None, options.log, options.flags)
    if options.plot and "groups" not in plan:
        raise PierConfigError(f"--plot {options.plot} draws what groups win: it needs a job with --optimizer pier.")
    if options.plot:
        picture.draw(plan, options.plot)
    print(json.dumps(plan, indent=2) if options.json else "\n".join(text.lines(plan, options.details)))
    return 0
