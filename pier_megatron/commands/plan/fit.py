"""Whether a job fits into a GPU, and what would make it fit."""

import argparse
import dataclasses
from collections.abc import Iterator

from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.sizes import outer_memory
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

_ACTIVATIONS = "activations, without recomputation"


def memory_of(args: argparse.Namespace, config: PierConfig | None) -> dict[str, float]:
    """Bytes of a GPU's memory that the job takes, by purpose."""
    from pier_megatron.integration import planned_sizes

    return planned_sizes.memory(args) | ({} if config is None else outer_memory(args, config))


def needed(memory: dict[str, float], args: argparse.Namespace) -> float:
    """Bytes that a GPU must have: all of them, without activations that are recomputed in full, which nobody counts here."""
    return sum(size for name, size in memory.items() if name != _ACTIVATIONS or args.recompute_granularity != "full")


def remedy(args: argparse.Namespace, config: PierConfig | None, there: float) -> tuple[str, float] | None:
    """The least change that makes a job fit, as flags, and the bytes that it then needs; None if there is none.

    The changes leave its iterations as fast as they were, except recomputation.
    """
    for flags, changed, changed_config in _changes(args, config):
        size = needed(memory_of(changed, changed_config), changed)
        if size <= there:
            return " ".join(flags), size
    return None


def can_overlap(args: argparse.Namespace, config: PierConfig, there: float) -> bool:
    """Whether the job starts with exchanges hidden behind half an interval, and fits by no more than it needs without."""
    hidden = changed_settings(args, config, overlap=config.sync_interval // 2)
    if hidden is None:
        return False
    # Chunks on their way are kept until they are applied.
    plain, overlapped = (remedy(args, settings, there) for settings in (config, hidden))
    return plain is not None and overlapped is not None and plain[0] == overlapped[0]


def changed_settings(args: argparse.Namespace, config: PierConfig, **changes: int) -> PierConfig | None:
    """The settings with some of them changed; None if the job would not start with them."""
    from pier_megatron.integration import refusals

    try:
        changed = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
        refusals.check_sizes_and_intervals(args, changed)
    except PierConfigError:
        return None
    return changed


def _changes(
    args: argparse.Namespace, config: PierConfig | None
) -> Iterator[tuple[list[str], argparse.Namespace, PierConfig | None]]:
    """Jobs that take less memory, what costs nothing first."""
    divisors = [size for size in range(args.micro_batch_size, 0, -1) if args.micro_batch_size % size == 0]
    for recompute in ({}, {"recompute_granularity": "full"}):
        for micro_batch in divisors if not recompute else divisors[-1:]:
            flags = [] if micro_batch == args.micro_batch_size else [f"--micro-batch-size {micro_batch}"]
            flags += [RECOMPUTE] if recompute else []
            changed = argparse.Namespace(**vars(args) | recompute | {"micro_batch_size": micro_batch})
            yield flags, changed, config
            if config is not None and not config.offload:
                yield [*flags, "--pier-offload"], changed, dataclasses.replace(config, offload=True)


def does_not_fit(memory: float, cluster: Cluster, remedy: tuple[str, float] | None) -> str:
    """Sentences for a job that does not fit, a blank behind them; empty if it does.

    Args:
        memory: Bytes that a GPU must have.
        cluster: Cluster on which the job runs.
        remedy: Remedy, see :func:`remedy`.
    """
    if memory <= cluster.memory:
        return ""
    size = f"Does not fit: it needs {memory / 1e9:.1f} GB of a GPU that has {cluster.memory / 1e9:.0f} GB. "
    if remedy is None:
        return size + (
            "Neither micro-batches of 1, recomputation nor --pier-offload changes that: raise --tensor-model-parallel-size or "
            "--pipeline-model-parallel-size. "
        )
    flags, then = remedy
    if RECOMPUTE in flags:
        return f"{size}It fits with {flags}, if recomputed activations take less than {(cluster.memory - then) / 1e9:.1f} GB. "
    return f"{size}It fits with {flags} ({then / 1e9:.1f} GB). "
