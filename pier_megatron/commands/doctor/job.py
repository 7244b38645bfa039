"""What a job will be, line by line, and everything that the doctor looks at on the way."""

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from pier_megatron import features
from pier_megatron.commands import job_arguments, planned_job, planned_sizes
from pier_megatron.commands.doctor import job_files, launch, model, network
from pier_megatron.commands.findings import Findings
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.script_sources import ScriptSources
from pier_megatron.config import PierConfig
from pier_megatron.integration import cautions, startup
from pier_megatron.integration.arguments import config_from_args, uses_group_settings
from pier_megatron.integration.checkpoint.size import bytes_per_parameter
from pier_megatron.integration.datasets import compiled_for_another_python
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.values import is_in_object_store
from pier_megatron.version import __version__


def examine(command: LaunchCommand, findings: Findings, flags: Collection[str] = ()) -> None:
    """Looks at a job without starting it; ``flags`` are doctor's own, which belong before the job."""
    command.find_megatron()
    where = f"{_count(command.nodes, 'node')} of {_count(command.ranks_per_node, 'rank')}"
    findings.notes.append(f"{where}, Python {platform.python_version()}, {_versions()}")
    sources, given = ScriptSources.of(command), job_files.paths(command.arguments)
    launch.look(command, sources, findings)
    job_files.look(given, findings)
    args = job_arguments.read(command, sources, findings, before=flags)
    if args is not None:
        findings.notes += job_arguments.assume_vocabulary(args)
        with findings.collecting():
            _describe(args, command, findings)
        if not findings.errors:
            model.look(args, command, sources, findings)
    if command.nodes > 1:
        network.look(findings)


def _describe(args: argparse.Namespace, command: LaunchCommand, findings: Findings) -> None:
    """What a job with validated arguments will be."""
    config = config_from_args(args) if uses_pier(args) else None
    if config is not None:
        unknown = planned_sizes.why_unknown(args)
        taken = planned_sizes.lines_of_outer_loop(args, config) if unknown is None else [unknown]
        ranks = describe_groups(args, config, command.ranks_per_node, findings, taken)
        look_at_checkpoint(args, config, ranks, findings)
    else:
        replicas = _count(args.data_parallel_size * args.context_parallel_size, "model replica")
        findings.notes.append(
            f"--optimizer {args.optimizer}, {replicas}: every iteration is synchronous, without groups and outer steps"
        )
        if not uses_group_settings(args):
            findings.warnings.append(f"--optimizer {args.optimizer}: the job does not use Pier. Give --optimizer pier")
    for feature in features.used(args):
        findings.notes += feature.describe(args)
        findings.warnings += feature.warnings(args)
    _look_at_room(args, config, findings)
    _look_at_machine(args, config, command, findings)


def describe_groups(args: Any, config: PierConfig, ranks_per_node: int, findings: Findings, taken: Sequence[str] = ()) -> int:
    """Adds what start-up will say of the groups, with the lines ``taken`` on memory, and warnings.

    Returns:
        Number of ranks of a group.
    """
    topology = planned_job.planned_topology(args, ranks_per_node)
    with findings.collecting():
        topology.check()
    findings.notes += startup.lines(config, topology, topology.describe(), taken, planned_sizes.device_type(args))
    findings.warnings += [*config.warnings(), *cautions.warnings(args, config)]
    return len(topology.members(0))


def look_at_checkpoint(args: Any, config: PierConfig, ranks_in_group: int, findings: Findings) -> None:
    """Describes the checkpoint that a validated job would load, or the reason why the job would refuse it."""
    with findings.collecting():
        checkpoint = planned_job.check_checkpoint(args, config, ranks_in_group)
        findings.notes += [f"--load {checkpoint}"] if checkpoint else []


def _look_at_machine(args: argparse.Namespace, config: PierConfig | None, command: LaunchCommand, findings: Findings) -> None:
    """What the arguments alone do not show."""
    if config is not None and command.nodes > config.groups and command.rendezvous not in (None, "static"):
        findings.warnings.append(
            f"--rdzv-backend {command.rendezvous} numbers the nodes as they arrive, so that the nodes of a group need not be "
            "neighbours. Where groups are sites or racks, use --node-rank with --master-addr instead"
        )
    needs_order = args.distributed_backend == "nccl" and args.tensor_model_parallel_size * args.context_parallel_size > 1
    if needs_order and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        findings.warnings.append(
            "CUDA_DEVICE_MAX_CONNECTIONS is not 1, without which Megatron refuses tensor and context parallelism on GPUs "
            "before Blackwell"
        )
    in_vain = compiled_for_another_python(Path(command.script).resolve().parent / "megatron" / "core" / "datasets")
    findings.warnings += [in_vain] if in_vain else []


def _look_at_room(args: argparse.Namespace, config: PierConfig | None, findings: Findings) -> None:
    """Compares a checkpoint with the room for it."""
    if args.save is None or is_in_object_store(args.save) or planned_sizes.why_unknown(args) is not None:
        return
    parameters, parts = planned_sizes.parameters_of_model(args), bytes_per_parameter(args, config)
    each, free = sum(parts.values()), shutil.disk_usage(job_files.nearest(Path(args.save))).free
    needed = each * parameters
    arithmetic = " + ".join(f"{size:g} ({name})" for name, size in parts.items())
    findings.notes.append(
        f"--save {args.save}: a checkpoint takes about {parameters:,} parameters x {each:g} bytes = {needed / 1e9:,.2f} GB: "
        f"{arithmetic}; {free / 1e9:,.2f} GB are free there"
    )
    if needed > free:
        saves_less = config is not None and config.save_inner_state == "all" and free
        first = ", or --pier-save-inner-state first" if saves_less else ""
        findings.warnings.append(
            f"--save {args.save}: a checkpoint of about {needed / 1e9:,.2f} GB does not fit into the {free / 1e9:,.2f} GB that "
            f"are free there. Make room{first}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _versions() -> str:
    # Behind a plus, an installed Megatron has the commit of whatever repository it lies in.
    found = [f"torch {torch.__version__}", f"megatron-core {versions.megatron_version().partition('+')[0]}"]
    for package in ("transformer-engine", "apex"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} absent")
    return ", ".join([*found, f"pier-megatron {__version__}"])
