"""``pier-megatron doctor``: looks at a job before it is queued, and on demand at how it runs."""

import argparse
import importlib.metadata
import os
import platform
import subprocess

import psutil

from pier_megatron.commands.launch_command import LaunchCommand, add_command_argument
from pier_megatron.config import PierConfig
from pier_megatron.integration.examination import VARIABLE

# What decides between nodes whether NCCL finds the fast network, and what happens when it does not.
_NETWORK = {
    "NCCL_SOCKET_IFNAME": "unset: NCCL picks a network interface by itself, on some nodes another one than on others",
    "NCCL_IB_HCA": "unset: NCCL uses all InfiniBand adapters that it finds, those for storage among them",
}
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "pier-megatron")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the doctor's own flags."""
    parser.add_argument(
        "--start",
        action="store_true",
        help="also begin the job anew where you are, without its lazy start and without loading or saving anything, until its "
        "first iteration between outer steps is over, and list the collectives of that iteration",
    )
    add_command_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Checks the command, prints what it will be, starts it on demand; returns the exit status."""
    print("\n".join(examine(LaunchCommand.parse(options.command))), flush=True)
    if not options.start:
        return 0
    return subprocess.run(options.command, env=os.environ | {VARIABLE: "1"}).returncode


def examine(command: LaunchCommand) -> list[str]:
    """Checks a job without starting it; needs no GPU.

    Returns:
        What it will be, line by line; warnings begin with ``WARNING``.

    Raises:
        PierConfigError: If it would not start.
    """
    from pier_megatron.integration import planned_job, refusals
    from pier_megatron.integration.startup import schedule

    lines = [f"{command.nodes} nodes of {command.ranks_per_node} ranks, Python {platform.python_version()}, " + _versions()]
    job = command.planned_job()
    args, config = job.args, job.config
    if job.unknown:
        lines.append(f"WARNING: not Megatron's: {' '.join(job.unknown)}; right if {command.script} knows them, else misspelt")
    topology = planned_job.planned_topology(args, command.ranks_per_node)
    topology.check()
    lines += [f"{config.groups} groups of {len(topology.members(0))} ranks, preset {config.preset}", *topology.describe()]
    lines += [line.removeprefix("  ") for line in schedule(config)]
    lines.append(_outer_state(args, config, command, planned_job.parameters_of_largest_shard(args)))
    checkpoint = planned_job.check_checkpoint(args, config, len(topology.members(0)))
    lines += [f"--load {checkpoint}"] if checkpoint else []
    lines += [f"WARNING: {warning}" for warning in [*config.warnings(), *topology.warnings(), *refusals.warnings(args)]]
    if command.nodes > 1:
        lines += [
            f"{name}={os.environ[name]}" if name in os.environ else f"{name} {default}" for name, default in _NETWORK.items()
        ]
        if os.environ.get("NCCL_IB_DISABLE") == "1":
            lines.append("WARNING: NCCL_IB_DISABLE=1 keeps NCCL off InfiniBand: everything between nodes goes over sockets")
    if command.restarts and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        lines.append(
            f"WARNING: --max-restarts {command.restarts}: a restarted job may meet at the addresses of the one that has died. "
            "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
    return lines


def _outer_state(args: argparse.Namespace, config: PierConfig, command: LaunchCommand, parameters: int | None) -> str:
    """What the outer state takes, and whether this machine's host memory would hold it."""
    from pier_megatron.outer.state import bytes_per_parameter, host_bytes

    size = bytes_per_parameter(config)
    if parameters is None:
        return (
            f"outer state: {size} bytes per owned parameter; how many hangs on the tokenizer (give --vocab-size to see it here)"
        )
    owners = args.data_parallel_size * args.context_parallel_size // config.groups
    per_rank = size * parameters / owners
    sizes = f"{size} bytes x {parameters:,} parameters / {owners} ranks = {per_rank / 1e9:,.2f} GB per rank"
    if not config.offload:
        return f"outer state: about {sizes} of device memory"
    needed = command.ranks_per_node * host_bytes(config, parameters // owners, is_pinned=True)
    free = psutil.virtual_memory().available
    verdict = "enough" if needed < free else "WARNING: not enough, if the nodes are like this one"
    there = f"{needed / 1e9:,.2f} GB of host memory per node, as PyTorch pins it; {free / 1e9:,.2f} GB are free here: {verdict}"
    return f"outer state: about {sizes}, {there}"


def _versions() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} absent")
    return ", ".join(found)
