"""Traffic of an iteration of a job, by communicator, for ``pier-megatron doctor --start``.

The job starts from its first iteration, loads, saves and reports nothing, and ends early. Only the index of
its data set is made where the job itself would make it.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping

import torch.distributed as dist

from pier_megatron import features
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.integration import current, own_world
from pier_megatron.integration.census import Collective, CollectiveCensus, table
from pier_megatron.megatron_api import run, versions

VARIABLE = "PIER_MEGATRON_DOCTOR"
"""Environment variable that tells the processes of a job of their examination."""

CROSSING = "cross the groups, and no outer step is under way"
"""What the last rank-0 line says of an iteration in which something crosses that should not."""

_WITHOUT_STEP = ("between outer steps", "before the first outer step, since when every iteration has (part of) one")

# What would reach beyond the iterations that are looked at, as arguments of Megatron's in any release.
_CONFINED: Mapping[str, object] = {
    name: value
    for names, value in (
        ("load pretrained_checkpoint ckpt_step ckpt_convert_format ckpt_convert_save", None),
        ("save save_interval save_retain_interval non_persistent_save_interval non_persistent_ckpt_type", None),
        ("save_activations_interval save_dgrads_interval save_params_interval save_tokens_per_expert_interval", None),
        ("tensorboard_dir wandb_project logits_save_dir moe_routing_trace_path flight_recorder_dump_path", None),
        ("dump_param_to_param_group_map result_rejected_tracker_filename exit_interval exit_duration_in_mins", None),
        ("async_save exit_signal_handler moe_use_upcycling log_progress profile record_memory_history adlr_autoresume", False),
        ("enable_one_logger log_straggler run_workload_inspector_server skip_train full_validation", False),
        ("eval_iters pier_lazy_start_iters", 0),
        ("pier_lazy_start_fraction", None),
        ("iterations_to_skip", []),
        ("config_logger_dir", ""),
    )
    for name in names.split()
}


def confine(args: argparse.Namespace) -> None:
    """Takes from the arguments, before they are checked, what would reach beyond the iterations that are looked at."""
    if getattr(args, "pier_lighthouse", None) is not None:
        raise PierConfigError(
            f"--pier-lighthouse {args.pier_lighthouse}: the job would join running islands. Look at it with doctor "
            "without --start, or without --pier-lighthouse, as groups of one launch."
        )
    vars(args).update({name: value for name, value in _CONFINED.items() if hasattr(args, name)})


@dataclasses.dataclass
class _Look:
    """A look at one iteration of a run.

    Attributes:
        begun: Number of iterations that have begun.
        census: Collectives of the iteration.
        looking: What ends the census.
        told: What says what features did in it.
    """

    begun: int = 0
    census: CollectiveCensus = dataclasses.field(default_factory=lambda: CollectiveCensus(own_world.launch().first_of_group))
    looking: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    told: list[Callable[[], list[str]]] = dataclasses.field(default_factory=list)


def leave_out(function: Callable[..., object], /, *args: object, **kwargs: object) -> None:
    """Replaces a function by nothing: that one parses the command line itself and writes into the folder of ``--save``."""


def look_on[**P, R](train_step: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Counts what crosses the groups in one iteration, then ends the job on all ranks."""
    look = run.part(_Look)
    optimizer = current.pier_optimizer()
    if optimizer is None:
        # All ranks are one group, and all iterations alike.
        examined, place = _first(versions.megatron_args().train_iters), "of a stock optimizer"
    else:
        examined, place = examined_iteration(optimizer.loop.config)
    look.begun += 1
    if look.begun == examined:
        look.looking.enter_context(look.census)
        look.told = [feature.look() for feature in features.used(versions.megatron_args())]
    elif look.begun == examined + 1:
        look.looking.close()
        launch = own_world.launch()
        group_of = {rank: rank // launch.ranks_of_group for rank in range(launch.size)}
        # A loss is reduced on the last pipeline stage alone.
        crossing: list[list[Collective]] = [[]] * dist.get_world_size()
        dist.all_gather_object(crossing, look.census.crossing(group_of))
        if dist.get_rank() == 0:
            of_all = {(found.name, found.ranks): found for of_rank in reversed(crossing) for found in of_rank}
            own = {(found.name, found.ranks) for found in crossing[0]}
            others = [found for key, found in of_all.items() if key not in own]
            print("\n".join(_findings(f"iteration {examined}, {place}", crossing[0], others)), flush=True)
            if of_all and place in _WITHOUT_STEP:
                print(f"Pier doctor: {len(of_all)} kinds of collectives {CROSSING}", flush=True)
        sys.exit(0)
    return train_step(*args, **kwargs)


def _findings(where: str, crossing: list[Collective], of_others: list[Collective]) -> list[str]:
    look = run.part(_Look)
    inside = [found for found in look.census.collectives if found not in crossing]
    megabytes = sum(found.nbytes for found in inside) / 1e6
    return [
        "Pier doctor: started from fresh weights, without a lazy start; nothing was loaded, saved or evaluated",
        f"Pier doctor: {where}, rank {own_world.launch().rank}: {len(inside)} collectives inside its group, into which it puts "
        f"{megabytes:,.2f} MB, " + ("and across groups:" if crossing else "none across groups."),
        *(f"  {line}" for line in table(crossing)),
        *(f"  on other ranks: {line.strip()}" for line in table(of_others)),
        *(f"Pier doctor: {line}" for tell in look.told for line in tell()),
    ]


def examined_iteration(config: PierConfig) -> tuple[int, str]:
    """The iteration to look at, 1-based, of a run without a lazy start, and a description of it.

    It is the first iteration with no outer step beginning or under way; iteration 1 does not count, since it may still set
    something up. Two sync intervals have every kind of iteration; the last one always has an outer step.
    """
    first = _first(config.train_iters)
    kinds = range(first, min(2 * config.sync_interval + 1, config.train_iters))
    quiet = [iteration for iteration in kinds if not _has_exchange(config, iteration)]
    if not quiet:
        return first, "with (part of) an outer step, as every iteration of this job"
    if quiet[-1] <= config.sync_interval < kinds[-1]:
        return quiet[0], _WITHOUT_STEP[1]
    return quiet[0], _WITHOUT_STEP[0]


def _first(iterations: int) -> int:
    """The first iteration that sets nothing up and is not the last one, as far as there is one."""
    return max(min(2, iterations - 1), 1)


def _has_exchange(config: PierConfig, iteration: int) -> bool:
    """Whether groups meet at the end of an iteration, or an outer step that began before is under way in it."""
    earliest = max(iteration - config.overlap, 1)
    begins = any(config.is_outer_step(begun) for begun in range(earliest, iteration + 1))
    return begins or config.is_site_average(iteration)
