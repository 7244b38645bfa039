"""The averaging domain of gradients: all groups in the lazy start, then the own one.

Megatron averages over the instances of its distributed optimizer: a reduce-scatter inside the instance, then an all-reduce
between instances. In the lazy start the groups are further instances, between which it reduces over Pier's communicator. In
the local phase its configuration is the user's again. Without the distributed optimizer Megatron averages by one all-reduce,
and the phases are the ranks of that.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.integration.all_groups import AllGroups
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

# Attributes of a bucket group: over what Megatron reduces between instances, and on which stream.
_BETWEEN, _STREAM = "inter_distributed_optimizer_instance_group", "communication_stream"


class GradientAveraging:
    """Switches the gradients of a model between the mean over all groups and the mean over this rank's group.

    Switch only between iterations: a reduction in flight would end in another domain than it began in.
    """

    def __init__(
        self,
        model_chunks: "Sequence[DistributedDataParallel]",
        groups: int,
        between: dist.ProcessGroup | None,
        everyone: AllGroups | None,
    ) -> None:
        """Takes hold of this rank's ``DistributedDataParallel`` chunks as Megatron built them; called by all ranks.

        Args:
            model_chunks: Chunks that average over this group.
            groups: Number of groups in the launch.
            between: Communicator for gradients of one rank of each group, for a lazy start; None without one.
            everyone: Process groups of all groups; None if there is one.
        """
        # By owner: the values of some of its attributes in all groups, and in the own one.
        self._switched: list[tuple[object, dict[str, object], dict[str, object]]] = []
        if everyone is None:
            return
        chunk = model_chunks[0]
        dense = [group for chunk in model_chunks for group in chunk.bucket_groups]
        expert = [group for chunk in model_chunks for group in chunk.expert_parallel_bucket_groups]
        # Megatron scales gradients by 1 / data-parallel size before it sums them. It does not where it divides by the number
        # of tokens, or lets the collective average.
        if not (chunk.config.calculate_per_token_loss or chunk.ddp_config.average_in_collective):
            for bucket in (bucket for group in dense + expert for bucket in group.buckets):
                own = bucket.gradient_scaling_factor
                self._switch(bucket, gradient_scaling_factor=(own / groups, own))
        # Routers of experts keep the ranks over which they count tokens.
        for module in (module for chunk in model_chunks for module in chunk.modules()):
            if (ranks := getattr(module, "tp_dp_cp_group", None)) is not None:
                self._switch(module, tp_dp_cp_group=(everyone.widened(ranks), ranks))
        if chunk.ddp_config.use_distributed_optimizer:
            stream = torch.cuda.Stream() if between is not None else None
            instances = chunk.ddp_config.num_distributed_optimizer_instances
            for config in {id(chunk.ddp_config): chunk.ddp_config for chunk in model_chunks}.values():
                self._switch(config, num_distributed_optimizer_instances=(groups * instances, instances))
            for group in dense + expert if between is not None else ():
                if instances > 1:
                    own = getattr(group, _BETWEEN)
                    self._switch(group, **{_BETWEEN: (everyone.widened(own), own)})
                else:
                    # Built with one instance, it has neither attribute: had they other names, Megatron would fail to find its
                    # own.
                    setattr(group, _BETWEEN, between)
                    setattr(group, _STREAM, stream)
        else:
            for group in dense + expert:
                own = group.data_parallel_group
                self._switch(group, data_parallel_group=(everyone.widened(own), own))

    def _switch(self, owner: object, **values: tuple[object, object]) -> None:
        in_all, in_own = ({name: value[which] for name, value in values.items()} for which in (0, 1))
        self._switched.append((owner, in_all, in_own))

    def over_all_groups(self) -> None:
        """Gradients become the mean over the samples of all groups, as in stock Megatron."""
        for owner, values, _ in self._switched:
            _assign(owner, values)

    def over_own_group(self) -> None:
        """Gradients become the mean over the samples of this rank's group."""
        for owner, _, values in self._switched:
            _assign(owner, values)


def _assign(owner: object, values: dict[str, object]) -> None:
    for name, value in values.items():
        versions.assign(owner, name, value)
