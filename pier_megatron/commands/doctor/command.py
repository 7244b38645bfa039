"""``pier-megatron doctor``: looks at a job before it is queued, and on demand at how it runs."""

import argparse
import gc
import os
import subprocess

from pier_megatron.commands.findings import Findings
from pier_megatron.commands.job_script import launch_line
from pier_megatron.commands.launch_command import LaunchCommand, add_command_argument
from pier_megatron.commands.trust import TRUSTED_ONLY
from pier_megatron.errors import PierConfigError
from pier_megatron.values import function_name, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the doctor's own flags."""
    parser.epilog = (
        "The last line is the verdict: OK, the number of warnings, or that the job will not start. Only the last of these ends "
        f"with exit status 1. {TRUSTED_ONLY}"
    )
    parser.add_argument(
        "--start",
        action="store_true",
        help="also start the job on this machine, without its lazy start, loading and saving nothing, for one iteration "
        "between outer steps, and list the collectives of that iteration",
    )
    recipe = parser.add_argument_group("a recipe of Megatron-Bridge, instead of a launch command")
    recipe.add_argument(
        "--recipe",
        type=function_name,
        metavar="MODULE:FUNCTION",
        help="check the configuration that a function without arguments returns, such as recipes:llama_tiny in this folder",
    )
    recipe.add_argument("--nodes", type=whole(1), metavar="N", help="number of nodes (default: 1)")
    recipe.add_argument("--ranks-per-node", type=whole(1), metavar="N", help="number of processes on each node (default: 8)")
    add_command_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Prints what is found of a job and the verdict, having started the job on demand; returns the exit status."""
    _check(options)
    findings = Findings()
    # Importing PyTorch and Megatron makes millions of objects and leaves no garbage; looking for it takes a fifth of the time.
    gc.disable()
    with findings.collecting():
        if options.recipe is not None:
            from pier_megatron.commands.doctor import recipe

            recipe.examine(options.recipe, options.nodes or 1, options.ranks_per_node or 8, findings)
        else:
            options.command = launch_line(options.command, findings)
            command = LaunchCommand.parse(options.command)
            from pier_megatron.commands.doctor import job

            job.examine(command, findings, options.flags)
    gc.freeze()
    gc.enable()
    print("\n".join(findings.lines()), flush=True)
    if options.start and not findings.errors:
        _start(options.command, findings)
    print(findings.verdict, flush=True)
    return int(bool(findings.errors))


def _check(options: argparse.Namespace) -> None:
    """Refuses flags that do not go together."""
    if options.recipe is not None and (options.command or options.start):
        raise PierConfigError(
            f"--recipe {options.recipe} replaces the launch command, and starts nothing: drop the command and --start."
        )
    if options.recipe is None and not options.command:
        raise PierConfigError(
            "no launch command is given. Give it after doctor, such as torchrun ... SCRIPT ..., or a job script."
        )
    for flag, given in (("--nodes", options.nodes), ("--ranks-per-node", options.ranks_per_node)):
        if options.recipe is None and given is not None:
            raise PierConfigError(f"{flag} {given} is for --recipe. A launch command has --nnodes and --nproc-per-node.")


def _start(words: list[str], findings: Findings) -> None:
    from pier_megatron.integration.examination import CROSSING, VARIABLE

    crosses = False
    try:
        started = subprocess.Popen(words, env=os.environ | {VARIABLE: "1"}, stdout=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        raise PierConfigError(f"--start: {words[0]} cannot be started: {error.strerror}.") from error
    with started:
        for line in started.stdout or ():
            print(line, end="", flush=True)
            crosses = crosses or CROSSING in line
    found = [f"the job has ended with exit status {started.returncode}; its own log is above."] if started.returncode else []
    if crosses:
        found.append(
            "what is listed above reduces over ranks of several groups in every iteration, so that groups train at the pace of "
            "the network between them. Reduce over process groups of Megatron's or of torch.distributed instead: they are the "
            "group's own."
        )
    findings.errors += [f"--start: {problem}" for problem in found]
    print("".join(f"ERROR: {each}\n" for each in findings.errors), end="", flush=True)
