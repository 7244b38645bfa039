"""Megatron-Bridge's training loop: where a configuration is checked, where an iteration begins."""

import datetime
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier_megatron.bridge import refusals
from pier_megatron.bridge.arguments import BridgeArguments, BridgeLoop
from pier_megatron.errors import Problems
from pier_megatron.integration import cautions, current, own_world
from pier_megatron.integration import refusals as of_flags
from pier_megatron.integration.arguments import check_arguments, check_release, number_of_groups
from pier_megatron.integration.checkpoint import hooks
from pier_megatron.integration.evaluation import Evaluated, evaluate_each, evaluates_together
from pier_megatron.integration.own_world import own_data_parallel_ranks
from pier_megatron.integration.training import pass_over_iteration, take_step
from pier_megatron.megatron_api import run, versions

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from pier_megatron.integration.optimizer import PierOptimizer

_COMMON = "megatron.bridge.utils.common_utils"
# Settings of the logger that make the last rank of a world write.
_WRITERS = ("tensorboard_dir", "wandb_project", "mlflow_experiment", "comet_project")
# Names under Megatron-Bridge: of the function that tells the number of ranks, and of arguments with process groups.
_SIZE, _LOADERS, _COLLECTION = "get_world_size_safe", ("dp_group", "eval_dp_group"), "pg_collection"
_ITERATION = re.compile(r"iter_(\d+)")


def validate(validate: Callable[..., Any], config: Any) -> Any:
    """Begins a training, and checks Pier's settings before and after Megatron-Bridge checks its own."""
    from pier_megatron.bridge.config import PierOptimizerConfig

    run.begin()
    loop = BridgeLoop(config, pier=isinstance(config.optimizer, PierOptimizerConfig))
    run.set_loop(loop)
    if not loop.arguments().pier:
        return validate(config)
    with loop.own_words():
        _prepare(config, loop.arguments())
        result = validate(config)
        check_arguments(loop.arguments())
    return result


def _prepare(config: Any, arguments: Any) -> None:
    check_release(arguments)
    pier = config.optimizer
    pier.groups = number_of_groups(pier.groups, pier.ranks_per_domain)
    problems = Problems(refusals.refused(config))
    with problems.collecting():
        of_flags.refuse_what_cannot_work(arguments)
    problems.report()
    # Last: an inner optimizer that is none here, or layer-wise, is refused in the table's words.
    of_flags.refuse_for_inner_optimizer(arguments)
    cautions.turn_off_what_has_no_use(arguments, BridgeArguments.assign)
    if pier.optimizer == "adam":
        config.ddp.use_distributed_optimizer = pier.use_distributed_optimizer = True
    name_iteration(config.checkpoint)


def _process_groups(model: object) -> "ProcessGroupCollection":
    found: ProcessGroupCollection = versions.require("megatron.bridge.training.utils.pg_utils", "get_pg_collection")(model)
    return found


def name_iteration(checkpoint: Any) -> None:
    """Puts the folder of one checkpoint, which Megatron-Bridge accepts as well, into a run's folder and an iteration."""
    folder = Path(checkpoint.load or "")
    if iteration := _ITERATION.fullmatch(folder.name):
        checkpoint.load, checkpoint.ckpt_step = str(folder.parent), int(iteration[1])


