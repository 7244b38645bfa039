"""The averaging domain of gradients: all groups or one.

Megatron averages over all distributed-optimizer instances: a reduce-scatter inside the instance, then an all-reduce between
instances. With one instance in the configuration it leaves the second out and takes the asynchronous path of plain data
parallelism, so the phases of Pier are a value in Megatron's own configuration and nothing is replaced.
"""

from collections.abc import Sequence
from typing import Any


class GradientAveraging:
    """Switches the gradients of a model between the mean over all groups and the mean over this rank's group.

    Switch only between iterations: a reduction in flight would end in another domain than it began in.
    """

    def __init__(self, model_chunks: Sequence[Any], groups: int) -> None:
        """Takes hold of this rank's ``DistributedDataParallel`` chunks as Megatron built them, averaging over all groups."""
        self._groups = groups
        self._configs = {id(chunk.ddp_config): chunk.ddp_config for chunk in model_chunks}.values()
        self._scaling = [
            (bucket, bucket.gradient_scaling_factor)
            for chunk in model_chunks
            for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            for bucket in bucket_group.buckets
        ]
        # Megatron scales gradients by 1 / data-parallel size before it sums them. It does not where it divides by the
        # number of tokens (of the group, see communication.confined_to_group) or lets the collective average.
        chunk = model_chunks[0]
        self._prescaled = not (chunk.config.calculate_per_token_loss or chunk.ddp_config.average_in_collective)

    def over_all_groups(self) -> None:
        """Gradients become the mean over the samples of all groups, as in stock Megatron."""
        self._set(instances=self._groups, scale=1)

    def over_own_group(self) -> None:
        """Gradients become the mean over the samples of this rank's group."""
        self._set(instances=1, scale=self._groups if self._prescaled else 1)

    def _set(self, instances: int, scale: int) -> None:
        for config in self._configs:
            config.num_distributed_optimizer_instances = instances
        for bucket, factor in self._scaling:
            bucket.gradient_scaling_factor = factor * scale
