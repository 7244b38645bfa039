"""What works with Pier, but not as expected, and what is turned off: one sentence each, at start-up and in doctor."""

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any

from pier_megatron.config import PierConfig
from pier_megatron.exchange.authentication import is_loopback
from pier_megatron.exchange.topology import NAMED
from pier_megatron.integration.checkpoint.size import INNER_STATE, bytes_per_parameter
from pier_megatron.integration.inner.requirements import are_shared_out, scaled
from pier_megatron.megatron_api import run, versions
from pier_megatron.megatron_api.args import flag

# Flags that are turned off with a warning, and why: what they do for a stock run has no place in this one.
_TURNED_OFF = {
    "ckpt_assume_constant_structure": "what a checkpoint holds depends on the phase and on whether the groups have just met, "
    "so Megatron must plan each save again",
    "check_weight_hash_across_dp_replicas_interval": "it compares all groups, whose weights differ between outer steps. Pier "
    "compares copies inside a group itself, some of them at each outer step",
}


TESTED = {"torch": ("2.8", "2.14"), "torchft": ("0.2", "0.2"), "emerging-optimizers": ("0.3", "0.3")}
"""First and last release of each package that tests have run on: docs/status.md says which tests, and when."""


@dataclasses.dataclass
class _TurnedOff:
    warnings: list[str] = dataclasses.field(default_factory=list)


def turn_off_what_has_no_use(args: Any, assign: Callable[[Any, str, object], None] = setattr) -> None:
    """Turns flags off that would do harm in runs with groups, and nothing else; :func:`warnings` says so.

    Args:
        args: Megatron's arguments, changed in place.
        assign: Sets one of them.
    """
    for name, why in _TURNED_OFF.items():
        is_one_group = args.pier_lighthouse is not None or args.pier_groups == 1
        if (value := getattr(args, name, None)) and not (is_one_group and name.startswith("check_weight_hash")):
            assign(args, name, False if value is True else None)
            given = flag(name) if value is True else f"{flag(name)} {value}"
            run.part(_TurnedOff).warnings.append(f"{given} is turned off: {why}.")


def warnings(args: argparse.Namespace, config: PierConfig) -> list[str]:
    """What works, but not as the user may expect, one sentence each; of arguments that have been validated."""
    found = [*run.part(_TurnedOff).warnings, *_untested(config)]
    if getattr(args, "pier_waits_for_saves", False):
        found.append(
            "--async-save is turned off by Megatron, because --use-persistent-ckpt-worker is missing: training waits for every "
            "save. Add that flag, with --async-strategy mcore without nvidia-resiliency-ext 0.6, or drop --async-save."
        )
    if config.lighthouse is not None and config.secret_file is None and not is_loopback(config.island_address):
        found.append(
            f"--pier-island-address {config.island_address} without --pier-secret-file: any process that reaches the "
            "lighthouse can join the run and change the model. Make a secret with pier-megatron lighthouse "
            "--new-secret FILE, copy it to all islands and pass --pier-secret-file FILE."
        )
    if config.lighthouse is not None and config.lazy_start and args.load is None:
        found.append(
            f"--pier-lighthouse with a lazy start of {config.lazy_start} iterations and without --load: this job can only join "
            "islands that have finished theirs. For the first islands, run the lazy start in one launch and --load its "
            "checkpoint, or pass --pier-lazy-start-iters 0."
        )
    if args.data_parallel_size == 1:
        found.append(
            "one model replica (data-parallel size 1): nothing is exchanged, and outer steps act on this replica alone. Use "
            "more ranks, or less tensor, pipeline or context parallelism."
        )
    elif config.groups == 1:
        replicas = args.data_parallel_size
        found.append(
            f"--pier-groups 1 (by default one per node): all {replicas} model replicas train as one group. Nothing is "
            f"exchanged, and outer steps act on this group alone. Pass --pier-groups {replicas}, or another divisor of "
            f"{replicas}, to train groups apart on one node."
        )
    if config.inner_optimizer != "adam" and not are_shared_out(args):
        replicas = args.data_parallel_size * args.context_parallel_size
        copies = replicas // config.groups
        if copies > 1:
            found.append(
                f"--pier-inner-optimizer {config.inner_optimizer}: each of the {copies} data-parallel ranks of a group "
                f"({replicas} / --pier-groups {config.groups}) steps and keeps all parameters of its part of the "
                f"model, where 1 / {copies} of them would do. With --bf16 add --use-distributed-optimizer: Megatron's "
                "layer-wise optimizer divides them."
            )
    if (
        getattr(args, "fp8", None)
        and args.fp8_recipe == "delayed"
        and args.save is not None
        and config.groups > config.launches
    ):
        found.append(
            "--fp8-recipe delayed: each group has a history of maxima of its own, and a checkpoint holds that of the first. A "
            "resumed run may differ in the last bits. --fp8-recipe tensorwise, blockwise and mxfp8 keep no history."
        )
    if (kept := scaled(args)) and args.save is not None:
        found.append(
            f"{' and '.join(kept)}: a checkpoint holds FP32 numbers, and Megatron scales them again when it reads them. A "
            "resumed run may differ in the last bits. BF16 moments and FP32 main parameters resume exactly."
        )
    if args.save is not None and config.groups // config.launches > NAMED:
        sizes = bytes_per_parameter(args, config)
        apart = sum(size for name, size in sizes.items() if name.startswith(INNER_STATE))
        if apart:
            found.append(
                f"--save with {config.groups:,} groups: each stores an inner state of its own, {apart:,.0f} of "
                f"{sum(sizes.values()):,.0f} bytes per parameter. --pier-save-inner-state first stores that of group 0 alone, "
                "from which all groups then resume."
            )
    return found + _waits(args, config)


def _untested(config: PierConfig) -> list[str]:
    """Says which packages of this run are of a release without tests."""
    is_used = {
        "torchft": config.lighthouse is not None,
        "emerging-optimizers": config.inner_optimizer == "muon",
    }
    found = []
    for package, (first, last) in TESTED.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if is_used.get(package, True) and not versions.is_between(first, last, version):
            found.append(
                f"{package} {version}: Pier was tested with {first if first == last else f'{first} to {last}'}. Install that, "
                "or first compare a short run with one that was tested."
            )
    return found


def _waits(args: argparse.Namespace, config: PierConfig) -> list[str]:
    """What makes Megatron wait for the device, hence for an exchange that training should hide."""
    if not config.overlap:
        return []
    found = []
    intervals = {
        "log_interval": "at every log Megatron waits for the device",
        "train_sync_interval": "Megatron waits for the device every so many iterations",
    }
    for name, waits in intervals.items():
        interval = getattr(args, name, None)
        if interval and interval < config.overlap:
            found.append(
                f"{flag(name)} {interval}: {waits}, hence for what is on the wire then. With --pier-overlap {config.overlap} "
                f"that is {-(-config.overlap // interval)} times in each exchange, and so much of it is not hidden. Use "
                f"{flag(name)} {config.overlap} or more."
            )
    if args.timing_log_level > 0:
        found.append(
            f"--timing-log-level {args.timing_log_level}: its timers wait for the device several times in every iteration, "
            f"without barriers too, hence for what is on the wire. With --pier-overlap {config.overlap} next to nothing of an "
            "exchange is hidden. Use --timing-log-level 0."
        )
    return found
