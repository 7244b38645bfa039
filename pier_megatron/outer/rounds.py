"""The passes of the outer optimizer over the parameters, chunk by chunk, so that subtracting, sending and updating overlap."""

import collections
import contextlib
import random
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pier_megatron.exchange.collectives import Exchange, Gathered, Sum
from pier_megatron.outer import arithmetic
from pier_megatron.outer.arithmetic import PRODUCTS
from pier_megatron.outer.flights import LENT, PIPELINE_DEPTH, Crossing, Flight
from pier_megatron.outer.rules import OuterRule
from pier_megatron.outer.snapshot import RoundBuffers
from pier_megatron.outer.staging import MOVE, OWN, SHARED, WORK, Deferred, Part, Staged, Staging, chunks_of, one_ahead
from pier_megatron.outer.state import ANCHOR, COMMON, RESIDUAL, Chunk, state_names, sum_of_bits
from pier_megatron.outer.verdicts import Verdicts

CHECKSUM, DISTANCE, ELEMENTS = range(PRODUCTS, PRODUCTS + 3)
"""Behind the products: bits of a part of the new anchor; squares of the distance of the own weights to the mean of those that
met, where their rule lets groups have weights of their own; numbers that were summed up."""

_STATE = state_names(has_residual=True)

# Each round compares the groups' anchors in one of so many parts of what it has changed.
_PARTS_TO_COMPARE = 16

# Sums of so many of these numbers are exact in float64, as many as ranks can share a model.
_CHECKSUMS_BELOW = 2**31


def momentum_warmup(stagings: Sequence[Staging], rule: OuterRule) -> None:
    """Builds up the outer momentum while the groups are still identical, hence without communication.

    Takes an outer step, then ``anchor = parameters``. With :class:`pier_megatron.outer.rules.Nesterov` that is
    ``momentum = mu * momentum + (anchor - parameters)``; arXiv 2511.17849, algorithm 1.

    Args:
        stagings: Stagings of the outer states, which are changed in place.
        rule: Rule that descends along pseudo-gradients.
    """
    for staged in one_ahead(staging.lend(chunk, COMMON) for staging in stagings for chunk in staging.state.chunks):
        arithmetic.warm_up(staged, rule)
        staged.give_back(COMMON)


