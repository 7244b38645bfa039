"""Lets a distributed optimizer over PyTorch's own Adam load its state.

Megatron trains with it where neither Transformer Engine nor Apex is installed, and can save then, but not load: it asks an
optimizer that has not stepped yet for its state, gives all parameters one and the same step counter, and expects the counter
among the tensors of a checkpoint, where it is not.
"""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate

import torch

from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import StateDict
    from megatron.core.optimizer import DistributedOptimizer


_TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def is_used(args: argparse.Namespace) -> bool:
    """Whether Megatron has no other Adam, whatever the arguments."""
    return issubclass(versions.require("megatron.core.optimizer", "Adam"), _TORCH_ADAM)


def _is_torch_adam(optimizer: "DistributedOptimizer") -> bool:
    return isinstance(optimizer.optimizer, _TORCH_ADAM)


def with_state[**P, R](
    sharded_state_dict: "Callable[Concatenate[DistributedOptimizer, P], R]",
    optimizer: "DistributedOptimizer",
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Makes the state of an optimizer that has not stepped, which Megatron asks for."""
    if _is_torch_adam(optimizer):
        inner = optimizer.optimizer
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    return sharded_state_dict(optimizer, *args, **kwargs)


def with_counters(
    load_state_dict: "Callable[[DistributedOptimizer, StateDict], None]", optimizer: "DistributedOptimizer", state: "StateDict"
) -> None:
    """Restores the step counters, which Megatron leaves out."""
    load_state_dict(optimizer, state)
    if _is_torch_adam(optimizer):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))


def with_counter(
    set_states: "Callable[[DistributedOptimizer, torch.Tensor, dict[str, torch.Tensor]], None]",
    optimizer: "DistributedOptimizer",
    model_parameter: torch.Tensor,
    tensors: dict[str, torch.Tensor],
) -> None:
    """Restores the step counter of one parameter."""
    if _is_torch_adam(optimizer):
        group, order = optimizer.model_param_group_index_map[model_parameter]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        tensors = {**tensors, "step": optimizer.optimizer.state[main]["step"]}
    # In FP32 training the main parameters are the model's own, which autograd watches.
    with torch.no_grad():
        set_states(optimizer, model_parameter, tensors)
