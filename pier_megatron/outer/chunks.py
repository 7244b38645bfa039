"""What a rank owns of the parameters, and the stretches of it that are exchanged and updated in one go."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import Codec


class Stored(Protocol):
    """Main parameters that an inner optimizer keeps in another form than FP32 tensors.

    Attributes:
        takes_whole: Whether the stored form of an element depends on its whole tensor. Then :meth:`write` takes effect once
            every element has been written, fragments are cut between tensors, and :meth:`read` may return rounded numbers.
    """

    takes_whole: bool

    def read(self, parameter: Tensor, at: slice) -> Tensor:
        """Returns a stretch of a flattened main parameter: float32, on its device, a copy or what is stored.

        The caller may change it if :meth:`write` comes next.
        """

    def write(self, parameter: Tensor, at: slice, values: Tensor) -> None:
        """Writes a stretch of a flattened main parameter, so that :meth:`read` returns the same bits, unless rounded.

        The values are float32, on any device.
        """


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Where a matrix lies in a flat vector.

    Attributes:
        begin: Index of its first element.
        shape: Its two dimensions.
    """

    begin: int
    shape: torch.Size

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def end(self) -> int:
        """Index behind its last element."""
        return self.begin + self.numel

    def behind(self, start: int) -> "Matrix":
        """The same in a vector in which what it was found in begins at ``start``."""
        return dataclasses.replace(self, begin=self.begin + start)