class Stopwatch:
    """Adds up stretches of work: on a GPU the time between events in the stream, which is not waited for until it is read."""

    def __init__(self, device: torch.device) -> None:
        """Starts at zero."""
        self._is_on_device = device.type == "cuda"
        self._seconds = 0.0
        self._stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of what happens inside."""
        if self._is_on_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._stretches.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def seconds(self) -> float:
        """The time counted so far, once it is over on the device too."""
        for begin, end in self._stretches:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._stretches = []
        return self._seconds


class OuterRound(Crossing):
    """One outer step of some fragments: all at once, or spread over iterations, from :meth:`begin` to :meth:`finish`.

    A group sends what its rule makes of its parameters as they were when the round began, and the rule makes the new anchor of
    what arrives.

    Attributes:
        exchange: Collectives between the participants.
        fragments: Fragments that it exchanges.
        rule: What is sent, and what is made of what arrives.
        begun: Iteration after which it began.
        verdicts: Verdicts on the pseudo-gradients of all groups.
        weight: Weight of this group's pseudo-gradient in the mean; participants average to 1.
        sums: Over the chunks that this rank counts, in the order of :data:`PRODUCTS` and what follows it; float64.
        bytes_sent: Bytes sent by this rank to other groups.
        stopwatch: Time spent on it so far.
        training: Training losses and gradient norms of this rank since the outer step before began, see
            :meth:`pier_megatron.outer.training_sums.TrainingSums.take`.
        restarted_before: Whether each group of the run was restarted since the outer step before, where groups meet in between.
    """

    def __init__(
        self,
        stagings: Sequence[Staging],
        exchange: Exchange,
        fragments: Sequence[int],
        rule: OuterRule,
        verdicts: Verdicts,
        begun: int,
        stopwatch: Stopwatch,
        device: torch.device,
    ) -> None:
        """Prepares a round: :meth:`run` it, or :meth:`begin` it and let it :meth:`proceed` until it can :meth:`finish`.

        Args:
            stagings: Stagings of the outer states, which are changed in place.
            exchange: Collectives between the participants.
            fragments: Fragments that it exchanges.
            rule: What is sent, and what is made of what arrives.
            verdicts: A pseudo-gradient that does not count is not sent; its group is moved to the common point all the same.
            begun: Iterations completed.
            stopwatch: Stopwatch that the caller runs while it works on the round.
            device: Device of the sums.
        """
        self.exchange, self.rule, self.fragments = exchange, rule, fragments
        self._chunks = list(chunks_of(stagings, fragments))
        super().__init__((RESIDUAL, *rule.sent_of), exchange.wire.launches_of_sum())
        self._forgets_progress, self._ends = False, False
        # Chunks whose moves are known, with what is summed up of them; and those that are at the end of the round already.
        self._ahead: set[Chunk] = set()
        self._ended: set[Chunk] = set()
        self._sums_ahead = torch.zeros(ELEMENTS + 1, dtype=torch.float64, device=device)
        parts = max(1, min(_PARTS_TO_COMPARE, len(self._chunks)))
        # The same on all ranks, and every part's turn comes whatever the intervals are.
        self._compared = [chunk for _, chunk in self._chunks[random.Random(begun).randrange(parts) :: parts]]
        self.begun, self.verdicts, self.stopwatch = begun, verdicts, stopwatch
        self.weight = 1.0
        self.restarted_before: Gathered | None = None
        self.training = torch.zeros(4, dtype=torch.float64, device=device)
        self.sums = torch.zeros(ELEMENTS + 1, dtype=torch.float64, device=device)
        self.bytes_sent = sum(
            exchange.wire.bytes_of_sum(chunk.numel, chunk.shards.travel_exactly(exchange.codec)) for _, chunk in self._chunks
        )

    def begin(self, span: int | None = None) -> None:
        """Takes the pseudo-gradients.

        Args:
            span: Iterations over which what is sent is spread, if it is: what leaves first then stays in its buffers.
        """
        counts = self.verdicts.own_counts()
        self._flights = [Flight(staging, chunk, staging.keep()) for staging, chunk in self._chunks]
        first = self.batches(span)[:1] if span is not None else ()
        staying = sum(len(batch.flights) for batch in first)
        for staged in one_ahead(flight.lend(ANCHOR) for flight in self._flights[staying:]):
            arithmetic.subtract(staged, counts)
            staged.give_back((OWN,))
        reads = {ANCHOR, *self._reads} - {OWN}
        for batch in first:
            lent = one_ahead(flight.lend(*reads) for flight in batch.flights)
            for flight, staged in zip(batch.flights, lent, strict=True):
                arithmetic.subtract(staged, counts)
                staged.write((OWN,))
                flight.staged = staged
            batch.stage = LENT

    def settle(self) -> RoundBuffers:
        """Waits for everything to arrive, so that only :meth:`finish` is left; returns copies on the host, without verdicts."""
        self.arrive()
        for staging in {flight.staging for flight in self._flights}:
            staging.synchronize()
        # On the device they would take eight more bytes a parameter, and a file is written from the host anyway.
        numel = sum(chunk.numel for _, chunk in self._chunks)
        own, total = (torch.empty(numel, dtype=torch.float32, device="cpu") for _ in (OWN, SHARED))
        sizes = [chunk.numel for _, chunk in self._chunks]
        for flight, *copies in zip(self._flights, own.split(sizes), total.split(sizes), strict=True):
            for name, copy in zip(WORK, copies, strict=True):
                copy.copy_(flight.kept_parts()[name])
        if self._forgets_progress:
            own.zero_()
        return RoundBuffers(self.begun, own, total)

    def resume(self, saved: RoundBuffers) -> None:
        """Continues where :meth:`settle` has left another round; in place of :meth:`begin`."""
        sizes = [chunk.numel for _, chunk in self._chunks]
        self._flights = [Flight(staging, chunk, staging.keep()) for staging, chunk in self._chunks]
        self._batches = ()
        for flight, *parts in zip(self._flights, saved.own.split(sizes), saved.sum.split(sizes), strict=True):
            for name, part in zip(WORK, parts, strict=True):
                flight.kept_parts()[name].copy_(part)

    def forget_progress(self) -> None:
        """Says that this group's parameters have been set to the anchor since :meth:`begin`: what it moved by is undone."""
        self._forgets_progress = True
        self._ahead.clear()
        self._sums_ahead.zero_()

    def finish(self) -> None:
        """Applies the result and keeps what this group has learned since :meth:`begin`.

        The parameters become the new common point plus the way they have gone meanwhile, as in the delayed outer step of
        "Eager Updates for Overlapped Communication and Computation in DiLoCo", arXiv 2502.12996.
        """
        self._ends = True
        self.arrive()
        ahead = [flight for flight in self._flights if flight.chunk in self._ahead]
        for staged in one_ahead(flight.lend(MOVE) for flight in ahead):
            staged.chunk.move_parameters(staged.tensors[MOVE])
            staged.give_back()
        self.sums += self._sums_ahead
        # Of these only the parameters are needed now.
        for staging in dict.fromkeys(flight.staging for flight in ahead):
            works = [self._deferred(flight) for flight in ahead if flight.staging is staging]
            staging.defer(works, max(1, len(self._batches or ()) - 1))
        left = [flight for flight in self._flights if flight.chunk not in self._ahead]
        for staged in one_ahead(flight.lend(OWN, SHARED, *COMMON) for flight in left if flight.chunk not in self._ended):
            if self._forgets_progress:
                staged.own.zero_()
            self._apply(staged, self.sums, keep_progress=True)
            staged.give_back(COMMON)
        for flight in left:
            flight.release()
        self._flights = []

    def _deferred(self, flight: Flight) -> Deferred:
        """Writes the state of a chunk whose move is known. The pseudo-gradient has no part in that."""
        rule, size = self.rule, self.exchange.size
        own_counts, counted = self.verdicts.own_counts(), sum(self.verdicts.counted())

        # No reference to the round, which would hold what outlives it: communicators.
        def descend(staged: Staged) -> None:
            arithmetic.descend(staged.apart(staged.tensors[MOVE]), rule, size, own_counts, counted, keeps_progress=True)

        assert flight.kept is not None
        return Deferred(flight.chunk, flight.kept, (SHARED, *COMMON), COMMON, descend)

    def run(self) -> None:
        """Does it all at once, pipelined over the chunks; all groups hold the same parameters afterwards."""
        counts = self.verdicts.own_counts()
        in_flight: collections.deque[tuple[Staged, Sum]] = collections.deque()

        def land() -> None:
            staged, under_way = in_flight.popleft()
            under_way.finish()
            self._apply(staged, self.sums, keep_progress=False)
            staged.give_back(_STATE)

        for staged in one_ahead(staging.lend(chunk, _STATE) for staging, chunk in self._chunks):
            if len(in_flight) == PIPELINE_DEPTH:
                land()
            arithmetic.subtract(staged, counts, self.rule, self.weight)
            # Before the codecs work on the chunk before it, so that the wire does not wait for them.
            in_flight.append((staged, self._sum([staged])))
            if len(in_flight) > 1:
                in_flight[-2][1].advance()
        if in_flight:
            in_flight[-1][1].advance()
        while in_flight:
            land()

    def _take_off(self, batch: Sequence[Staged]) -> Sum:
        for staged in batch:
            arithmetic.send(staged, self.rule, self.weight)
        under_way = self._sum(batch)
        for staged in batch:
            if MOVE in staged.tensors:
                # While it crosses: training waits for what is sent only.
                staged.read({OWN, *COMMON}.difference(self.rule.sent_of))
        return under_way

    def _sum(self, batch: Sequence[Staged]) -> Sum:
        sums = []
        for exactly in (False, True):
            alike = [each for each in batch if each.chunk.shards.travel_exactly(self.exchange.codec) == exactly]
            if alike:
                vectors, residuals = zip(*((staged.shared, staged.residual) for staged in alike), strict=True)
                sums.append(self.exchange.sum(vectors, residuals, exactly))
        return Sum(sums)

    def _land(self, staged: Staged) -> None:
        staged.wait()
        # What the codec dropped on the way is known now, and part of the state wherever that lives.
        if MOVE not in staged.tensors or self._forgets_progress:
            staged.give_back((SHARED, RESIDUAL))
        elif self._ends:
            self._apply(staged, self._sums_ahead, keep_progress=True)
            self._ended.add(staged.chunk)
            staged.give_back(_STATE)
        else:
            self._look_ahead(staged)
            staged.give_back((SHARED, RESIDUAL, MOVE))

    def _look_ahead(self, staged: Staged) -> None:
        """Computes what the parameters will move by, with copies of the state, which stays as it is until the round ends."""
        part = staged.apart(staged.tensors[MOVE].zero_())
        part.tensors[SHARED] = staged.shared.clone()
        self._apply(part, self._sums_ahead, keep_progress=True, chunk=staged.chunk)
        self._ahead.add(staged.chunk)

    def _apply(self, part: Part, sums: Tensor, keep_progress: bool, chunk: Chunk | None = None) -> None:
        products, chunk = self._descend(part, keep_progress), chunk or part.chunk
        if chunk.shards.is_counted:
            sums[:PRODUCTS] += products
            sums[ELEMENTS] += chunk.numel
            if chunk in self._compared:
                sums[CHECKSUM] += sum_of_bits(part.anchor) % _CHECKSUMS_BELOW

    def _descend(self, part: Part, keep_progress: bool) -> Tensor:
        counted = sum(self.verdicts.counted())
        return arithmetic.descend(part, self.rule, self.exchange.size, self.verdicts.own_counts(), counted, keep_progress)
