"""The console command ``pier-megatron``."""

import argparse
import sys
from collections.abc import Sequence

from pier_megatron.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    from pier_megatron import doctor, evaluate, export, plan, plot
    from pier_megatron.demo import run as demo

    parser = argparse.ArgumentParser(prog="pier-megatron", description="Tools around --optimizer pier for Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"pier-megatron {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("demo", help="watch a small GPT train with Pier, on GPUs or on the CPU")
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)
    command = commands.add_parser("doctor", help="check a job before it is queued")
    doctor.add_arguments(command)
    command.set_defaults(run=doctor.run)
    command = commands.add_parser("plan", help="predict what a job will cost and win on a cluster")
    plan.add_arguments(command)
    command.set_defaults(run=plan.run)
    command = commands.add_parser("plot", help="overlay runs from their TensorBoard logs")
    plot.add_arguments(command)
    command.set_defaults(run=plot.run)
    command = commands.add_parser("export", help="turn a checkpoint into a Hugging Face GPT-2")
    export.add_arguments(command)
    command.set_defaults(run=export.run)
    command = commands.add_parser("evaluate", help="run the paper's thirteen downstream tasks on a model")
    evaluate.add_arguments(command)
    command.set_defaults(run=evaluate.run)
    options = parser.parse_args(argv)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
