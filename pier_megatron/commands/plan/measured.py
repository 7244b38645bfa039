"""What a GPU achieves, from what a short run of the job has printed."""

import argparse
import dataclasses
import re
import statistics
from pathlib import Path

from pier_megatron.commands import planned_sizes
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, achieved
from pier_megatron.errors import PierConfigError

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.*?elapsed time per iteration \(ms\): (\d+(?:\.\d+)?)")
# Behind what torchrun and srun --label put before a line.
_ARGUMENT = re.compile(r"^(?:\[\w+\]:|\d+:)? *(\w+) \.{2,} (.+?)$", re.MULTILINE)

# The run must have these in common with the job, or its operations per second say nothing of it.
_ALIKE = ("num_layers", "hidden_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size")

# What turns its times into operations per second.
_COUNTED = ("world_size", "global_batch_size")


def operations_per_second(path: Path, args: argparse.Namespace, job: Job, cluster: Cluster) -> float:
    """Operations per second of a GPU in a run, by the job's own count of operations.

    Raises:
        PierConfigError: If the run is of another model or layout, or its iterations contain communication between nodes.
    """
    there, iterations = read(path)
    for name in _ALIKE:
        if iterations and there.get(name) != str(getattr(args, name)):
            raise PierConfigError(
                f"--log {path}: --{name.replace('_', '-')} is {there.get(name, 'not logged')} there and {getattr(args, name)} "
                "in the job: the log must be of a run with the job's model and layout, fewer GPUs if need be."
            )
    missing = [f"{name} is {there.get(name, 'not logged')}" for name in _COUNTED if not _number(there.get(name), 0)]
    if missing or not iterations:
        what = ", ".join(missing) or "no iteration is logged"
        raise PierConfigError(f"--log {path}: {what} there. Give all that the run printed, its arguments included.")
    groups = _number(there.get("pier_groups"), 1)
    # An elastic island logs ranks and batch of the whole run.
    gpus, batch = int(there["world_size"]), int(there["global_batch_size"])
    in_group = gpus // job.model_parallel // groups
    if in_group * job.tensor_parallel > cluster.gpus_per_node and in_group > job.replicas_in_group:
        raise PierConfigError(
            f"--log {path}: that run synchronised {in_group} replicas over nodes of {cluster.gpus_per_node} GPUs in each "
            "iteration, which hides what a GPU achieves. Log a run of one group, or with --optimizer pier."
        )
    seconds = statistics.median(steady(iterations, _number(there.get("pier_lazy_start_iters"), 0)))
    flops = planned_sizes.operations(args, batch)
    found = achieved(dataclasses.replace(job, flops=flops, gpus=gpus), cluster, seconds)
    if found <= 0:
        raise PierConfigError(
            f"--log {path}: iterations of {seconds * 1e3:,.1f} ms are shorter than the {cluster.overhead * 1e3:,.0f} ms that "
            "each takes besides compute: log a run of the job's own model on GPUs, or give --tflops."
        )
    return found


def read(path: Path) -> tuple[dict[str, str], dict[int, float]]:
    """Megatron's arguments in a run's output, as text by name, and the seconds of its logged iterations."""
    text = path.read_text(errors="replace")
    return (
        {name: value.strip() for name, value in _ARGUMENT.findall(text)},
        {int(iteration): float(ms) / 1e3 for iteration, ms in _ITERATION.findall(text)},
    )


def steady(iterations: dict[int, float], lazy_start: int) -> list[float]:
    """Seconds of the last half of the iterations, none of the lazy start: the first ones compile and warm up."""
    local = [seconds for iteration, seconds in sorted(iterations.items()) if iteration > lazy_start]
    return local[len(local) // 2 :] or list(iterations.values())


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdigit() else default
