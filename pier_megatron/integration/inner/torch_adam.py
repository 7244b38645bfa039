"""Lets a distributed optimizer over PyTorch's own Adam load its state.

Megatron trains with it where neither Transformer Engine nor Apex is installed, and can save then, but not load: it asks an
optimizer that has not stepped yet for its state, gives all parameters one and the same step counter, and expects the counter
among the tensors of a checkpoint, where it is not.
"""

from collections.abc import Callable
from typing import Any

import torch

from pier_megatron.integration import versions


def install() -> None:
    """Completes what Megatron leaves out. Optimizers of Transformer Engine and Apex pass through unchanged."""
    module = "megatron.core.optimizer.distrib_optimizer"
    versions.wrap(module, "DistributedOptimizer.sharded_state_dict", _with_state)
    versions.wrap(module, "DistributedOptimizer.load_state_dict", _with_counters)
    versions.wrap(module, "DistributedOptimizer._set_main_param_and_optimizer_states", _with_counter)


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _with_state(sharded_state_dict: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
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


def _with_counters(load_state_dict: Callable[..., Any], optimizer: Any, state: Any) -> Any:
    result = load_state_dict(optimizer, state)
    if _is_torch_adam(optimizer):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))
    return result


def _with_counter(set_states: Callable[..., Any], optimizer: Any, model_parameter: Any, tensors: Any) -> Any:
    if _is_torch_adam(optimizer):
        group, order = optimizer.model_param_group_index_map[model_parameter]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        tensors = {**tensors, "step": optimizer.optimizer.state[main]["step"]}
    # In FP32 training the main parameters are the model's own, which autograd watches.
    with torch.no_grad():
        return set_states(optimizer, model_parameter, tensors)
