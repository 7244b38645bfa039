"""The distributed optimizer over AdamW: each data-parallel rank steps a part of every parameter."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from pier_megatron.integration.inner.base import InnerOptimizer

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import StateDict


class ShardedOptimizer(InnerOptimizer):
    """A ``DistributedOptimizer``."""

    def parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's parameters, each with the part of the main parameter that this rank steps."""
        for models, mains in (
            (self.optimizer.model_fp32_groups, self.optimizer.shard_fp32_groups),
            (self.optimizer.model_float16_groups, self.optimizer.shard_fp32_from_float16_groups),
        ):
            yield from zip(itertools.chain(*models), itertools.chain(*mains), strict=True)

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
