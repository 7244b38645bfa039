"""The distributed optimizer over AdamW: each data-parallel rank steps a part of every parameter."""

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pier_megatron.integration.inner.base import InnerOptimizer
from pier_megatron.integration.inner.precision_aware import MASTER, FusedAdamMasters

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import StateDict
    from megatron.core.optimizer import DistributedOptimizer


class ShardedOptimizer(InnerOptimizer):
    """A ``DistributedOptimizer``."""

    def __init__(self, optimizer: "DistributedOptimizer") -> None:
        """Wraps one of Megatron's optimizers."""
        super().__init__(optimizer)
        self.hands_out_copies = optimizer.config.use_precision_aware_optimizer
        # Not the user's flag: with most recipes of FP8 Megatron keeps FP32 main parameters all the same.
        if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            takes_whole = optimizer.config.main_params_dtype == torch.float16
            self.stored = FusedAdamMasters(optimizer.optimizer, takes_whole)

    def parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's parameters, each with the part of the main parameter that this rank steps."""
        stepped = self.optimizer.shard_float16_groups if self.stored else self.optimizer.shard_fp32_from_float16_groups
        for models, mains in (
            (self.optimizer.model_fp32_groups, self.optimizer.shard_fp32_groups),
            (self.optimizer.model_float16_groups, stepped),
        ):
            yield from zip(itertools.chain(*models), itertools.chain(*mains), strict=True)

    def stretch(self, model: Tensor) -> slice:
        """The part of one of the model's parameters, flat, that this rank steps."""
        own = self.optimizer._get_model_param_range_map(model)["param"]
        return slice(own.start, own.end)

    def state_of(self, main: Tensor) -> dict[str, Tensor]:
        """The moments of one main parameter in FP32, by name, once it has stepped."""
        if not self.hands_out_copies:
            return super().state_of(main)
        adam = self.optimizer.optimizer
        return {name: adam.get_unscaled_state(main, name) for name in adam.state.get(main, {}) if name != MASTER}

    def store(self, main: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Takes back moments, which FusedAdam may keep in fewer bits and with a scale."""
        for name, tensor in tensors.items() if self.hands_out_copies else ():
            # It overwrites what it is given.
            self.optimizer.optimizer.set_scaled_state(main, name, tensor.to(main.device, copy=True))

    def round_to_model(self) -> None:
        """Writes the own parts of the main parameters to what is then gathered; quantises them over the group if need be."""
        if self.optimizer.config.reuse_grad_buf_for_mxfp8_param_ag:
            # Rounded to where gradients were, whose step has been taken. What is gathered there is then quantised.
            self.optimizer._copy_main_params_to_param_buffer()
        else:
            self.optimizer._copy_main_params_to_model_params()

    def settings(self) -> "StateDict":
        """What Megatron stores of it for each rank; the tensors are not among it."""
        settings: StateDict = self.optimizer.state_dict()
        return settings

    def take_settings(self, settings: "StateDict") -> None:
        """Takes over other settings; may replace the tensors."""
        self.optimizer.load_state_dict(settings)
