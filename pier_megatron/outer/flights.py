"""Chunks that cross the groups one after the other, in windows that are spread over iterations."""

import abc
import dataclasses
import itertools
from collections.abc import Sequence

from torch import Tensor

from pier_megatron.exchange.collectives import Sum
from pier_megatron.outer.staging import Buffers, Staged, Staging, one_ahead
from pier_megatron.outer.state import Chunk

PIPELINE_DEPTH = 4
"""Chunks on their way at once where everything is waited for: one is subtracted, two are on the wire, one is updated."""


def window(index: int, number: int, span: int) -> tuple[int, int, int]:
    """When a chunk of a round that spans iterations is on the wire, in iterations since the round began.

    The chunks follow each other as evenly as the iterations allow: collectives that are queued back to back can hold up the
    kernels that come after them (with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` they do), and chunks that wait need no device memory.

    Args:
        index: Index of the chunk.
        number: Number of chunks in the round.
        span: Iterations after which the round ends, at least 1.

    Returns:
        Iterations at which its sum begins, it is sent on, and it must have arrived, at most ``span``.
    """
    begin = index * max(span - 1, 1) // number
    end = min(span, max(-(-(index + 1) * span // number), begin + 2))
    return begin, max(begin + 1, (begin + end) // 2), end


def chunks_on_the_wire(number: int, span: int) -> int:
    """Most chunks of a round that are on the wire at a time; as for :func:`window`."""
    ends = [window(index, number, span) for index in range(number)]
    return max((sum(begin <= now < end for begin, _, end in ends) for now in range(span)), default=0)


# How far a chunk has come.
_WAITING, _SENT, _SENT_ON, ARRIVED = range(4)


@dataclasses.dataclass
class Flight:
    """A chunk that crosses the groups.

    Attributes:
        staging: Lender of its buffers.
        chunk: The chunk.
        kept: Buffers that outlast its time on the wire; None if nothing does.
        stage: How far it has come.
        staged: Buffers in which it is worked on while it is on the wire.
        sum: Sum that it waits for then.
    """

    staging: Staging
    chunk: Chunk
    kept: Buffers | None = None
    stage: int = _WAITING
    staged: Staged | None = None
    sum: Sum = dataclasses.field(default_factory=Sum)

    def lend(self, *reads: str) -> Staged:
        """Lends buffers to the chunk; see :meth:`Staging.lend`."""
        return self.staging.lend(self.chunk, reads, self.kept)

    def kept_parts(self) -> dict[str, Tensor]:
        """Returns what the chunk fills of the buffers that are kept, by name."""
        assert self.kept is not None
        return self.kept.of(self.chunk)

    def release(self) -> None:
        """Gives the buffers back that are kept."""
        assert self.kept is not None
        self.staging.release(self.kept)


class Crossing(abc.ABC):
    """Flights that are moved on at the same iterations on every rank."""

    def __init__(self, reads: Sequence[str], flights: Sequence[Flight] = ()) -> None:
        """Takes the ``flights``, in order, and the names of what :meth:`_take_off` ``reads``."""
        self._reads, self._flights = reads, flights

    @abc.abstractmethod
    def _take_off(self, staged: Staged) -> Sum:
        """Begins the sum of a chunk."""

    @abc.abstractmethod
    def _land(self, staged: Staged) -> None:
        """Takes over the sum that has arrived in ``staged.shared``, and gives the buffers back."""

    def proceed(self, age: int, span: int) -> None:
        """Moves on what is due ``age`` iterations after the beginning, of ``span``; called at the same ages on every rank."""
        for index, flight in enumerate(self._flights):
            times = window(index, len(self._flights), span)
            self._move(flight, sum(age >= time for time in times))

    def arrive(self) -> None:
        """Waits for everything, a few chunks at a time."""
        for some in itertools.batched(self._flights, PIPELINE_DEPTH):
            for stage in (_SENT, _SENT_ON, ARRIVED):
                for flight in some:
                    self._move(flight, stage)

    def _move(self, flight: Flight, stage: int) -> None:
        if flight.stage < _SENT <= stage:
            [flight.staged] = one_ahead([flight.lend(*self._reads)])
            flight.sum = self._take_off(flight.staged)
        if flight.stage < _SENT_ON <= stage:
            flight.sum.advance()
        if flight.stage < ARRIVED <= stage:
            flight.sum.finish()
            assert flight.staged is not None
            self._land(flight.staged)
            flight.staged, flight.sum = None, Sum()
        flight.stage = max(flight.stage, stage)
