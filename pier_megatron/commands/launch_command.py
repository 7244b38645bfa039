"""Reads launch commands: what a job will be, from what its user types."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pier_megatron.cpu.preparations import missing_cpu_flags
from pier_megatron.errors import PierConfigError
from pier_megatron.flags import check_words
from pier_megatron.values import whole

if TYPE_CHECKING:
    from pier_megatron.integration.planned_job import PlannedJob

# Where torchrun meets if it is told nothing.
_NO_ADDRESS = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """A job as torchrun will start it.

    Attributes:
        nodes: Number of nodes.
        ranks_per_node: Processes on each.
        script: The training script.
        arguments: The script's own.
        restarts: How often torchrun starts it again after a failure.
        rendezvous: How its nodes find each other: ``static`` if ``--node-rank`` numbers them, otherwise torchrun's backend that
            does; None without an address to meet at.
    """

    nodes: int
    ranks_per_node: int
    script: str
    arguments: tuple[str, ...]
    restarts: int = 0
    rendezvous: str | None = None

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.nodes * self.ranks_per_node

    @classmethod
    def parse(cls, words: Sequence[str]) -> "LaunchCommand":
        """Reads ``[srun ...] torchrun ... [-m pier_megatron [--device D]] SCRIPT ARGUMENTS``, or the same through python.

        Args:
            words: Of the command, as a shell splits them.

        Raises:
            PierConfigError: If it is no such command, or one of its ``--pier-*`` flags cannot be.
        """
        own = next((place + 1 for place, word in enumerate(words) if _is_launcher(word)), None)
        if own is None:
            raise PierConfigError(
                f"{' '.join(words) or '(nothing)'}: no torchrun in this command. Give the launch command of the job, such as "
                "torchrun --nnodes 4 --nproc-per-node 8 -m pier_megatron pretrain_gpt.py ... --optimizer pier."
            )
        check_words(words[own:])
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(list(words[own:]))
        script, arguments = options.training_script, list(options.training_script_args)
        if options.module and script == "pier_megatron":
            words = [part for word in arguments[:1] for part in word.split("=")] + arguments[1:]
            device, words = (words[1:2], words[2:]) if words[:1] == ["--device"] else ([], words)
            if not words:
                raise PierConfigError("-m pier_megatron: no training script behind it.")
            script, *arguments = words
            if device == ["cpu"]:
                arguments += missing_cpu_flags(arguments)
        nodes = _count("--nnodes", options.nnodes, options.nnodes.rpartition(":")[2], "the number of nodes, N or MIN:MAX")
        ranks = "the number of GPUs per node, which cannot be seen from here"
        ranks_per_node = _count("--nproc-per-node", options.nproc_per_node, options.nproc_per_node, ranks)
        has_address = options.rdzv_endpoint or options.master_addr != _NO_ADDRESS
        rendezvous = options.rdzv_backend if has_address else None
        return cls(nodes, ranks_per_node, script, tuple(arguments), int(options.max_restarts), rendezvous)

    def planned_job(self) -> "PlannedJob":
        """The job as Megatron will see it; needs no GPU.

        Raises:
            PierConfigError: If Megatron or the plugin refuses it, or it does not use Pier.
        """
        _stand_in_for_a_gpu()
        from pier_megatron.integration import planned_job

        return planned_job.planned_job(self.ranks, self.ranks_per_node, [self.script, *self.arguments])

    def validated_arguments(self) -> argparse.Namespace:
        """As :meth:`planned_job`, of a job with any optimizer: Megatron's arguments."""
        _stand_in_for_a_gpu()
        from pier_megatron.integration import planned_job

        return planned_job.validated_arguments(self.ranks, self.ranks_per_node, [self.script, *self.arguments])[0]


def _stand_in_for_a_gpu() -> None:
    import torch

    from pier_megatron.cpu import emulation

    if not torch.cuda.is_available():
        emulation.install()


def add_command_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the words of a launch command, as :meth:`LaunchCommand.parse` reads them."""
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the launch command of the job: torchrun ... SCRIPT ..."
    )


def _count(flag: str, given: str, number: str, what: str) -> int:
    try:
        return int(whole(1)(number))
    except argparse.ArgumentTypeError as error:
        raise PierConfigError(f"{flag} {given}: give {what}. {error}.") from None


def _is_launcher(word: str) -> bool:
    return Path(word).name == "torchrun" or word in ("torch.distributed.run", "torch.distributed.launch")
