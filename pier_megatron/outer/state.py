"""The outer optimizer's state: anchor and momentum, flat over the FP32 main shards of one rank."""

from collections.abc import Sequence

import torch
from torch import Tensor


class OuterState:
    """Anchor and momentum of one rank's share of the parameters.

    Both are laid flat over the shards, in order, so that an outer step is a few passes over long vectors and one
    collective instead of thousands of each.

    Attributes:
        anchor: Parameters that all groups agreed on last; float32, shape ``[numel]``.
        momentum: Sum of past pseudo-gradients, before the outer learning rate; float32, shape ``[numel]``.
        unique_numel: The first ``unique_numel`` elements belong to no other rank of the group; the rest are copies, kept
            on every tensor-parallel rank, that a norm over the model must not count again.
    """

    def __init__(self, shards: Sequence[Tensor], duplicates: Sequence[Tensor] = ()) -> None:
        """Starts with the anchor at the present parameters and no momentum.

        Args:
            shards: This rank's FP32 main parameters, one-dimensional. They are read and written in place.
            duplicates: Further ones, of which another rank of the group counts the norm.

        Raises:
            TypeError: If a shard is not float32.
        """
        self._shards = [*shards, *duplicates]
        for shard in self._shards:
            if shard.dtype != torch.float32:
                raise TypeError(f"The outer optimizer works on FP32 main parameters, but a shard is {shard.dtype}.")
        self._sizes = [shard.numel() for shard in self._shards]
        self.unique_numel = sum(shard.numel() for shard in shards)
        device = self._shards[0].device if self._shards else None
        self.anchor = torch.empty(sum(self._sizes), dtype=torch.float32, device=device)
        self.momentum = torch.zeros_like(self.anchor)
        self.copy_parameters_to(self.anchor)

    @property
    def numel(self) -> int:
        """Number of parameters that this rank owns."""
        return self.anchor.numel()

    @property
    def nbytes(self) -> int:
        """Memory that the outer state takes between outer steps, in bytes."""
        return self.anchor.nbytes + self.momentum.nbytes

    def copy_parameters_to(self, flat: Tensor) -> None:
        """Reads the main parameters into ``flat``, float32, shape ``[numel]``."""
        if self._shards:
            torch._foreach_copy_(list(flat.split(self._sizes)), [shard.detach() for shard in self._shards])

    def pseudo_gradient(self) -> Tensor:
        """Returns ``anchor - parameters`` of this group; float32, shape ``[numel]``."""
        flat = torch.empty_like(self.anchor)
        self.copy_parameters_to(flat)
        return torch.sub(self.anchor, flat, out=flat)

    def set_parameters_to_anchor(self) -> None:
        """Writes the anchor into the main parameters."""
        if self._shards:
            torch._foreach_copy_([shard.detach() for shard in self._shards], list(self.anchor.split(self._sizes)))

    def parameters_are_finite(self) -> Tensor:
        """Returns a boolean scalar on the shards' device: no inf and no nan in any main parameter."""
        if not self._shards:
            return torch.ones((), dtype=torch.bool, device=self.anchor.device)
        # A norm carries every inf and nan to one number per shard without a mask as long as the shard.
        return torch.stack(torch._foreach_norm([shard.detach() for shard in self._shards])).isfinite().all()
