"""Chunks that cross the groups in batches, one after the other, in windows that are spread over iterations."""

import abc
import collections
import dataclasses
import itertools
from collections.abc import Sequence

from torch import Tensor

from pier_megatron.exchange.collectives import Sum
from pier_megatron.outer.staging import Buffers, Staged, Staging
from pier_megatron.outer.state import Chunk

PIPELINE_DEPTH = 4
"""Chunks on their way at once where everything is waited for: one is subtracted, two are on the wire, one is updated."""


def batch_sizes(number: int, span: int, launches: int) -> list[int]:
    """Chunks of a round that spans iterations, in batches that are launched together: as evenly as they divide.

    Batches are as many as can be launched in iterations of their own, and the first iteration is that of the verdicts:
    collectives that are queued back to back can hold up the kernels that come after them (with
    ``CUDA_DEVICE_MAX_CONNECTIONS=1`` they do).

    Args:
        number: Number of chunks in the round.
        span: Iterations after which the round ends, at least 1.
        launches: Collectives that a sum launches one after the other.

    Returns:
        Number of chunks in each batch.
    """
    batches = min(number, max(1, (span - _of_verdicts(span) - 1) // launches))
    return [(index + 1) * number // batches - index * number // batches for index in range(batches)]


def _of_verdicts(span: int) -> int:
    """Iterations at the beginning of a round in which no sum begins: one, or none where an exchange then had no time left."""
    return int(span > 2)


def window(index: int, number: int, span: int) -> tuple[int, int, int]:
    """When a batch of a round that spans iterations is on the wire, in iterations since the round began.

    The batches follow each other as evenly as the iterations allow; chunks that wait need no device memory.

    Args:
        index: Index of the batch.
        number: Number of batches in the round.
        span: Iterations after which the round ends, at least 1.

    Returns:
        Iterations at which its sum begins, it is sent on, and it must have arrived, at most ``span``.
    """
    before = _of_verdicts(span)
    left = span - before
    begin = index * max(left - 1, 1) // number
    end = min(left, max(-(-(index + 1) * left // number), begin + 2))
    return before + begin, before + max(begin + 1, (begin + end - 1) // 2), before + end


AHEAD = 1
"""Iterations for which what is offloaded comes in before it is sent."""


def chunks_at_once(numbers: Sequence[int], span: int, launches: int, ahead: int = 0) -> list[int]:
    """Most chunks of each state that are on the wire at a time in a round, or are there within ``ahead`` iterations.

    Args:
        numbers: Number of chunks of each state in the round.
        span: Iterations after which the round ends.
        launches: Collectives that a sum launches one after the other.
        ahead: Iterations before its sum begins at which a batch counts.
    """
    sizes = batch_sizes(sum(numbers), span, launches)
    states = iter([state for state, number in enumerate(numbers) for _ in range(number)])
    batches = [collections.Counter(itertools.islice(states, size)) for size in sizes]
    windows = [window(index, len(sizes), span) for index in range(len(sizes))]
    most = collections.Counter[int]()
    for now in range(span):
        under_way = (batch for batch, (begin, _, end) in zip(batches, windows, strict=True) if begin - ahead <= now < end)
        most |= sum(under_way, collections.Counter())
    return [most[state] for state in range(len(numbers))]


# How far a batch has come.
_WAITING, LENT, _SENT, _SENT_ON, ARRIVED = range(5)


@dataclasses.dataclass
class Flight:
    """A chunk that crosses the groups.

    Attributes:
        staging: Lender of its buffers.
        chunk: The chunk.
        kept: Buffers that outlast its time on the wire; None if nothing does.
        staged: Buffers in which it is worked on while it is on the wire.
    """

    staging: Staging
    chunk: Chunk
    kept: Buffers | None = None
    staged: Staged | None = None

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


@dataclasses.dataclass
class Batch:
    """Flights that are launched together.

    Attributes:
        flights: The flights.
        stage: How far they have come.
        sum: Sum that they wait for while they are on the wire.
    """

    flights: Sequence[Flight]
    stage: int = _WAITING
    sum: Sum = dataclasses.field(default_factory=Sum)


class Crossing(abc.ABC):
    """Flights that are moved on at the same iterations on every rank."""

    def __init__(self, reads: Sequence[str], launches: int, flights: Sequence[Flight] = ()) -> None:
        """Takes the ``flights``, in order, the names of what :meth:`_take_off` ``reads``, and how often a sum is launched."""
        self._reads, self._launches, self._flights = reads, launches, flights
        self._batches: Sequence[Batch] | None = None

    @abc.abstractmethod
    def _take_off(self, batch: Sequence[Staged]) -> Sum:
        """Begins the sum of some chunks."""

    @abc.abstractmethod
    def _land(self, staged: Staged) -> None:
        """Takes over the sum that has arrived in ``staged.shared``, and gives the buffers back."""

    def proceed(self, age: int, span: int) -> None:
        """Moves on what is due ``age`` iterations after the beginning, of ``span``; called at the same ages on every rank."""
        batches = self.batches(span)
        for index, batch in enumerate(batches):
            begin, *later = window(index, len(batches), span)
            lent = begin - AHEAD if any(flight.staging.state.offload for flight in batch.flights) else begin
            self._move(batch, sum(age >= time for time in (lent, begin, *later)))

    def batches(self, span: int) -> Sequence[Batch]:
        """The flights in batches, as they are launched if that is spread over ``span`` iterations."""
        if self._batches is None:
            sizes = batch_sizes(len(self._flights), span, self._launches)
            flights = iter(self._flights)
            self._batches = [Batch(list(itertools.islice(flights, size))) for size in sizes]
        return self._batches

    def arrive(self) -> None:
        """Waits for everything, a few chunks at a time."""
        if self._batches is None:
            self._batches = [Batch([flight]) for flight in self._flights]
        longest = max((len(batch.flights) for batch in self._batches), default=1)
        for some in itertools.batched(self._batches, max(1, PIPELINE_DEPTH // longest)):
            for stage in (LENT, _SENT, _SENT_ON, ARRIVED):
                for batch in some:
                    self._move(batch, stage)

    def drop(self, is_lost: bool = False) -> None:
        """Gives all buffers back, and forgets what they hold; called on every rank alike.

        Args:
            is_lost: Whether the communicator is lost. Buffers on the wire are not used again then: nobody can wait for their
                sums, which may still write to them.
        """
        for batch in self._batches or [Batch(self._flights)]:
            if batch.stage in (_SENT, _SENT_ON):
                if is_lost:
                    continue
                if batch.stage == _SENT:
                    batch.sum.advance()
                batch.sum.finish()
            for flight in batch.flights:
                if flight.staged is not None:
                    flight.staged.give_back()
                if flight.kept is not None:
                    flight.release()
        self._flights, self._batches = [], ()

    def _move(self, batch: Batch, stage: int) -> None:
        if batch.stage < LENT <= stage:
            for flight in batch.flights:
                flight.staged = flight.lend(*self._reads)
        if batch.stage < _SENT <= stage:
            # Also where its collective fails to begin, or fails in the midst of it.
            batch.stage = _SENT
            staged = [flight.staged for flight in batch.flights if flight.staged is not None]
            for each in staged:
                each.wait()
            batch.sum = self._take_off(staged)
        if batch.stage < _SENT_ON <= stage:
            batch.sum.advance()
        if batch.stage < ARRIVED <= stage:
            batch.sum.finish()
            for flight in batch.flights:
                assert flight.staged is not None
                self._land(flight.staged)
                flight.staged = None
            batch.sum = Sum()
        batch.stage = max(batch.stage, stage)
