"""Routers of experts that balance by biases: no optimizer steps these, groups move them apart, outer steps average them.

Reference: "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv 2408.15664.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from pier_megatron.integration.inner.base import InnerOptimizer
from pier_megatron.integration.own_world import own_data_parallel_ranks
from pier_megatron.outer import Shards

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import StateDict
    from megatron.core.distributed import DistributedDataParallel

# Buffers of a router that decide where tokens go, by the way of balancing. Quantiles exist from 0.19 on.
_BIASES = ("expert_bias", "qb_beta")


class RouterBiases(InnerOptimizer):
    """The biases of the routers of this pipeline stage, FP32; every rank of a group that has the stage holds all of them.

    Attributes:
        is_shared_out: Whether data-parallel ranks shard them: never.
    """

    is_shared_out = False

    def __init__(self, biases: Sequence[Tensor]) -> None:
        """Takes the biases, which Megatron changes in place."""
        self._biases = biases
        self.holders = own_data_parallel_ranks()

    def parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The biases; each is its own main parameter."""
        return ((bias, bias) for bias in self._biases)

    def round_to_model(self) -> None:
        """Does nothing: the model computes with the biases themselves."""

    def settings(self) -> "StateDict":
        """No settings."""
        return {"optimizer": {"param_groups": []}}

    def take_settings(self, settings: "StateDict") -> None:
        """Takes over nothing."""

    def state_of(self, main: Tensor) -> dict[str, Tensor]:
        """No tensors."""
        return {}

    def main_parameters(self) -> list[Shards]:
        """The biases."""
        return [Shards(list(self._biases), is_counted=False, is_averaged=True)]


def router_biases(model_chunks: "Sequence[DistributedDataParallel]") -> list[RouterBiases]:
    """The biases of the routers of a model; none where there are none."""
    found: list[Tensor] = []
    for module in (module for chunk in model_chunks for module in chunk.modules()):
        biases = [bias for name in _BIASES if isinstance(bias := getattr(module, name, None), Tensor)]
        if biases:
            # Rounding the model to BF16 rounds them too, until its first forward pass.
            module._maintain_float32_expert_bias()
        found += biases
    return [RouterBiases(found)] if found else []
