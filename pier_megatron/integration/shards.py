"""The distributed optimizer's FP32 main parameters: where they are, and how they reach the model."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pier_megatron.integration import versions


def main_shards(optimizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Finds the FP32 main parameters that this rank owns.

    Args:
        optimizer: A ``DistributedOptimizer``.

    Returns:
        The shards that a norm over the model counts on this rank, then those that it counts on another one: replicas on
        tensor-parallel ranks, and the second copy of tied embeddings. The order is the same in every group.
    """
    unique: list[Tensor] = []
    duplicates: list[Tensor] = []
    is_not_shared = versions.require("megatron.core.transformer.module", "param_is_not_shared")
    for group in optimizer.optimizer.param_groups:
        for shard in group["params"]:
            counts = is_not_shared(shard) and _is_not_tensor_parallel_duplicate(optimizer, shard)
            (unique if counts else duplicates).append(shard)
    return unique, duplicates


def commit_main_parameters(optimizers: Sequence[Any]) -> None:
    """Makes the model compute with the present main parameters: rounds them, then gathers them within the group.

    The gather is synchronous also under ``--overlap-param-gather``: Megatron registers its forward hooks only after the
    first successful step, and a model that computed with stale parameters would do so in silence.

    Args:
        optimizers: The ``DistributedOptimizer`` members on this rank.
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


def _is_not_tensor_parallel_duplicate(optimizer: Any, shard: Tensor) -> bool:
    is_not_duplicate = versions.require("megatron.core.tensor_parallel.layers", "param_is_not_tensor_parallel_duplicate")
    # Experts may be split over other tensor-parallel ranks than the rest of the model.
    is_expert = not getattr(shard, "allreduce", True)
    group = optimizer.expert_tp_group if is_expert and hasattr(optimizer, "expert_tp_group") else optimizer.tp_group
    return bool(is_not_duplicate(shard, tp_group=group))
