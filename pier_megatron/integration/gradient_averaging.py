"""The averaging domain of gradients: all groups or one.

Megatron averages over all distributed-optimizer instances: a reduce-scatter inside the instance, then an all-reduce between
instances. With one instance in the configuration it leaves the second out and takes the asynchronous path of plain data
parallelism, so the phases of Pier are a value in Megatron's own configuration and nothing is replaced. Without the
distributed optimizer it averages by one all-reduce, and the phases are the ranks of that.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.integration.own_group import own_balancing_ranks
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup


class GradientAveraging:
    """Switches the gradients of a model between the mean over all groups and the mean over this rank's group.

    Switch only between iterations: a reduction in flight would end in another domain than it began in.
    """

    def __init__(self, model_chunks: "Sequence[DistributedDataParallel]", groups: int) -> None:
        """Takes hold of this rank's ``DistributedDataParallel`` chunks as Megatron built them.

        Args:
            model_chunks: Chunks that average over all groups if Megatron has built as many instances, and over the own one if
                it has built one.
            groups: Number of groups in the launch.
        """
        self._groups = groups
        chunk = model_chunks[0]
        # Megatron scales gradients by 1 / data-parallel size before it sums them. It does not where it divides by the
        # number of tokens (of those who average, see communication.confined_to_group) or lets the collective average.
        prescaled = not (chunk.config.calculate_per_token_loss or chunk.ddp_config.average_in_collective)
        built: int = chunk.ddp_config.num_distributed_optimizer_instances
        self._over_all, self._over_own = (built / groups, float(built)) if prescaled else (1.0, 1.0)
        dense = [group for chunk in model_chunks for group in chunk.bucket_groups]
        expert = [group for chunk in model_chunks for group in chunk.expert_parallel_bucket_groups]
        # Routers of experts keep the ranks over which they count tokens.
        modules = (module for chunk in model_chunks for module in chunk.modules())
        self._routers = [(module, module.tp_dp_cp_group) for module in modules if hasattr(module, "tp_dp_cp_group")]
        if self._routers:
            own_balancing_ranks()
        self._scaling = [(bucket, bucket.gradient_scaling_factor) for group in dense + expert for bucket in group.buckets]
        self._configs: list[DistributedDataParallelConfig] = []
        self._all_reduced: list[tuple[_ParamAndGradBucketGroup, dist.ProcessGroup, dist.ProcessGroup]] = []
        parallel_state = versions.require("megatron.core", "parallel_state")
        if chunk.ddp_config.use_distributed_optimizer:
            self._configs = list({id(chunk.ddp_config): chunk.ddp_config for chunk in model_chunks}.values())
            if built < groups:
                between, stream = parallel_state.get_inter_distributed_optimizer_instance_group(), torch.cuda.Stream()
                for group in dense + expert:
                    # A bucket group that was built with one instance has neither attribute: had they other names, Megatron
                    # would fail to find its own.
                    group.inter_distributed_optimizer_instance_group = between
                    group.communication_stream = stream
        elif built < groups:
            everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
            self._all_reduced = [(group, group.data_parallel_group, everyone) for group in dense]
            everyone = parallel_state.get_expert_data_parallel_group()
            self._all_reduced += [(group, group.data_parallel_group, everyone) for group in expert]

    def over_all_groups(self) -> None:
        """Gradients become the mean over the samples of all groups, as in stock Megatron."""
        self._set(self._groups, self._over_all)

    def over_own_group(self) -> None:
        """Gradients become the mean over the samples of this rank's group."""
        self._set(1, self._over_own)

    def _set(self, instances: int, scale: float) -> None:
        for config in self._configs:
            versions.assign(config, "num_distributed_optimizer_instances", instances)
        for group, own, everyone in self._all_reduced:
            versions.assign(group, "data_parallel_group", everyone if instances > 1 else own)
        for router, everyone in self._routers:
            versions.assign(router, "tp_dp_cp_group", everyone if instances > 1 else own_balancing_ranks())
        for bucket, factor in self._scaling:
            versions.assign(bucket, "gradient_scaling_factor", factor * scale)
