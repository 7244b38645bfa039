"""Tensors of whole main parameters, saved and loaded as Megatron saves the parameters of the model.

Each takes the place of its parameter in the sharded state of the model, under a key of its own. That state
says how the tensor is split over ranks, so other layouts of the same model find their parts.
"""

from typing import TYPE_CHECKING

from pier_megatron.integration.checkpoint.description import Metadata
from pier_megatron.integration.checkpoint.parameter_state import ParameterState
from pier_megatron.integration.inner.whole import WholeOptimizer
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict


class WholeState(ParameterState):
    """Named tensors for every main parameter of one :class:`WholeOptimizer`."""

    owner: WholeOptimizer

    def sharded(self, model_state: "ShardedStateDict", metadata: Metadata, prefix: str, is_loading: bool) -> "ShardedStateDict":
        """Describes the tensors in the manner of the model's."""
        module = "megatron.core.dist_checkpointing.optimizer"
        parameters = list(self.owner.parameters())
        of_model = versions.require(module, "get_param_id_to_sharded_param_map")(
            model_state, [model for model, _ in parameters]
        )
        make = versions.require(module, "make_sharded_optimizer_tensor")
        state: ShardedStateDict = {}
        for index, (_, main) in enumerate(parameters):
            for name, tensor in self.tensors[id(main)].items():
                state[f"{index}.{name}"] = sharded = make(of_model[index], tensor, f"{prefix}.{name}")
                if self.owner.is_shared_out:
                    # One rank has the tensor, where the model has copies on all data-parallel ranks.
                    sharded.replica_id = (*sharded.replica_id[:-1], 0)
        return state

    def load(self, state: "StateDict", metadata: Metadata) -> None:
        """Takes over what was read for :meth:`sharded`."""
        for index, (_, main) in enumerate(self.owner.parameters()):
            for name, tensor in self.tensors[id(main)].items():
                tensor.copy_(state[f"{index}.{name}"])
