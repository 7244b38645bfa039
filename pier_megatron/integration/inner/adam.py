"""The distributed optimizer's FP32 main parameters: where they are, and how they reach the model."""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pier_megatron.integration import versions
from pier_megatron.outer import Shards


def owners(optimizers: Sequence[Any]) -> list[Any]:
    """Those of Megatron's optimizers that own parameters on this rank."""
    return [optimizer for optimizer in optimizers if not optimizer.is_stub_optimizer]


def main_parameters(optimizer: Any) -> list[Shards]:
    """Finds the FP32 main parameters that this rank owns in a ``DistributedOptimizer``.

    Returns:
        Those that are split over tensor-parallel ranks, then those of which each of these ranks holds a copy, then those
        that the first and the last pipeline stage share. All copies come at the same place on their ranks.
    """
    split: list[Tensor] = []
    copied: list[Tensor] = []
    tied: list[Tensor] = []
    is_counted_when_tied, is_expert = True, False
    is_not_shared = versions.require("megatron.core.transformer.module", "param_is_not_shared")
    for model_groups, main_groups in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    ):
        for model, main in zip(itertools.chain(*model_groups), itertools.chain(*main_groups), strict=True):
            is_expert |= not getattr(model, "allreduce", True)
            if getattr(model, "shared_embedding", False):
                tied.append(main)
                is_counted_when_tied = is_not_shared(model)
            elif getattr(model, "tensor_model_parallel", False):
                split.append(main)
            else:
                copied.append(main)
    # Experts may be split over other tensor-parallel ranks than the rest of the model.
    group = optimizer.expert_tp_group if is_expert and hasattr(optimizer, "expert_tp_group") else optimizer.tp_group
    return [
        Shards(split),
        Shards(copied, is_counted=group.rank() == 0),
        Shards(tied, is_counted=is_counted_when_tied, is_tied=True),
    ]


def inner_state(optimizer: Any, main: Tensor) -> dict[str, Tensor]:
    """The inner optimizer's tensors for one main parameter, of its shape: Adam's moments, once it has stepped."""
    state = optimizer.optimizer.state.get(main, {})
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == main.shape}


def commit_main_parameters(optimizers: Sequence[Any]) -> None:
    """Makes the model compute with the present main parameters: rounds them, then gathers them within the group.

    The gather is synchronous also under ``--overlap-param-gather``: Megatron registers its forward hooks only after the
    first successful step, and a model that computed with stale parameters would do so in silence.
    """
    chunks = {id(chunk): chunk for optimizer in optimizers for chunk in optimizer.model_chunks}.values()
    for chunk in chunks:
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            # With --overlap-param-gather-with-optimizer-step the gather of the inner step may still read the parameters.
            if bucket_group.param_gather_handle is not None:
                bucket_group.start_param_sync(force_sync=True)
    for optimizer in optimizers:
        optimizer._copy_main_params_to_model_params()
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
