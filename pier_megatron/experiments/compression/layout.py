"""Where blocks begin: each parameter in a buffer begins a block, so no parameter affects the rounding of another.

Ranks that hold copies of a parameter, and different parts of others, then encode the copies alike. A parameter with small
numbers keeps them next to one with large numbers.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, padded

_PIECE = 2**26


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """Consecutive elements: where they begin in a part of the buffer and in its row, and how many they are."""

    in_part: int
    in_row: int
    numel: int

    def between(self, begin: int, end: int) -> "_Stretch | None":
        """What lies in these columns of the row, counted from the first of them; None if nothing does."""
        low, high = max(begin, self.in_row), min(end, self.in_row + self.numel)
        return _Stretch(self.in_part + low - self.in_row, low - begin, high - low) if low < high else None


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some whole blocks of each part of a buffer: what is encoded at once.

    Attributes:
        numel: Length of a row, a multiple of :data:`BLOCK`.
        stretches: What is in the row, for each part.
    """

    numel: int
    stretches: Sequence[Sequence[_Stretch]]

    def of(self, part: int) -> "Piece":
        """The same blocks of one part alone."""
        return Piece(self.numel, [self.stretches[part]])

    def read(self, parts: Tensor) -> Tensor:
        """The piece of each part, filled up with zeros; float32 of shape ``[m, numel]``, may be a view.

        Args:
            parts: The parts, of shape ``[m, n]`` and any floating-point type.
        """
        begins = {alike[0].in_part if len(alike) == 1 and alike[0].numel == self.numel else None for alike in self.stretches}
        [begin, *others] = begins
        if begin is not None and not others:
            return parts[:, begin : begin + self.numel].float()
        rows = parts.new_zeros(len(parts), self.numel, dtype=torch.float32)
        in_rows, in_parts = self._views(rows, parts)
        if in_rows:
            torch._foreach_copy_(in_rows, in_parts)
        return rows

    def write(self, rows: Tensor, parts: Tensor) -> None:
        """Writes what :meth:`read` has read, or what has become of it, back to its place."""
        in_rows, in_parts = self._views(rows, parts)
        if in_parts:
            torch._foreach_copy_(in_parts, in_rows)

    def _views(self, rows: Tensor, parts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        found = [
            (row[one.in_row : one.in_row + one.numel], part[one.in_part : one.in_part + one.numel])
            for row, part, stretches in zip(rows, parts, self.stretches, strict=True)
            for one in stretches
        ]
        return [row for row, _ in found], [part for _, part in found]


def pieces(numel: int, parts: int, parameters: Iterable[tuple[int, int]]) -> list[Piece]:
    """Lays out a buffer that is cut into equal parts, one for each rank that sends or receives one.

    Args:
        numel: Length of the buffer.
        parts: Number of parts.
        parameters: Begin and end of each parameter in the buffer, as far as it lies in it. What is between them is left
            out.

    Returns:
        Pieces of all parts, one behind the other: FP32 of 256 MiB at most, over all parts. This limit bounds the
        memory of encoding and decoding, however much is sent.
    """
    size = numel // parts
    ordered = sorted(parameters)
    rows = [_row([(max(low - begin, 0), min(high - begin, size)) for low, high in ordered]) for begin in range(0, numel, size)]
    length = max((padded(row[-1].in_row + row[-1].numel) for row in rows if row), default=0)
    step = max(_PIECE // parts // BLOCK, 1) * BLOCK
    return [
        Piece(end - begin, [[cut for one in row if (cut := one.between(begin, end)) is not None] for row in rows])
        for begin, end in itertools.pairwise([*range(0, length, step), length])
    ]


def _row(parameters: Iterable[tuple[int, int]]) -> list[_Stretch]:
    """Lays one part out, of the bounds of parameters, which may be beyond it; what stays side by side is one stretch."""
    row: list[_Stretch] = []
    for low, high in parameters:
        if low >= high:
            continue
        last = row[-1] if row else _Stretch(low, 0, 0)
        begin = padded(last.in_row + last.numel)
        if low - last.in_part == begin - last.in_row:
            row[-1:] = [_Stretch(last.in_part, last.in_row, begin + high - low - last.in_row)]
        else:
            row.append(_Stretch(low, begin, high - low))
    return row
