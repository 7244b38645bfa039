"""Tensors of the main parameters of a distributed optimizer, saved and loaded in Megatron's own formats.

The formats know how parameters are sharded and some of them reshard. They ask the optimizer for a main
parameter and its state, one model parameter at a time; a :class:`ShardedState` answers in its place.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Concatenate

import torch
from torch import Tensor

from pier_megatron.integration.checkpoint.description import Metadata
from pier_megatron.integration.checkpoint.parameter_state import ParameterState
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
    from megatron.core.optimizer import DistributedOptimizer

# Megatron's formats of the distributed optimizer's state, and what reads and writes them.
_FORMATS = {
    "dp_reshardable": ("sharded_param_state_dp_reshardable", "load_parameter_state_from_dp_reshardable"),
    "fully_reshardable": ("sharded_param_state_fully_reshardable", "load_parameter_state_from_fully_reshardable"),
}
_STORED = ("param", "exp_avg", "exp_avg_sq")


def format_of(metadata: Metadata) -> str:
    """The format of the distributed optimizer's state that a checkpoint has or will have.

    Raises:
        NotImplementedError: If it is one that Megatron no longer writes.
    """
    found = str(metadata.get("distrib_optim_sharding_type"))
    if found not in _FORMATS:
        raise NotImplementedError(f"pier_megatron does not read the distributed optimizer's format {found}.")
    return found


def counting_padding[**P, R](
    sharded_param_state_fully_reshardable: "Callable[Concatenate[DistributedOptimizer, P], R]",
    optimizer: "DistributedOptimizer",
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Lets Megatron leave the padding in what it gathers of gradient buckets.

    It looks for parameters where they are with the padding of all buckets before theirs, in vectors that it has taken this
    padding out of: behind a bucket that is padded it would store the numbers of others.
    """
    with contextlib.ExitStack() as stack:
        for buffer in optimizer.buffers:
            stack.enter_context(versions.replaced(buffer, {"numel_unpadded": buffer.numel}))
            for bucket in buffer.buckets:
                stack.enter_context(versions.replaced(bucket, {"numel_unpadded": bucket.grad_data.numel()}))
        return sharded_param_state_fully_reshardable(optimizer, *args, **kwargs)


class ShardedState(ParameterState):
    """Named tensors for every main parameter of one ``DistributedOptimizer``.

    Megatron stores them under the names ``param``, ``exp_avg`` and ``exp_avg_sq``.
    """

    def sharded(self, model_state: "ShardedStateDict", metadata: Metadata, prefix: str, is_loading: bool) -> "ShardedStateDict":
        """Describes the tensors as Megatron describes the optimizer's state."""
        kind = format_of(metadata)
        write, _ = _FORMATS[kind]
        with self._in_place_of_the_state(kind):
            state: ShardedStateDict | None = getattr(self.owner.optimizer, write)(model_state, is_loading, metadata)
        versions.require("megatron.core.dist_checkpointing.utils", "add_prefix_for_sharding")(state, f"{prefix}.")
        return state

    def load(self, state: "StateDict", metadata: Metadata) -> None:
        """Takes over what was read for :meth:`sharded`."""
        kind = format_of(metadata)
        _, read = _FORMATS[kind]
        with self._in_place_of_the_state(kind):
            getattr(self.owner.optimizer, read)(state)

    def _of(self, model_parameter: Tensor) -> Mapping[str, Tensor]:
        group, order = self.owner.optimizer.model_param_group_index_map[model_parameter]
        return self.tensors[id(self.owner.optimizer.optimizer.param_groups[group]["params"][order])]

    @contextlib.contextmanager
    def _in_place_of_the_state(self, kind: str) -> Iterator[None]:
        def get(model_parameter: Tensor) -> dict[str, Tensor]:
            tensors = dict(self._of(model_parameter))
            if kind == "fully_reshardable":
                # This format writes all that Adam has, also where there is less.
                shape = next(iter(tensors.values())).shape
                tensors = {name: torch.zeros(()).expand(shape) for name in _STORED} | tensors
            return tensors

        def put(model_parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
            for name, tensor in self._of(model_parameter).items():
                tensor.copy_(tensors[name])

        with versions.replaced(
            self.owner.optimizer, {"_get_main_param_and_optimizer_states": get, "_set_main_param_and_optimizer_states": put}
        ):
            yield
