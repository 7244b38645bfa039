"""How many micro-batches a run will take, by Megatron's own count, before that has begun."""

import argparse
import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.tracker import stored_checkpoint

_BATCHES = "megatron.core.num_microbatches_calculator"

# More samples than any run has: the last phase of a ramp-up.
_ALL_SAMPLES = 2**62


@contextlib.contextmanager
def counted(args: argparse.Namespace) -> Iterator[None]:
    """Inside, Megatron counts the micro-batches of a run that has been validated and not been started."""
    begin = versions.require(_BATCHES, "init_num_microbatches_calculator")
    values = vars(args) | {"data_parallel_size": replicas(args)}
    begin(**{name: values[name] for name in inspect.signature(begin).parameters})
    try:
        yield
    finally:
        versions.require(_BATCHES, "unset_num_microbatches_calculator")()


def training_phases(args: argparse.Namespace) -> dict[int, int]:
    """Micro-batches of a replica in a training step, by global batch size in samples, from the first phase to the last."""
    update = versions.require(_BATCHES, "update_num_microbatches")
    batch_size = versions.require(_BATCHES, "get_current_running_global_batch_size")
    found: dict[int, int] = {}
    with counted(args):
        update(_ALL_SAMPLES, consistency_check=False)
        last, samples = batch_size(), 0
        while last not in found:
            update(samples, consistency_check=False)
            found[batch_size()] = versions.require(_BATCHES, "get_num_microbatches")()
            # A batch may have been rounded down to nothing (--decrease-batch-size-if-needed).
            samples += max(batch_size(), 1)
    return found


def phases_to_come(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Phases of :func:`training_phases` that a run still has to train: flag that sets them, samples, micro-batches."""
    ramps = ("step_batch_size_schedule", "rampup_batch_size")
    ramp = next((name for name in ramps if getattr(args, name, None)), None)
    phases = list(training_phases(args).items())
    if ramp and args.load and stored_checkpoint(Path(args.load), getattr(args, "ckpt_step", None)) and not args.finetune:
        # The first phases may lie behind the checkpoint, and be of a job with fewer replicas.
        phases = phases[-1:]
    return [
        (f"--{ramp.replace('_', '-')}, which has {batch}" if ramp else f"--global-batch-size {batch}", batch, count)
        for batch, count in phases
    ]


def evaluation_phase(args: argparse.Namespace) -> tuple[int, int]:
    """Global batch size in samples of an evaluation step, and its micro-batches; megatron-core 0.17 takes those of training."""
    batch = getattr(args, "eval_global_batch_size", args.global_batch_size)
    micro_batch = getattr(args, "eval_micro_batch_size", args.micro_batch_size)
    return batch, batch // (micro_batch * replicas(args))


def replicas(args: argparse.Namespace) -> int:
    """Ranks that take micro-batches of their own; some of megatron-core 0.19's do within a model replica."""
    size: int = args.data_parallel_size * getattr(args, "gtp_weight_remat_size", 1)
    return size
