"""Reads launch commands: what a job will be, from what its user types."""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pier_megatron import launcher
from pier_megatron.commands.srun import Surroundings, expanded, surroundings, through_script, understood
from pier_megatron.cpu.preparations import missing_cpu_flags
from pier_megatron.errors import PierConfigError
from pier_megatron.values import whole

# torchrun's rendezvous address by default.
_NO_ADDRESS = "127.0.0.1"
_PYTHON = re.compile(r"python[\d.]*")


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """A job as torchrun will start it, or srun without it.

    Attributes:
        nodes: Number of nodes; of a range, the most.
        ranks_per_node: Processes on each.
        script: The training script.
        arguments: The script's own.
        restarts: How often torchrun starts it again after a failure.
        rendezvous: How its nodes find each other: ``static`` if ``--node-rank`` numbers them, otherwise torchrun's backend that
            does; None without an address to meet at.
        launcher: Program that starts the processes: torchrun, or none but Python itself, which srun may start many times.
        has_plugin: Whether ``-m pier_megatron`` starts the script.
        is_module: Whether the script is the name of a module.
        surroundings: What stands before the launcher.
        fewest_nodes: Number of nodes with which it starts, if that may be less than ``nodes``.
    """

    nodes: int
    ranks_per_node: int
    script: str
    arguments: tuple[str, ...]
    restarts: int = 0
    rendezvous: str | None = None
    launcher: Literal["torchrun", "python"] = "torchrun"
    has_plugin: bool = False
    is_module: bool = False
    surroundings: Surroundings = dataclasses.field(default_factory=Surroundings)
    fewest_nodes: int | None = None

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.nodes * self.ranks_per_node

    @classmethod
    def parse(cls, words: Sequence[str]) -> "LaunchCommand":
        """Reads ``[srun|mpirun ...] torchrun ... [-m pier_megatron [--device D]] SCRIPT ARGUMENTS``, or through python.

        Raises:
            PierConfigError: If it is no such command.
        """
        flat, unread = expanded(words), list[str]()
        if not any(_is_launcher(word) or _is_python(word) for word in flat):
            flat, unread = through_script(flat)
        for kind, read in ((_is_launcher, cls._by_torchrun), (_is_python, cls._by_python)):
            own = next((place + 1 for place, word in enumerate(flat) if kind(word)), None)
            if own is not None:
                return read(flat[own:], surroundings(words, flat[: own - 1]))
        reason = f"; {' and '.join(unread)} cannot be read from {Path.cwd()}" if unread else ""
        if "deepspeed" in map(os.path.basename, flat):
            reason = "; deepspeed starts Megatron-DeepSpeed, a fork that Pier has no part in"
        raise PierConfigError(
            f"no torchrun in this command, and no python{reason}. Give the launch command of the job, such as torchrun "
            "--nnodes 4 --nproc-per-node 8 -m pier_megatron pretrain_gpt.py ... --optimizer pier; in a batch script, write "
            "pier-megatron and its command in front of that line, and run the script with bash, where the scripts in the line "
            f"are. The command: {' '.join(words) or '(nothing)'}"
        )

    @classmethod
    def _by_torchrun(cls, words: Sequence[str], around: Surroundings) -> "LaunchCommand":
        from torch.distributed.run import get_args_parser

        parser = get_args_parser()
        parser.prog = "torchrun"
        options = understood(parser.parse_args, words)
        script, arguments, has_plugin = _started(options.module, options.training_script, options.training_script_args)
        fewest, _, most = options.nnodes.rpartition(":")
        nodes = _count("--nnodes", options.nnodes, most, "the number of nodes, N or MIN:MAX")
        ranks = "the number of GPUs per node, which cannot be seen from here"
        ranks_per_node = _count("--nproc-per-node", options.nproc_per_node, options.nproc_per_node, ranks)
        has_address = options.rdzv_endpoint or options.master_addr != _NO_ADDRESS
        return cls(
            nodes,
            ranks_per_node,
            script,
            tuple(arguments),
            int(options.max_restarts),
            options.rdzv_backend if has_address else None,
            has_plugin=has_plugin,
            is_module=options.module and not has_plugin,
            surroundings=around,
            fewest_nodes=int(fewest) if fewest.isdigit() else None,
        )

    @classmethod
    def _by_python(cls, words: Sequence[str], around: Surroundings) -> "LaunchCommand":
        rest = list(words)
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
        as_module = rest[:1] == ["-m"]
        rest = rest[1:] if as_module else rest
        if not rest or rest[0] == "-c":
            raise PierConfigError(f"python {' '.join(words)}: no training script after python.")
        script, arguments, has_plugin = _started(as_module, rest[0], rest[1:])
        if around.starter is not None and (around.nodes is None or around.tasks_per_node is None):
            flags = "--nodes and --ntasks-per-node" if around.starter == "srun" else "-np and --npernode"
            raise PierConfigError(
                f"{around.starter}: the number of nodes or tasks cannot be seen from here. Add {flags}, or call pier-megatron "
                "inside the allocation."
            )
        nodes, ranks = around.nodes or 1, around.tasks_per_node or 1
        is_module = as_module and not has_plugin
        return cls(nodes, ranks, script, tuple(arguments), 0, "static", "python", has_plugin, is_module, surroundings=around)

    def find_megatron(self) -> None:
        """Makes this process import the Megatron that the job would and modules of the script's folder: a checkout first."""
        folder = Path(self.script).resolve().parent
        if str(folder) not in sys.path:
            is_checkout = (folder / "megatron" / "core" / "package_info.py").is_file()
            sys.path.insert(0 if is_checkout else len(sys.path), str(folder))


def add_command_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the words of a launch command, as :meth:`LaunchCommand.parse` reads them."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="the launch command of the job (torchrun ... SCRIPT ...)",
    )


def _started(as_module: bool, name: str, words: Sequence[str]) -> tuple[str, list[str], bool]:
    """The training script, its arguments, and whether the plugin's launcher starts it, for a script or a module ``name``."""
    if not (as_module and name == "pier_megatron"):
        return name, list(words), False
    options = understood(launcher.parser().parse_args, words)
    added = missing_cpu_flags(options.arguments) if options.device == "cpu" else []
    return options.script, options.arguments + added, True


def _count(flag: str, given: str, number: str, what: str) -> int:
    try:
        return int(whole(1)(number))
    except argparse.ArgumentTypeError as error:
        raise PierConfigError(f"{flag} {given}: give {what}. {error}.") from None


def _is_python(word: str) -> bool:
    return _PYTHON.fullmatch(Path(word).name) is not None


def _is_launcher(word: str) -> bool:
    return Path(word).name == "torchrun" or word in ("torch.distributed.run", "torch.distributed.launch")
