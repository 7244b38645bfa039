"""Megatron's training loop: where the optimizer is built, where an iteration begins, what it logs."""

import datetime
import inspect
import os
from typing import Any

import torch
import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.exchange.topology import Rank, Topology, domain_name, node_name
from pier_megatron.integration import current, startup, versions
from pier_megatron.integration.arguments import config_from_args, settle_iterations, uses_pier
from pier_megatron.integration.communication import confined_to_group
from pier_megatron.integration.samples import check_groups_read_different_samples
from pier_megatron.outer import CODECS, GroupExchange

_TRAINING = "megatron.training.training"


def install() -> None:
    """Hooks Pier into the loop. A run without ``--optimizer pier`` passes through unchanged."""
    versions.wrap(_TRAINING, "get_megatron_optimizer", _building_pier)
    versions.wrap(_TRAINING, "train_step", _beginning_iterations)
    versions.wrap(_TRAINING, "training_log", _averaging_over_groups)
    versions.wrap(_TRAINING, "evaluate_and_print_results", _looking_at_what_groups_agree_on)
    versions.require(_TRAINING, "update_train_iters")


def _building_pier(get_megatron_optimizer: Any) -> Any:
    def build(*args: Any, **kwargs: Any) -> Any:
        optimizer = get_megatron_optimizer(*args, **kwargs)
        if not uses_pier(versions.megatron_args()):
            current.set_optimizer(None)
            return optimizer
        pier = _build(optimizer)
        current.set_optimizer(pier)
        return pier

    return build


def _build(optimizer: Any) -> Any:
    from pier_megatron.integration.optimizer import PierOptimizer

    args = versions.megatron_args()
    settle_iterations(args)
    config = config_from_args(args)
    topology = Topology.gather(_own_rank(config))
    topology.check()
    communicator = topology.new_communicator(datetime.timedelta(minutes=args.distributed_timeout_minutes))
    exchange = GroupExchange(communicator, CODECS[config.exchange_dtype])
    pier = PierOptimizer(optimizer, config, exchange, _report)
    startup.check_groups_agree(pier.outer_states, exchange)
    startup.check_host_memory(config, pier.outer_states, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
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
    node = node_name()
    domain = domain_name(rank, node, config.ranks_per_domain)
    return Rank(rank, node, domain, peers.index(rank), tuple(tensor_parallel_ranks), tuple(peers))


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
        optimizer = current.pier_optimizer()
        if optimizer is None:
            return train_step(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        iteration = given["iteration"] + 1
        if not optimizer.iteration:
            device = torch.device(torch.cuda.current_device())
            check_groups_read_different_samples(given["data_iterator"], optimizer.exchange, device)
        optimizer.begin_iteration(iteration)
        if not optimizer.is_local:
            return train_step(*args, **kwargs)
        with confined_to_group(optimizer.model_chunks[0]):
            result = train_step(*args, **kwargs)
        _, _, _, should_exit, exit_code, *_ = result
        if should_exit:
            raise RuntimeError(
                f"Megatron's rerun state machine ends the run at iteration {optimizer.iteration} with exit code {exit_code}, "
                "but only in this group: the others train on other parameters and did not see what it saw. They stop at the "
                "next outer step. Restart from the last checkpoint; --rerun-mode disabled does without the check."
            )
        return result

    return step


def _looking_at_what_groups_agree_on(function: Any) -> Any:
    """Shows the anchor to evaluation where the groups hold different parameters by design."""

    def look(*args: Any, **kwargs: Any) -> Any:
        optimizer = current.pier_optimizer()
        if optimizer is None or not optimizer.shows_anchor:
            return function(*args, **kwargs)
        with optimizer.anchor_in_model():
            return function(*args, **kwargs)

    return look


def _averaging_over_groups(training_log: Any) -> Any:
    """Makes the losses and the gradient norm in the log means over all groups, gathered only when they are logged."""
    signature = inspect.signature(training_log)

    def log(*args: Any, **kwargs: Any) -> Any:
        optimizer = current.local_optimizer()
        if optimizer is None:
            return training_log(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        is_first = given.arguments.get("is_first_iteration", False)
        if is_first or optimizer.iteration % versions.megatron_args().log_interval == 0:
            _average(given.arguments)
            return training_log(*given.args, **given.kwargs)
        # Some statistics, those of experts among them, are reduced here in every iteration.
        with confined_to_group(optimizer.model_chunks[0]):
            return training_log(*given.args, **given.kwargs)

    return log


def _average(logged: dict[str, Any]) -> None:
    """Averages what one call of ``training_log`` is given over the groups, in place."""
    device = torch.device(torch.cuda.current_device())
    # The totals count iterations too, as plain numbers.
    values = [
        (values, key)
        for values in (logged["loss_dict"], logged["total_loss_dict"])
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
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
