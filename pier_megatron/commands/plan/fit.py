"""Whether a job fits into a GPU, and what would make it fit."""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator

from pier_megatron.commands import planned_sizes
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.integration import refusals
from pier_megatron.outer.rules import rule_class
from pier_megatron.schedules import NESTEROV

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

_ACTIVATIONS = "activations, without recomputation"


@dataclasses.dataclass(frozen=True)
class Fix:
    """The least change that makes a job fit.

    Attributes:
        flags: Flags that are added.
        memory: Bytes that a GPU must have then.
        args: Megatron's arguments with them.
        config: Settings of the job with them; None for a stock optimizer.
    """

    flags: str
    memory: float
    args: argparse.Namespace
    config: PierConfig | None

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed, which takes other iterations, and memory that is not counted."""
        return RECOMPUTE in self.flags


def memory_of(args: argparse.Namespace, config: PierConfig | None) -> dict[str, float]:
    """Bytes of a GPU's memory that a job takes, by purpose."""
    memory = planned_sizes.memory(args)
    if config is None:
        return memory
    takes = planned_sizes.taken_by_outer_loop(args, config)
    if not config.offload:
        memory["outer state, --pier-offload to move it"] = float(takes.state)
    memory["chunks of an outer step on their way"] = float(takes.work)
    if takes.residuals:
        memory["residuals of sums, which stay on the device"] = float(takes.residuals)
    return memory


def needed(memory: dict[str, float], args: argparse.Namespace) -> float:
    """Bytes that a GPU must have: all of them, without activations that are recomputed in full, which nobody counts here."""
    return sum(size for name, size in memory.items() if name != _ACTIVATIONS or args.recompute_granularity != "full")


def remedy(args: argparse.Namespace, config: PierConfig | None, there: float) -> Fix | None:
    """The least change that makes a job fit, what costs nothing first; None if there is none."""
    for flags, changed, changed_config in changes(args, config):
        size = needed(memory_of(changed, changed_config), changed)
        if size <= there:
            return Fix(" ".join(flags), size, changed, changed_config)
    return None


def changed_settings(args: argparse.Namespace, config: PierConfig, **changes: object) -> PierConfig | None:
    """The settings with some of them changed; None if the job would not start with them."""
    try:
        changed = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
        refusals.check_sizes_and_intervals(args, changed)
    except PierConfigError:
        return None
    return changed


def changes(
    args: argparse.Namespace, config: PierConfig | None
) -> Iterator[tuple[list[str], argparse.Namespace, PierConfig | None]]:
    """Changes of a job that take less memory: flags that are added, and the job with them."""
    sizes = [size for size in range(args.micro_batch_size, 0, -1) if args.micro_batch_size % size == 0]
    of_job = [dict[str, object](micro_batch_size=size) for size in sizes]
    of_job.append({"micro_batch_size": 1, "recompute_granularity": "full"})
    of_pier = [_settings(args, config)]
    if config is not None and rule_class(config).takes_matrices:
        # Last: it costs quality.
        of_pier.append(_settings(args, config, outer_rule=NESTEROV))
    for settings, values in itertools.product(of_pier, of_job):
        size = values["micro_batch_size"]
        flags = [] if size == args.micro_batch_size else [f"--micro-batch-size {size}"]
        flags += [RECOMPUTE] if "recompute_granularity" in values else []
        for more, changed in settings.items():
            yield [*flags, *more], argparse.Namespace(**vars(args) | values), changed


def _settings(
    args: argparse.Namespace, config: PierConfig | None, **always: object
) -> dict[tuple[str, ...], PierConfig | None]:
    """Settings that take less memory, by the flags that are added; all of them with what is changed ``always``."""
    if config is None:
        return {(): config}
    flags = {"offload": "--pier-offload", "overlap": "--pier-overlap 0", "outer_rule": f"--pier-outer-rule {NESTEROV}"}
    options: list[dict[str, object]] = [{}, {"offload": True}, {"overlap": 0}, {"offload": True, "overlap": 0}]
    found: dict[tuple[str, ...], PierConfig | None] = {}
    for values in ({**option, **always} for option in options):
        changed = changed_settings(args, config, **values) if values else config
        if changed is not None and all(getattr(config, name) != value for name, value in values.items()):
            found[tuple(flags[name] for name in values)] = changed
    return found
