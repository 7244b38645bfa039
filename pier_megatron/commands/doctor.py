"""``pier-megatron doctor``: looks at a job before it is queued, and on demand at how it runs."""

import argparse
import os
import platform
import subprocess
from pathlib import Path

from pier_megatron.commands.launch_command import LaunchCommand, add_command_argument
from pier_megatron.commands.trust import TRUSTED_ONLY
from pier_megatron.config import PierConfig
from pier_megatron.errors import suggestion

# What decides between nodes whether NCCL and gloo find the fast network, and what happens when it does not.
_NETWORK = {
    "NCCL_SOCKET_IFNAME": "unset: NCCL picks a network interface by itself, on some nodes another one than on others",
    "GLOO_SOCKET_IFNAME": "unset: gloo takes the interface of the host's name, which may be one that other nodes cannot reach",
    "NCCL_IB_HCA": "unset: NCCL uses all InfiniBand adapters that it finds, those for storage among them",
}
# What decides how fast NCCL is over sockets.
_SOCKETS = {
    "NCCL_SOCKET_NTHREADS": "unset: one thread sends for each connection; NCCL advises 4 for 100 Gbit/s",
    "NCCL_NSOCKS_PERTHREAD": "unset: one socket per thread; 4 or more where one TCP stream does not fill the link, as over a "
    "long distance. Threads x sockets may be 64",
}
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "pier-megatron")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the doctor's own flags."""
    parser.epilog = TRUSTED_ONLY
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
    from pier_megatron.integration.examination import VARIABLE

    return subprocess.run(options.command, env=os.environ | {VARIABLE: "1"}).returncode


def examine(command: LaunchCommand) -> list[str]:
    """Checks a job without starting it; needs no GPU.

    Returns:
        What it will be, line by line; warnings begin with ``WARNING``.

    Raises:
        PierConfigError: If it would not start.
    """
    from pier_megatron.integration.compression import choice
    from pier_megatron.integration.pipeline import layered, skipping
    from pier_megatron.integration.refusals import flag

    where = f"{_count(command.nodes, 'node')} of {_count(command.ranks_per_node, 'rank')}"
    lines = [f"{where}, Python {platform.python_version()}, {_versions()}"]
    job = command.planned_job()
    args, config = job.args, job.config
    if job.unknown:
        meant = suggestion(job.unknown[0], map(flag, vars(args)))
        lines.append(
            f"WARNING: not Megatron's: {' '.join(job.unknown)}; right if {command.script} knows them, else misspelt{meant}"
        )
    disappointing: list[str] = []
    if config is None:
        replicas = _count(args.data_parallel_size * args.context_parallel_size, "model replica")
        lines.append(
            f"--optimizer {args.optimizer}, {replicas}: every iteration is synchronous, without groups and outer steps"
        )
    else:
        found, disappointing = _outer_loop(args, config, command)
        lines += found
    lines += [*layered.describe(args), *choice.describe(args)]
    lines += [line.removeprefix("  ") for line in skipping.describe(args)]
    disappointing += [
        *layered.disappointments(args),
        *skipping.disappointments(args),
        *_start_troubles(args, config, command),
    ]
    lines += [f"WARNING: {warning}" for warning in disappointing]
    if command.nodes > 1:
        lines += _network()
    return lines


def _outer_loop(args: argparse.Namespace, config: PierConfig, command: LaunchCommand) -> tuple[list[str], list[str]]:
    """What the outer loop of a job will be, and what it deserves to be warned of."""
    from pier_megatron.integration import planned_job
    from pier_megatron.integration.refusals import disappointments
    from pier_megatron.integration.startup import schedule

    topology = planned_job.planned_topology(args, command.ranks_per_node)
    topology.check()
    ranks = len(topology.members(0))
    lines = [f"{_count(config.groups, 'group')} of {_count(ranks, 'rank')}, preset {config.preset}", *topology.describe()]
    lines += [line.removeprefix("  ") for line in schedule(config)]
    lines.append(_outer_state(args, config, command, planned_job.parameters_of_largest_shard(args)))
    checkpoint = planned_job.check_checkpoint(args, config, ranks)
    lines += [f"--load {checkpoint}"] if checkpoint else []
    return lines, [*config.warnings(), *topology.warnings(), *disappointments(args, config)]


def _start_troubles(args: argparse.Namespace, config: PierConfig | None, command: LaunchCommand) -> list[str]:
    """What keeps a job from starting, or from starting as it is meant, that the arguments alone do not show."""
    from pier_megatron.integration.datasets import compiled_for_another_python

    found = []
    if command.nodes > 1 and command.rendezvous is None:
        found.append(
            f"--nnodes {command.nodes} without --master-addr or --rdzv-endpoint: each node would wait for itself. Give "
            "all nodes the address of the first one"
        )
    if config is not None and command.nodes > config.groups and command.rendezvous not in (None, "static"):
        found.append(
            f"--rdzv-backend {command.rendezvous} numbers the nodes as they arrive, so that the nodes of a group need not be "
            "neighbours. Where groups are sites or racks, use --node-rank with --master-addr instead"
        )
    if command.restarts and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        found.append(
            f"--max-restarts {command.restarts}: a restarted job may meet at the addresses of the one that has died. Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
    needs_order = args.distributed_backend == "nccl" and args.tensor_model_parallel_size * args.context_parallel_size > 1
    if needs_order and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        found.append(
            "CUDA_DEVICE_MAX_CONNECTIONS is not 1, without which Megatron refuses tensor and context parallelism on GPUs "
            "before Blackwell"
        )
    in_vain = compiled_for_another_python(Path(command.script).resolve().parent / "megatron" / "core" / "datasets")
    return [*found, in_vain] if in_vain else found


def _network() -> list[str]:
    """What the environment says of the network between nodes."""
    over_sockets = os.environ.get("NCCL_IB_DISABLE") == "1"
    shown = _NETWORK | (_SOCKETS if over_sockets else {})
    lines = [f"{name}={os.environ[name]}" if name in os.environ else f"{name} {default}" for name, default in shown.items()]
    if over_sockets:
        lines.append("WARNING: NCCL_IB_DISABLE=1 keeps NCCL off InfiniBand: everything between nodes goes over sockets")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _outer_state(args: argparse.Namespace, config: PierConfig, command: LaunchCommand, parameters: int | None) -> str:
    """What the outer state takes, and whether this machine's host memory would hold it."""
    import psutil

    from pier_megatron.integration.inner.requirements import are_shared_out
    from pier_megatron.outer.memory import bytes_per_parameter, host_bytes

    size = bytes_per_parameter(config)
    if parameters is None:
        return (
            f"outer state: {size} bytes per owned parameter; how many hangs on the tokenizer (give --vocab-size to see it here)"
        )
    owners = args.data_parallel_size * args.context_parallel_size // config.groups if are_shared_out(args) else 1
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
    import importlib.metadata

    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} absent")
    return ", ".join(found)
