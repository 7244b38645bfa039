"""``pier-megatron plan``: what a job will cost and win on a cluster, from its launch command alone."""

import argparse
import gc
import json
from pathlib import Path

from pier_megatron.commands.launch_command import add_command_argument
from pier_megatron.commands.plan import cluster as clusters
from pier_megatron.commands.plan import routes, troubles
from pier_megatron.errors import PierConfigError
from pier_megatron.values import existing_file, existing_folder, png_to_write

# What imports torch is imported once the flags are right.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own flags."""
    clusters.add_arguments(parser)
    troubles.add_arguments(parser)
    routes.add_arguments(parser)
    parser.add_argument(
        "--log",
        type=_folder_or_file,
        metavar="PATH",
        help="output of a short run of the job, or its TensorBoard folder (--log-timers-to-tensorboard), for TFLOP/s; the "
        "folder of a run with Pier also predicts the loss",
    )
    parser.add_argument(
        "--plot",
        type=png_to_write,
        metavar="PNG",
        help="draw the time to finish over H, link rate and GPUs (--optimizer pier)",
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="name the interval, codec, overlap and preset that lose least on this link, as flags to paste (--optimizer pier)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_command_argument(parser)


def _folder_or_file(text: str) -> Path:
    return existing_folder(text) if Path(text).is_dir() and text else existing_file(text)


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

    expected = troubles.troubles_of(options)
    command = LaunchCommand.parse(options.command)
    plan = make_plan(command, cluster, options.tflops is not None, options.log, expected, routes.wanted_of(options))
    if expected is not None and "faults" not in plan:
        raise PierConfigError(
            "--mtbf and --spread simulate groups that wait for each other: they need a job with --optimizer pier and more than "
            f"one group; this one has {plan.get('groups', 'none')}."
        )
    if options.plot and "sweeps" not in plan:
        raise PierConfigError(f"--plot {options.plot} draws what groups win: it needs a job with --optimizer pier.")
    if options.suggest and "suggestions" not in plan:
        raise PierConfigError("--suggest names flags for groups: it needs a job with --optimizer pier.")
    if options.plot:
        picture.draw(plan, options.plot)
    print(json.dumps(plan, indent=2) if options.json else "\n".join(text.lines(plan, options.suggest)))
    return 0