def form[**P, R](initialize_distributed: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Lets the world that Megatron-Bridge forms be that of this rank's group."""
    loop = run.loop()
    if not isinstance(loop, BridgeLoop) or own_world.groups() == 1:
        return initialize_distributed(*args, **kwargs)
    minutes = loop.config.dist.distributed_timeout_minutes
    # As Megatron-Bridge itself does, under Slurm without torchrun.
    os.environ.setdefault("MASTER_ADDR", versions.require(_COMMON, "get_master_addr_safe")())
    os.environ.setdefault("MASTER_PORT", str(versions.require(_COMMON, "get_master_port_safe")()))
    given = versions.given(initialize_distributed, args, kwargs)
    rank, size = versions.require(_COMMON, "get_rank_safe")(), versions.require(_COMMON, "get_world_size_safe")()
    with loop.own_words():
        divided = own_world.divide(
            rank, size, own_world.groups(), datetime.timedelta(minutes=minutes), given.get("restart_store")
        )
    for name in _WRITERS if not divided.speaks else ():
        # Each world has a last rank, which would make them.
        setattr(loop.config.logger, name, None)
    loop.config.logger.log_progress &= not divided.group
    if profiling := loop.config.profiling:
        profiling.profile_ranks = profiling.profile_ranks and own_world.profiled_ranks(profiling.profile_ranks, divided)
        if divided.group:
            profiling.memory_snapshot_path = own_world.file_of_group(profiling.memory_snapshot_path, divided.group)
    place = {"get_rank_safe": lambda: divided.rank_in_group, _SIZE: lambda: divided.ranks_of_group}
    with versions.replaced(importlib.import_module("megatron.bridge.training.initialize"), place):
        return versions.called_with(initialize_distributed, args, kwargs, {"restart_store": divided.store_of_group})


@current.in_pier_runs
def read_own_samples[**P, R](set_up: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Gives each group its share of the samples. The first group makes the index of the data sets, the others read it."""
    given = versions.given(set_up, args, kwargs)
    widened = {name: optimizer.widened(given[name]) for name in _LOADERS if given.get(name) is not None}
    with own_world.first_group_first("samples"):
        return versions.called_with(set_up, args, kwargs, widened)


@current.in_pier_runs
def train[**P, R](train: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Lets the loop count the samples and the ranks of all groups."""
    given, launch = versions.given(train, args, kwargs), own_world.launch()
    if launch.groups == 1:
        return train(*args, **kwargs)
    size = {_SIZE: lambda: launch.size}
    modules = [importlib.import_module(f"megatron.bridge.training.{name}") for name in ("train", "utils.train_utils")]
    with versions.replaced(modules[0], size), versions.replaced(modules[1], size):
        counting = optimizer.collection(given[_COLLECTION], ["dp"])
        return versions.called_with(train, args, kwargs, {_COLLECTION: counting})


@current.in_pier_runs
def evaluate[**P](
    evaluate: Callable[P, Evaluated], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> Evaluated:
    """Evaluates over all groups of the launch, on the share of the samples of each."""
    given = versions.given(evaluate, args, kwargs)

    def evaluate_share() -> Evaluated:
        own = _process_groups(given["model"])
        if not evaluates_together(optimizer.loop):
            own = optimizer.collection(own, ["dp"])
        return versions.called_with(evaluate, args, kwargs, {_COLLECTION: own})

    return evaluate_each(evaluate_share)


@current.in_pier_runs
def train_step[**P, R: tuple[object, ...]](
    train_step: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Tells the outer loop of the iteration, and averages over all groups or the own one."""
    given = versions.given(train_step, args, kwargs)
    state, loop = given["global_state"], run.loop()
    assert isinstance(loop, BridgeLoop)
    loop.state = state

    def step() -> R:
        # The model's own, which are those of all groups while these average gradients.
        return versions.called_with(train_step, args, kwargs, {_COLLECTION: _process_groups(given["model"])})

    with loop.own_words():
        return take_step(optimizer, state.train_state.step + 1, given["data_iterator"], given["scheduler"], step)


@current.in_pier_runs
def load(load_checkpoint: Callable[..., Any], _: object, /, *args: Any, **kwargs: Any) -> Any:
    """Loads the groups' own state too; what is refused names settings of the configuration."""
    loop = run.loop()
    assert isinstance(loop, BridgeLoop)
    with loop.own_words():
        return hooks.load(load_checkpoint, *args, **kwargs)


@current.in_pier_runs
def skip_iteration(skip: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
    """Does what is due in iterations that are skipped (``train.iterations_to_skip``), without ``train_step``."""
    pass_over_iteration(optimizer, versions.given(skip, args, kwargs)["train_data_iterator"])


@current.in_the_local_phase
def count_own_tokens(resolve: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Estimates the operations of packed sequences, whose lengths differ, by the own group's share of them."""
    ranks, replicas = own_data_parallel_ranks(), kwargs["data_parallel_size"]
    own = resolve(*args, **kwargs | {"dp_group": ranks, "data_parallel_size": ranks.size()})
    # Context-parallel ranks, which are among them, count the same sequences.
    return tuple(count if count is None else count * replicas // ranks.size() for count in own)
