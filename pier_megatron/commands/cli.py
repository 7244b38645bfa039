"""The console command ``pier-megatron``."""

import argparse
import sys
from collections.abc import Sequence

from pier_megatron.errors import PierConfigError
from pier_megatron.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    from pier_megatron.commands import doctor, evaluate, export, plot
    from pier_megatron.commands.demo import run as demo
    from pier_megatron.commands.plan import command as plan

    parser = argparse.ArgumentParser(prog="pier-megatron", description="Tools around --optimizer pier for Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"pier-megatron {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module, purpose in (
        ("demo", demo, "watch a small GPT train with Pier, on GPUs or on the CPU"),
        ("doctor", doctor, "check a job before it is queued"),
        ("plan", plan, "predict what a job will cost and win on a cluster"),
        ("plot", plot, "overlay runs from their TensorBoard logs"),
        ("export", export, "turn a checkpoint into a Hugging Face GPT-2"),
        ("evaluate", evaluate, "run the paper's thirteen downstream tasks on a model"),
    ):
        command = commands.add_parser(name, help=purpose)
        module.add_arguments(command)
        command.set_defaults(name=name, run=module.run)
    options = parser.parse_args(argv)
    try:
        status: int = options.run(options)
    except PierConfigError as error:
        print(f"pier-megatron {options.name}: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
