"""Megatron's training loop: where the optimizer is built, where an iteration begins, what it logs."""

import argparse
import datetime
import inspect
from typing import Any

import torch
import torch.distributed as dist

from pier_megatron import startup
from pier_megatron.config import PierConfig
from pier_megatron.groups import Rank, Topology, node_name
from pier_megatron.integration import versions
from pier_megatron.integration.arguments import check_arguments, config_from_args, uses_pier
from pier_megatron.integration.communication import confined_to_group
from pier_megatron.outer import GroupExchange

_TRAINING = "megatron.training.training"


def install() -> None:
    """Hooks Pier into the loop. A run without ``--optimizer pier`` passes through unchanged."""
    versions.wrap(_TRAINING, "get_megatron_optimizer", _building_pier)
    versions.wrap(_TRAINING, "train_step", _beginning_iterations)
    versions.wrap(_TRAINING, "training_log", _averaging_over_groups)
    versions.require(_TRAINING, "update_train_iters")


def _args() -> argparse.Namespace:
    args: argparse.Namespace = versions.require("megatron.training.global_vars", "get_args")()
    return args


def _building_pier(get_megatron_optimizer: Any) -> Any:
    def build(*args: Any, **kwargs: Any) -> Any:
        optimizer = get_megatron_optimizer(*args, **kwargs)
        return _build(optimizer) if uses_pier(_args()) else optimizer

    return build


def _build(optimizer: Any) -> Any:
    from pier_megatron.optimizer import PierOptimizer

    args = _args()
    # Sample-based runs know their iterations only now.
    versions.require(_TRAINING, "update_train_iters")(args)
    check_arguments(args)
    config = config_from_args(args)
    topology = Topology.gather(_own_rank(config))
    topology.check()
    exchange = GroupExchange(topology.new_communicator(datetime.timedelta(minutes=args.distributed_timeout_minutes)))
    pier = PierOptimizer(optimizer, config, exchange, _report)
    startup.check_groups_agree(pier.outer_states, exchange)
    if dist.get_rank() == 0:
        print(startup.describe(config, topology, pier.outer_states, exchange, args.log_interval), flush=True)
    return pier


def _own_rank(config: PierConfig) -> Rank:
    parallel_state = versions.require("megatron.core", "parallel_state")
    rank = dist.get_rank()
    peers = [rank]
    if config.groups > 1:
        peers = dist.get_process_group_ranks(parallel_state.get_inter_distributed_optimizer_instance_group())
    tensor_parallel_ranks = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    return Rank(rank, node_name(), peers.index(rank), tuple(tensor_parallel_ranks), tuple(peers))


def _report(report: Any) -> None:
    global_vars = "megatron.training.global_vars"
    report.write(
        versions.require("megatron.training.utils", "print_rank_last"),
        versions.require(global_vars, "get_tensorboard_writer")(),
        versions.require(global_vars, "get_wandb_writer")(),
    )


def _beginning_iterations(train_step: Any) -> Any:
    signature = inspect.signature(train_step)

    def step(*args: Any, **kwargs: Any) -> Any:
        if not uses_pier(_args()):
            return train_step(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        pier = given["optimizer"]
        pier.begin_iteration(given["iteration"] + 1)
        if pier.pier_config.is_lazy(pier.iteration):
            return train_step(*args, **kwargs)
        with confined_to_group(given["model"][0]):
            return train_step(*args, **kwargs)

    return step


def _averaging_over_groups(training_log: Any) -> Any:
    """Makes the losses and the gradient norm in the log means over all groups, gathered only when they are logged."""
    signature = inspect.signature(training_log)

    def log(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        settings = _args()
        if uses_pier(settings):
            iteration, is_first = given.arguments["iteration"], given.arguments.get("is_first_iteration", False)
            config = config_from_args(settings)
            if not config.is_lazy(iteration) and (is_first or iteration % settings.log_interval == 0):
                _average(given.arguments)
        return training_log(*given.args, **given.kwargs)

    return log


def _average(logged: dict[str, Any]) -> None:
    """Averages what one call of ``training_log`` is given over the groups, in place."""
    losses, totals = logged["loss_dict"], logged["total_loss_dict"]
    device = torch.device(torch.cuda.current_device())
    values = [(values, key) for values in (losses, totals) for key in losses if key in values]
    norm = logged["grad_norm"]
    vector = torch.stack(
        [torch.as_tensor(values[key], device=device).float().reshape(()) for values, key in values]
        + [torch.tensor(value, device=device) for value in ((0.0, 0.0) if norm is None else (float(norm), 1.0))]
    )
    parallel_state = versions.require("megatron.core", "parallel_state")
    group = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    if group is None:
        return
    dist.all_reduce(vector, group=group)
    for (mapping, key), total in zip(values, vector[:-2] / group.size(), strict=True):
        mapping[key] = total.reshape(mapping[key].shape)
    # A group that skipped the step has no gradient norm.
    if norm is not None:
        logged["grad_norm"] = (vector[-2] / vector[-1]).item()