def matrix_in(parameter: Tensor, stretch: slice) -> Matrix | None:
    """Returns the rows of a parameter that lie whole in a stretch of it: what an outer rule for matrices takes for one.

    None if there are none, or the parameter is no matrix to Megatron's Muon either: a vector, an embedding or an output layer.
    """
    if parameter.dim() != 2 or getattr(parameter, "is_embedding_or_output_parameter", False):
        return None
    columns = parameter.shape[1]
    first, last = -(-stretch.start // columns), stretch.stop // columns
    return Matrix(first * columns - stretch.start, torch.Size((last - first, columns))) if first < last else None


@dataclasses.dataclass(frozen=True)
class Shards:
    """Main parameters that are treated alike.

    Attributes:
        tensors: FP32 tensors, contiguous, of any shape, read and written in place; with ``stored``, the tensors that it knows
            main parameters by, of their shape and device.
        is_counted: Whether a norm over the model counts them on this rank; another rank of the group does if not.
        is_tied: Whether another pipeline stage holds the same parameters, laid out differently. They are exchanged at the
            same time, in the last fragment, and exactly, so that both copies see the same.
        is_copied: Whether other ranks of the group hold the same parameters at the same place, and exchange them over
            communicators of their own.
        holders: Ranks of the group that hold the same parameters at the same place, and exchange a part of them each; None if
            this rank exchanges all of them.
        matrices: The matrix in each of the tensors, see :func:`matrix_in`; empty if there is none.
        is_averaged: Whether an outer step takes their mean, without momentum: no gradient moves them, such as the biases of
            routers. They are exchanged in the last fragment, and exactly.
        stored: How main parameters are read and written that are no FP32 tensors; None if they are.
    """

    tensors: Sequence[Tensor]
    is_counted: bool = True
    is_tied: bool = False
    is_copied: bool = False
    is_averaged: bool = False
    stored: Stored | None = None
    holders: dist.ProcessGroup | None = None
    matrices: Sequence[Matrix | None] = ()

    def whole(self) -> "Shards":
        """The same parameters without holders, for elastic islands, where the exchange of one rank may fail alone."""
        return dataclasses.replace(self, holders=None, is_copied=self.is_copied or self.holders is not None)

    @property
    def come_last(self) -> bool:
        """Whether they belong to the last fragment, wherever they are."""
        return self.is_tied or self.is_averaged

    def travel_exactly(self, codec: Codec) -> bool:
        """Whether sums over the groups are those of FP32 numbers in group order, so that all copies see the same bits.

        Sums of encoded numbers are in that order, too; of copies at the same place they are the same.

        Args:
            codec: Codec of the exchange.
        """
        return self.come_last or (self.is_copied and codec.lossless)


class Chunk:
    """A stretch of the flat buffers: what is exchanged and updated in one go.

    Attributes:
        start: Index of its first element.
        numel: Number of elements.
        carried: Number of elements of these that this rank exchanges.
        fragment: Index of the fragment that it belongs to.
        shards: What it is a stretch of.
    """

    def __init__(
        self,
        start: int,
        fragment: int,
        shards: Shards,
        pieces: Sequence[tuple[Tensor, slice]],
        matrices: Sequence[Matrix] = (),
    ) -> None:
        """Lays a chunk over consecutive pieces of the main parameters.

        Args:
            start: Index of its first element.
            fragment: Index of the fragment that it belongs to.
            shards: What it is a stretch of.
            pieces: Tensors of the shards and stretches of them, flat.
            matrices: Matrices in it, which it does not cut.
        """
        self.start = start
        self._matrices = matrices
        self.fragment = fragment
        self.shards = shards
        self._pieces = pieces
        self._views = [tensor.detach().view(-1)[at] for tensor, at in pieces]
        self._sizes = [view.numel() for view in self._views]
        self.numel = sum(self._sizes)
        self.carried = -(-self.numel // (shards.holders.size() if shards.holders else 1))

    @property
    def values(self) -> list[Tensor]:
        """The main parameters that it is laid over, in order; float32, flat: the stored ones, or copies."""
        stored = self.shards.stored
        return self._views if stored is None else [stored.read(*piece) for piece in self._pieces]

    def of(self, flat: Tensor) -> Tensor:
        """The chunk's part of a flat buffer, a view of shape ``[numel]``."""
        return flat[self.start : self.start + self.numel]

    def matrices(self, vector: Tensor) -> Iterator[Tensor]:
        """The matrices in a vector of the chunk's shape, views of two dimensions; none without a rule for matrices."""
        return (vector[at.begin : at.end].view(at.shape) for at in self._matrices)

    @property
    def matrix_shapes(self) -> list[torch.Size]:
        """Their shapes."""
        return [at.shape for at in self._matrices]

    def copy_parameters_to(self, target: Tensor) -> None:
        """Reads the main parameters; ``target`` is float32 of shape ``[numel]``."""
        torch._foreach_copy_(list(target.split(self._sizes)), self.values)

    def set_parameters(self, source: Tensor) -> None:
        """Writes the main parameters; ``source`` is float32 of shape ``[numel]``."""
        parts = list(source.split(self._sizes))
        if self.shards.stored is None:
            torch._foreach_copy_(self._views, parts)
            return
        for piece, part in zip(self._pieces, parts, strict=True):
            self.shards.stored.write(*piece, part)

    def move_parameters(self, difference: Tensor) -> None:
        """Adds to the main parameters; ``difference`` is float32 of shape ``[numel]``."""
        parts = list(difference.split(self._sizes))
        if self.shards.stored is None:
            torch._foreach_add_(self._views, parts)
            return
        for piece, part in zip(self._pieces, parts, strict=True):
            self.shards.stored.write(*piece, self.shards.stored.read(*piece).add_(part))


def cut(shards: Sequence[Shards], chunk_numel: int, fragments: int, cuts_matrices: bool) -> list[Chunk]:
    """Returns the chunks of a rank; for the arguments see :class:`pier_megatron.outer.state.OuterState`."""
    untied = sum(tensor.numel() for alike in shards if not alike.come_last for tensor in alike.tensors)
    fragment_ends = [untied * (fragment + 1) // fragments for fragment in range(fragments - 1)]
    if not cuts_matrices:
        # Buffers are as long as the longest chunk: shorter ones would waste most of theirs.
        whole = (matrix.numel for alike in shards for matrix in alike.matrices if matrix is not None)
        chunk_numel = max(chunk_numel, *whole, 0)
    chunks: list[Chunk] = []
    begin = 0
    for alike in shards:
        starts = list(itertools.accumulate((tensor.numel() for tensor in alike.tensors), initial=begin))
        end = starts[-1]
        found = zip(starts, () if cuts_matrices else alike.matrices, strict=False)
        matrices = [matrix.behind(start) for start, matrix in found if matrix is not None]
        if alike.stored is not None and alike.stored.takes_whole:
            fragment_ends = [next((start for start in starts if start >= cut), cut) for cut in fragment_ends]
        fragment_ends = [_outside(cut, 0, matrices) for cut in fragment_ends]
        cuts = {begin, end, *_grid(begin, end, chunk_numel, matrices), *(cut for cut in fragment_ends if begin < cut < end)}
        for start, stop in itertools.pairwise(sorted(cuts)):
            pieces = [
                (tensor, slice(max(start - low, 0), min(stop, high) - low))
                for tensor, (low, high) in zip(alike.tensors, itertools.pairwise(starts), strict=True)
                if low < stop and start < high
            ]
            fragment = fragments - 1 if alike.come_last else sum(start >= cut for cut in fragment_ends)
            inside = [matrix.behind(-start) for matrix in matrices if start <= matrix.begin < stop]
            chunks.append(Chunk(start, fragment, alike, pieces, inside))
        begin = end
    return chunks


def _grid(begin: int, end: int, chunk_numel: int, matrices: Sequence[Matrix]) -> Iterator[int]:
    """Where chunks begin: as long as asked for, but that none ends in a matrix."""
    while begin < end:
        yield begin
        begin = _outside(begin + chunk_numel, begin, matrices)


def _outside(cut: int, after: int, matrices: Sequence[Matrix]) -> int:
    """A cut that divides none of the matrices: before the one that it is in, if that is ``after`` something, or behind it."""
    for matrix in matrices:
        if matrix.begin < cut < matrix.end:
            return matrix.begin if matrix.begin > after else matrix.end
    return cut
