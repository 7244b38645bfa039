"""The outer optimizer's state: anchor and momentum, flat over the FP32 main shards of one rank, in chunks."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

ANCHOR, MOMENTUM, RESIDUAL = "anchor", "momentum", "residual"
"""Names of the flat buffers."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Main parameters that are treated alike.

    Attributes:
        shards: FP32, one-dimensional. They are read and written in place.
        is_counted: Whether a norm over the model counts them on this rank; another rank of the group does if not.
        is_tied: Whether another pipeline stage holds the same parameters, laid out differently. They are exchanged at the
            same time, in the last fragment, and exactly, so that both copies see the same.
    """

    shards: Sequence[Tensor]
    is_counted: bool = True
    is_tied: bool = False


class Chunk:
    """A stretch of the flat buffers: what is exchanged and updated in one go.

    Attributes:
        start: Of its first element.
        numel: Number of elements.
        fragment: Index of the fragment that it belongs to.
        part: What it is a stretch of.
    """

    def __init__(self, start: int, fragment: int, part: Part, parameters: Sequence[Tensor]) -> None:
        """Lays a chunk over consecutive pieces of the main parameters."""
        self.start = start
        self.fragment = fragment
        self.part = part
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
        chunks: What the buffers are cut into. A chunk lies in one fragment and one part.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        chunk_numel: int = 4 * 2**20,
        fragments: int = 1,
        offload: bool = False,
        segment_numel: Callable[[int], int] | None = None,
    ) -> None:
        """Starts with the anchor at the present parameters and no momentum.

        Args:
            parts: This rank's main parameters, those that are tied last. The cuts hang on their sizes only: ranks that
                hold copies of a part cut it alike if what comes before it has the same size.
            chunk_numel: Largest number of elements in a chunk.
            fragments: Number of parts, of about equal size, that are exchanged at different times.
            offload: Keep the flat buffers in host memory, pinned where there is a device to copy to.
            segment_numel: With error feedback, the number of elements of a chunk that this group sums for all, by the
                chunk's length.

        Raises:
            TypeError: If a shard is not float32.
        """
        self._given = [shard for part in parts for shard in part.shards]
        self._shards = [shard.detach() for shard in self._given]
        for shard in self._shards:
            if shard.dtype != torch.float32:
                raise TypeError(f"The outer optimizer works on FP32 main parameters, but a shard is {shard.dtype}.")
        self.numel = sum(shard.numel() for shard in self._shards)
        self.device = self._shards[0].device if self._shards else torch.device("cpu")
        self.offload = offload
        names = (ANCHOR, MOMENTUM, RESIDUAL) if segment_numel else (ANCHOR, MOMENTUM)
        place = {"device": "cpu", "pin_memory": self.device.type == "cuda"} if offload else {"device": self.device}
        self.flats = {name: torch.zeros(self.numel, dtype=torch.float32, **place) for name in names}
        self.chunks = self._cut(parts, chunk_numel, fragments)
        self.reduced_residuals: dict[int, Tensor] = {}
        if segment_numel:
            self.reduced_residuals = {
                chunk.start: torch.zeros(segment_numel(chunk.numel), dtype=torch.float32, device=self.device)
                for chunk in self.chunks
            }
        self.reset_anchor()

    def _cut(self, parts: Sequence[Part], chunk_numel: int, fragments: int) -> list[Chunk]:
        untied = sum(shard.numel() for part in parts if not part.is_tied for shard in part.shards)
        fragment_ends = [untied * (fragment + 1) // fragments for fragment in range(fragments - 1)]
        chunks: list[Chunk] = []
        begin = 0
        for part in parts:
            starts = list(itertools.accumulate((shard.numel() for shard in part.shards), initial=begin))
            end = starts[-1]
            cuts = {begin, end, *range(begin, end, chunk_numel), *(cut for cut in fragment_ends if begin < cut < end)}
            for start, stop in itertools.pairwise(sorted(cuts)):
                pieces = [
                    shard.detach()[max(start - low, 0) : stop - low]
                    for shard, (low, high) in zip(part.shards, itertools.pairwise(starts), strict=True)
                    if low < stop and start < high
                ]
                fragment = fragments - 1 if part.is_tied else sum(start >= cut for cut in fragment_ends)
                chunks.append(Chunk(start, fragment, part, pieces))
            begin = end
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

    def places(self) -> Iterator[tuple[Tensor, slice]]:
        """The main parameters as they were given, each with its place in the flat buffers."""
        bounds = itertools.accumulate((shard.numel() for shard in self._given), initial=0)
        return ((shard, slice(*ends)) for shard, ends in zip(self._given, itertools.pairwise(bounds), strict=True))

    def residuals(self) -> dict[str, Tensor]:
        """With error feedback, all that the codec has dropped, by name; float32."""
        reduced = {f"reduced_{start}": residual for start, residual in self.reduced_residuals.items()}
        return ({RESIDUAL: self.flats[RESIDUAL]} if RESIDUAL in self.flats else {}) | reduced

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
