"""The console command ``pier-megatron``."""

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from pier_megatron import experiments
from pier_megatron.errors import PierConfigError, suggestion
from pier_megatron.processes import INTERRUPTED, REFUSED
from pier_megatron.version import __version__

COMMANDS = {
    "demo": "watch a small GPT train with Pier, on GPUs or on the CPU",
    "doctor": "check the launch command of a job before it is queued",
    "plan": "predict memory, days and gain of a job on a cluster",
    "lighthouse": "run the rendezvous server for elastic islands",
} | {name: purpose for name, purpose in experiments.EXPERIMENTS.items() if purpose}

# Commands that earlier versions had, and what to do instead.
_REMOVED = {
    "plot": "TensorBoard shows runs side by side: tensorboard --logdir_spec NAME:FOLDER,NAME:FOLDER",
    "export": "Use examples/downstream/export_gpt2.py of the repository",
    "evaluate": "Use examples/downstream/run_tasks.py of the repository",
    "experts train": "Run bash FOLDER/train.sh, which pier-megatron experts plan writes, or submit it with sbatch",
    "experts export": "Use examples/downstream/export_mixture.py of the repository",
}

_FIRST = """first steps:
  pier-megatron demo
  pier-megatron doctor torchrun --nnodes 2 --nproc-per-node 8 ... -m pier_megatron pretrain_gpt.py ... --optimizer pier

Pages: README.md and docs/quickstart.md of the repository."""


class _Parser(argparse.ArgumentParser):
    """Names what is wrong, without a screen of usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Builds the parser, which shtab, for one, makes shell completion of."""
    from pier_megatron.commands import lighthouse
    from pier_megatron.commands.demo import command as demo
    from pier_megatron.commands.doctor import command as doctor
    from pier_megatron.commands.plan import command as plan

    modules = {"demo": demo, "doctor": doctor, "plan": plan, "lighthouse": lighthouse}
    modules |= experiments.modules("command")
    parser = _Parser(
        prog="pier-megatron",
        description="Tools around --optimizer pier for Megatron-LM.",
        epilog=_FIRST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pier-megatron {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="name")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        modules[name].add_arguments(command)
        command.set_defaults(run=modules[name].run, flags=tuple(command._option_string_actions))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand, or lists them if none is given; returns the exit status."""
    # Nine modules of Megatron say that Transformer Engine is absent, which doctor says in one line; PyTorch says that a
    # checkpoint is read by one process.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.|torch\.distributed\.checkpoint\.")
    # What Python says of Megatron's sources when it compiles them.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    words = sys.argv[1:] if argv is None else list(argv)
    understood = parser()
    for removed in _REMOVED.keys() & {" ".join(words[:1]), " ".join(words[:2])}:
        understood.error(f"{removed} was removed. {_REMOVED[removed]}")
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        understood.error(f"{words[0]}: no such command{suggestion(words[0], COMMANDS)}")
    options, unknown = understood.parse_known_args(words)
    if unknown:
        known = () if options.name is None else options.flags
        understood.error(f"{unknown[0]}: {options.name or understood.prog} does not know it{suggestion(unknown[0], known)}")
    if options.name is None:
        understood.print_help()
        return 0
    return carried_out(options.run, options)


def carried_out(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs a command; returns its exit status."""
    try:
        status = run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads the output has seen enough, as head has. Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except PierConfigError as error:
        print(*(f"ERROR: {message}" for message in error.args), sep="\n", file=sys.stderr)
        return REFUSED
    return status


if __name__ == "__main__":
    sys.exit(main())
