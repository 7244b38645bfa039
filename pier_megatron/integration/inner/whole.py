"""Optimizers that step whole parameters, as Muon must: those of the model, or FP32 copies of them."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pier_megatron.errors import PierConfigError
from pier_megatron.integration.inner.base import InnerOptimizer
from pier_megatron.integration.own_world import own_data_parallel_ranks
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import StateDict
    from megatron.core.optimizer import MegatronOptimizer

# Of AdamW: PyTorch counts steps for each parameter, others for a group of them.
_STEP = "step"

# What each group of parameters keeps of the learning rate, and the flag that sets it.
_RATES = {"max_lr": "--lr", "min_lr": "--min-lr"}


class WholeOptimizer(InnerOptimizer):
    """A ``Float16OptimizerWithFloat16Params`` or an ``FP32Optimizer``.

    Attributes:
        is_shared_out: Whether data-parallel ranks shard the parameters, each stepping some for all: Megatron's layer-wise
            optimizer. Otherwise each steps all of them.
    """

    def __init__(self, optimizer: "MegatronOptimizer", is_shared_out: bool) -> None:
        """Wraps one of Megatron's optimizers."""
        super().__init__(optimizer)
        self.is_shared_out = is_shared_out
        if not is_shared_out:
            is_expert = any(not getattr(model, "allreduce", True) for model, _ in self.parameters())
            self.holders = own_data_parallel_ranks(is_expert)

    def parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's parameters, each with its main parameter: in FP32 itself."""
        if not hasattr(self.optimizer, "float16_groups"):
            yield from ((parameter, parameter) for parameter in self.optimizer.get_parameters())
            return
        models, mains = self.optimizer.float16_groups, self.optimizer.fp32_from_float16_groups
        yield from zip(itertools.chain(*models), itertools.chain(*mains), strict=True)
        yield from ((parameter, parameter) for parameter in itertools.chain(*self.optimizer.fp32_from_fp32_groups))

    def round_to_model(self) -> None:
        """Writes the main parameters to the model's, where these are others."""
        if hasattr(self.optimizer, "float16_groups"):
            self.optimizer._copy_main_params_to_model_params()

    def is_counted(self, is_expert: bool) -> bool:
        """Whether this rank's main parameters count; among ranks with equal ones, one rank's do."""
        return self.is_shared_out or own_data_parallel_ranks(is_expert).rank() == 0

    def settings(self) -> "StateDict":
        """The settings of the groups of parameters, with the number of AdamW's steps among them."""
        state = self.optimizer.optimizer.state
        groups = [dict(group) for group in self.optimizer.optimizer.param_groups]
        for group in groups:
            for counter in (state[main].get(_STEP) for main in group.pop("params") if main in state):
                if counter is not None:
                    group[_STEP] = int(counter)
        return {"optimizer": {"param_groups": groups}}

    def take_settings(self, settings: "StateDict") -> None:
        """Takes over other settings; tensors stay.

        Raises:
            PierConfigError: If the learning rates were others.
        """
        rates = _rates_that_identify()
        for group, taken in zip(self.optimizer.optimizer.param_groups, settings["optimizer"]["param_groups"], strict=True):
            for name, flag in rates.items():
                if group.get(name) != taken.get(name, group.get(name)):
                    raise PierConfigError(
                        f"{flag}: parameters had {name} {taken.get(name)} in the run that was saved, and have "
                        f"{group.get(name)} now. Megatron identifies groups of parameters by it and finds no match, even with "
                        f"--override-opt_param-scheduler. Restore {flag}, or restart from the weights with --finetune."
                    )
            counts_for_all = _STEP in group
            group |= {name: value for name, value in taken.items() if name != _STEP or counts_for_all}
            if _STEP in taken and not counts_for_all:
                for main in group["params"]:
                    self.optimizer.optimizer.state[main][_STEP] = torch.tensor(float(taken[_STEP]))


def _rates_that_identify() -> dict[str, str]:
    """The rates by which this release of Megatron knows groups of parameters; it takes others over from a checkpoint."""
    keys = versions.require("megatron.core.optimizer.optimizer", "param_group_identifier_keys")
    return {name: flag for name, flag in _RATES.items() if name in keys}
