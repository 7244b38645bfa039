"""What a rank trains, by which optimizer, and how their main parameters reach the model."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pier_megatron.integration.inner.base import InnerOptimizer
from pier_megatron.integration.inner.routers import router_biases
from pier_megatron.integration.inner.sharded import ShardedOptimizer
from pier_megatron.integration.inner.whole import WholeOptimizer
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer


def owners(optimizer: "MegatronOptimizer", chunks: "Sequence[DistributedDataParallel]" = ()) -> list[InnerOptimizer]:
    """Those of Megatron's optimizers in a chain that own parameters on this rank, in order, then biases of routers."""
    stepped = [owner for owner in _links(optimizer) if not owner.optimizer.is_stub_optimizer]
    return [*stepped, *router_biases(chunks)]


def _links(optimizer: "MegatronOptimizer", is_shared_out: bool = False) -> Iterator[InnerOptimizer]:
    module = "megatron.core.optimizer"
    if isinstance(optimizer, versions.require(f"{module}.distrib_optimizer", "DistributedOptimizer")):
        yield ShardedOptimizer(optimizer)
    elif isinstance(optimizer, versions.require(module, "ChainedOptimizer")):
        layer_wise = versions.require(f"{module}.layer_wise_optimizer", "LayerWiseDistributedOptimizer")
        for link in optimizer.chained_optimizers:
            yield from _links(link, is_shared_out=isinstance(optimizer, layer_wise))
    else:
        yield WholeOptimizer(optimizer, is_shared_out)


@torch.no_grad()
def commit_main_parameters(members: Sequence[InnerOptimizer], model_chunks: "Sequence[DistributedDataParallel]") -> None:
    """Makes the model compute with the present main parameters: rounds them, then gathers them within the group.

    The gather is synchronous also under ``--overlap-param-gather``: Megatron registers its forward hooks only after the
    first successful step, and a model that computed with stale parameters would do so in silence.
    """
    gathered = [chunk for chunk in model_chunks if chunk.ddp_config.use_distributed_optimizer]
    for chunk in gathered:
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            # With --overlap-param-gather-with-optimizer-step the gather of the inner step may still read the parameters.
            if bucket_group.param_gather_handle is not None:
                bucket_group.start_param_sync(force_sync=True)
    for member in members:
        member.round_to_model()
    for chunk in gathered:
        chunk.start_param_sync(force_sync=True)
