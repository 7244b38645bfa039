"""The outer optimizer's state: anchor and momentum, flat over the FP32 main shards of one rank, in chunks."""

import collections
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pier_megatron.outer.chunks import Shards, cut

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
        self.chunks = cut(shards, chunk_numel, fragments, cuts_matrices)
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
