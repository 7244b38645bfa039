"""Megatron-Bridge's training loop: where a configuration is checked, where an iteration begins."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pier_megatron.bridge import refusals
from pier_megatron.bridge.arguments import BridgeArguments, BridgeLoop
from pier_megatron.errors import Problems
from pier_megatron.integration import cautions, current
from pier_megatron.integration import refusals as of_flags
from pier_megatron.integration.arguments import check_arguments, check_release, number_of_groups
from pier_megatron.integration.checkpoint import hooks
from pier_megatron.integration.own_group import own_data_parallel_ranks
from pier_megatron.integration.training import pass_over_iteration, take_step
from pier_megatron.megatron_api import run, versions

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
    # Megatron builds other optimizers in one instance only, see own_group.
    config.ddp.num_distributed_optimizer_instances = 1
    if pier.optimizer == "adam":
        config.ddp.num_distributed_optimizer_instances = pier.groups
        config.ddp.use_distributed_optimizer = pier.use_distributed_optimizer = True
    name_iteration(config.checkpoint)


def name_iteration(checkpoint: Any) -> None:
    """Puts the folder of one checkpoint, which Megatron-Bridge accepts as well, into a run's folder and an iteration."""
    folder = Path(checkpoint.load or "")
    if iteration := _ITERATION.fullmatch(folder.name):
        checkpoint.load, checkpoint.ckpt_step = str(folder.parent), int(iteration[1])


@current.in_pier_runs
def train_step(train_step: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Tells the outer loop of the iteration, and averages over all groups or the own one."""
    given = versions.given(train_step, args, kwargs)
    state, loop = given["global_state"], run.loop()
    assert isinstance(loop, BridgeLoop)
    loop.state = state
    step = functools.partial(train_step, *args, **kwargs)
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
