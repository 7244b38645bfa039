"""The outer optimizer's state: anchor and momentum, flat over the FP32 main shards of one rank, in chunks."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ANCHOR, MOMENTUM, RESIDUAL = "anchor", "momentum", "residual"
"""Names of the flat buffers."""


class Chunk:
    """A stretch of the flat buffers: what is exchanged and updated in one go.

    Attributes:
        start: Of its first element.
        numel: Number of elements.
        fragment: Index of the fragment that it belongs to.
        is_unique: Whether a norm over the model counts it on this rank, see :class:`OuterState`.
    """

    def __init__(self, start: int, fragment: int, is_unique: bool, parameters: Sequence[Tensor]) -> None:
        """Lays a chunk over consecutive pieces of the main parameters."""
        self.start = start
        self.fragment = fragment
        self.is_unique = is_unique
        self._parameters = list(parameters)
        self._sizes = [piece.numel() for piece in parameters]
        self.numel = sum(self._sizes)

    def of(self, flat: Tensor) -> Tensor:
        """The chunk's part of a flat buffer, a view of shape ``[numel]``."""
        return flat[self.start : self.start + self.numel]

    def copy_parameters_to(self, target: Tensor) -> None:
        """Reads the main parameters; ``target`` is float32 of shape ``[numel]``."""
        torch._foreach_copy_(list(target.split(self._sizes)), self._parameters)

    def set_parameters(self, source: Tensor) -> None:
        """Writes the main parameters; ``source`` is float32 of shape ``[numel]``."""
        torch._foreach_copy_(self._parameters, list(source.split(self._sizes)))

    def move_parameters(self, difference: Tensor) -> None:
        """Adds to the main parameters; ``difference`` is float32 of shape ``[numel]``."""
        torch._foreach_add_(self._parameters, list(difference.split(self._sizes)))


class OuterState:
    """Anchor and momentum of one rank's share of the parameters.

    They are laid flat over the shards, in order, so that an outer step is a few passes over long vectors and a few
    collectives instead of thousands of each.

    Attributes:
        numel: Number of parameters that this rank owns.
        device: Where they are.
        offload: Whether the outer state is in host memory.
        flats: The flat buffers by name; float32, shape ``[numel]`` each. The anchor: parameters that all groups agreed on
            last. The momentum: sum of past pseudo-gradients, before the outer learning rate. With error feedback, the
            residual: what this group's own pseudo-gradients lost on the wire.
        chunks: What the buffers are cut into. A chunk lies in one fragment, and is unique or not as a whole.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],
        duplicates: Sequence[Tensor] = (),
        chunk_numel: int = 4 * 2**20,
        fragments: int = 1,
        offload: bool = False,
        segment_numel: Callable[[int], int] | None = None,
    ) -> None:
        """Starts with the anchor at the present parameters and no momentum.

        Args:
            shards: This rank's FP32 main parameters, one-dimensional. They are read and written in place.
            duplicates: Further ones, of which another rank of the group counts the norm.
            chunk_numel: Largest number of elements in a chunk.
            fragments: Number of parts, of about equal size, that are exchanged at different times.
            offload: Keep the flat buffers in host memory, pinned where there is a device to copy to.
            segment_numel: With error feedback, the number of elements of a chunk that this group sums for all, by the
                chunk's length.

        Raises:
            TypeError: If a shard is not float32.
        """
        self._shards = [shard.detach() for shard in (*shards, *duplicates)]
        for shard in self._shards:
            if shard.dtype != torch.float32:
                raise TypeError(f"The outer optimizer works on FP32 main parameters, but a shard is {shard.dtype}.")
        self.numel = sum(shard.numel() for shard in self._shards)
        self.device = self._shards[0].device if self._shards else torch.device("cpu")
        self.offload = offload
        names = (ANCHOR, MOMENTUM, RESIDUAL) if segment_numel else (ANCHOR, MOMENTUM)
        place = {"device": "cpu", "pin_memory": self.device.type == "cuda"} if offload else {"device": self.device}
        self.flats = {name: torch.zeros(self.numel, dtype=torch.float32, **place) for name in names}
        self.chunks = self._cut(sum(shard.numel() for shard in shards), chunk_numel, fragments)
        self.reduced_residuals: dict[int, Tensor] = {}
        if segment_numel:
            self.reduced_residuals = {
                chunk.start: torch.zeros(segment_numel(chunk.numel), dtype=torch.float32, device=self.device)
                for chunk in self.chunks
            }
        self.reset_anchor()

    def _cut(self, unique_numel: int, chunk_numel: int, fragments: int) -> list[Chunk]:
        fragment_ends = [self.numel * (fragment + 1) // fragments for fragment in range(fragments)]
        cuts = {unique_numel, self.numel, *fragment_ends, *range(0, self.numel, chunk_numel)}
        shard_starts = list(itertools.accumulate((shard.numel() for shard in self._shards), initial=0))
        chunks = []
        for start, stop in itertools.pairwise(sorted(cuts)):
            pieces = [
                shard[max(start - begin, 0) : stop - begin]
                for shard, begin, end in zip(self._shards, shard_starts, shard_starts[1:], strict=False)
                if begin < stop and start < end
            ]
            fragment = next(index for index, end in enumerate(fragment_ends) if start < end)
            chunks.append(Chunk(start, fragment, start < unique_numel, pieces))
        return chunks

    @property
    def anchor(self) -> Tensor:
        """Parameters that all groups agreed on last; float32, shape ``[numel]``."""
        return self.flats[ANCHOR]

    @property
    def momentum(self) -> Tensor:
        """The outer momentum; float32, shape ``[numel]``."""
        return self.flats[MOMENTUM]

    @property
    def nbytes(self) -> int:
        """Memory that the state takes between outer steps, in bytes."""
        return sum(buffer.nbytes for buffer in (*self.flats.values(), *self.reduced_residuals.values()))

    def reduced_residual_of(self, chunk: Chunk) -> Tensor | None:
        """With error feedback, what the sums that this group computed of a chunk lost on the wire."""
        return self.reduced_residuals.get(chunk.start)

    def reset_anchor(self) -> None:
        """Takes the present parameters for those that all groups agreed on last."""
        for chunk in self.chunks:
            chunk.copy_parameters_to(chunk.of(self.anchor))

    def parameters_are_finite(self) -> Tensor:
        """Returns a boolean scalar on the shards' device: no inf and no nan in any main parameter."""
        if not self._shards:
            return torch.ones((), dtype=torch.bool)
        # A norm carries every inf and nan to one number per shard without a mask as long as the shard.
        return torch.stack(torch._foreach_norm(self._shards)).isfinite().all()
