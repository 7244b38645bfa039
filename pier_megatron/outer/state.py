"""The outer optimizer's state: anchor and momentum, flat over the FP32 main shards of one rank, in chunks."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import Codec

ANCHOR, MOMENTUM, RESIDUAL, REDUCED = "anchor", "momentum", "residual", "reduced"
"""Names of flat buffers."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

# Numbers whose bits are summed at once, in 8 MiB.
_SUMMED_AT_ONCE = 2**20


def sum_of_bits(vector: Tensor) -> Tensor:
    """Sums the bits of floating-point numbers, taken for integers of their size; an int64 scalar on their device."""
    # Part by part, because a sum in int64 copies what it sums.
    parts = vector.view(_INTEGERS[vector.element_size()]).split(_SUMMED_AT_ONCE)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


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
    def end(self) -> int:
        """Index behind its last element."""
        return self.begin + self.shape.numel()

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
        matrices: For each of the tensors the matrix in it, see :func:`matrix_in`; empty if there is none.
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
    def matrix_sizes(self) -> list[int]:
        """Numbers of their elements."""
        return [at.shape.numel() for at in self._matrices]

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


class OuterState:
    """Anchor, and what the outer rule remembers, of one rank's share of the parameters.

    Everything that lasts is in :attr:`kept`, by name: what saves, restores, resets or hands over walks that list. Flat buffers
    are laid over the shards, in order, so that an outer step is a few passes over long vectors and a few
    collectives instead of thousands of each.

    Attributes:
        numel: Number of parameters that this rank owns.
        device: Device of the parameters.
        offload: Whether the outer state is in host memory.
        factory_kwargs: Device of the outer state and pinning, as keyword arguments of ``torch.zeros``.
        common: Names of the flat buffers that all groups agree on: the anchor, then the memory of the rule.
        flats: The flat buffers by name; float32, shape ``[numel]`` each. With error feedback one is the residual: what this
            group's own pseudo-gradients lost on the wire.
        reduced_residuals: Values lost by the sums that this group computes for all, by chunk start, with error feedback.
        chunks: What the buffers are cut into. A chunk lies in one fragment, and in shards that are treated alike.
    """

    def __init__(
        self,
        shards: Sequence[Shards],
        chunk_numel: int = 4 * 2**20,
        fragments: int = 1,
        offload: bool = False,
        segment_numel: Callable[[int], int] | None = None,
        device: torch.device | None = None,
        common: Sequence[str] = (ANCHOR, MOMENTUM),
        residuals: Sequence[str] = (),
        cuts_matrices: bool = True,
    ) -> None:
        """Starts with the anchor at the present parameters, and all else zero.

        Args:
            shards: This rank's main parameters, those of the last fragment last. Their sizes alone decide where chunks and
                fragments are cut: ranks that hold copies cut them alike if what comes before has the same size.
            chunk_numel: Largest number of elements in a chunk.
            fragments: Number of fragments, of about equal size, that are exchanged at different times.
            offload: Whether the flat buffers are in host memory, pinned where there is a device to copy to.
            segment_numel: Number of elements that this rank sums for all, out of those of a chunk that it exchanges; with error
                feedback only.
            device: Device of the main parameters, where there may be none.
            common: Names of what all groups agree on, see :func:`pier_megatron.outer.rules.common_names`.
            residuals: Names of flat buffers that are this group's own: what codecs drop.
            cuts_matrices: Whether chunks and fragments may end inside a matrix.

        Raises:
            TypeError: If a tensor is not float32, and not stored in another form.
            ValueError: If a tensor is not contiguous.
        """
        self._given = [tensor for alike in shards for tensor in alike.tensors]
        for tensor, stored in ((tensor, alike.stored) for alike in shards for tensor in alike.tensors):
            if tensor.dtype != torch.float32 and stored is None:
                raise TypeError(f"The outer optimizer works on FP32 main parameters, but one is {tensor.dtype}.")
            if not tensor.is_contiguous():
                raise ValueError(f"The outer optimizer works on contiguous main parameters, but one has {tensor.stride()=}.")
        self.numel = sum(tensor.numel() for tensor in self._given)
        self.device = self._given[0].device if self._given else device or torch.device("cpu")
        self.offload = offload
        self._on_host: dict[str, Any] = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        self.factory_kwargs = self._on_host if offload else {"device": self.device}
        self.common = tuple(common)
        names = (*self.common, *residuals)
        self.flats = {name: torch.zeros(self.numel, dtype=torch.float32, **self.factory_kwargs) for name in names}
        self.chunks = _cut(shards, chunk_numel, fragments, cuts_matrices)
        self._fragments = fragments
        self.reduced_residuals: dict[int, Tensor] = {}
        if segment_numel:
            self.reduced_residuals = {
                chunk.start: torch.zeros(segment_numel(chunk.carried), dtype=torch.float32, device=self.device)
                for chunk in self.chunks
            }
        self.copy_parameters_to(self.anchor)

    @property
    def anchor(self) -> Tensor:
        """Parameters that all groups agreed on last; float32, shape ``[numel]``."""
        return self.flats[ANCHOR]

    @property
    def momentum(self) -> Tensor:
        """Sum of past pseudo-gradients, before the outer learning rate; float32, shape ``[numel]``."""
        return self.flats[MOMENTUM]

    @property
    def copies_on_streams(self) -> bool:
        """Whether chunks are copied to the device and back during the work on others."""
        return self.offload and self.device.type == "cuda"

    @property
    def nbytes(self) -> int:
        """Memory that the state takes between outer steps, in bytes."""
        return sum(buffer.nbytes for buffer in self.kept.values())

    @property
    def in_fragments(self) -> list[int]:
        """Number of chunks in each fragment."""
        numbers = collections.Counter(chunk.fragment for chunk in self.chunks)
        return [numbers[fragment] for fragment in range(self._fragments)]

    @property
    def counted(self) -> int:
        """Parameters that a norm over the model counts on this rank."""
        return sum(chunk.numel for chunk in self.chunks if chunk.shards.is_counted)

    def slices(self) -> Iterator[tuple[Tensor, slice]]:
        """The main parameters as they were given, each with its stretch of the flat buffers."""
        bounds = itertools.accumulate((tensor.numel() for tensor in self._given), initial=0)
        return ((tensor, slice(*ends)) for tensor, ends in zip(self._given, itertools.pairwise(bounds), strict=True))

    @property
    def kept(self) -> dict[str, Tensor]:
        """All that the state holds, by name: its own tensors, not copies, so that what is written to them it holds."""
        return self.flats | {f"reduced_{start}": residual for start, residual in self.reduced_residuals.items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Takes over saved tensors, except those that are its own; what was not saved stays."""
        for name, own in self.kept.items():
            if name in saved and saved[name] is not own:
                own.copy_(saved[name])

    def forget(self, names: Collection[str]) -> None:
        """Sets some of what it holds to zero."""
        for name, own in self.kept.items():
            if name in names:
                own.zero_()

    def copy_parameters_to(self, flat: Tensor) -> Tensor:
        """Reads the main parameters into ``flat``, laid out as the flat buffers: float32 of shape ``[numel]``."""
        for chunk in self.chunks:
            chunk.copy_parameters_to(chunk.of(flat))
        return flat

    def parameters_on_host(self) -> Tensor:
        """Copies the main parameters to host memory, pinned where there is a device, laid out as the flat buffers."""
        return self.copy_parameters_to(torch.empty(self.numel, dtype=torch.float32, **self._on_host))

    def set_parameters(self, flat: Tensor) -> None:
        """Writes the main parameters; the inverse of :meth:`copy_parameters_to`."""
        for chunk in self.chunks:
            chunk.set_parameters(chunk.of(flat))

    def checksum(self, name: str) -> Tensor:
        """Sum of the bits of a flat buffer, over the chunks that this rank counts and what is averaged; an int64 scalar.

        The same however the ranks of a group share the model, unless something is averaged: each rank adds its copy.
        """
        flat = self.flats[name]
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for chunk in self.chunks:
            if chunk.shards.is_counted or chunk.shards.is_averaged:
                total += sum_of_bits(chunk.of(flat))
        return total.to(self.device)

    def parameters_are_finite(self) -> Tensor:
        """Returns a boolean scalar on the shards' device: no inf and no nan in any main parameter."""
        # A norm carries every inf and nan to one number per piece without a mask as long as the piece.
        norms = [norm for chunk in self.chunks for norm in torch._foreach_norm(chunk.values)]
        return torch.stack([*norms, torch.zeros((), device=self.device)]).isfinite().all()


def _cut(shards: Sequence[Shards], chunk_numel: int, fragments: int, cuts_matrices: bool) -> list[Chunk]:
    untied = sum(tensor.numel() for alike in shards if not alike.come_last for tensor in alike.tensors)
    fragment_ends = [untied * (fragment + 1) // fragments for fragment in range(fragments - 1)]
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
