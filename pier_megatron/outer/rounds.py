"""The passes of the outer optimizer over the parameters, chunk by chunk, so that subtracting, sending and updating overlap."""

import collections
import itertools
import random
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.collectives import Gathered, GroupExchange, Residual, Sum, sum_over
from pier_megatron.outer.memory import PIPELINE_DEPTH
from pier_megatron.outer.rules import OuterRule, averaging
from pier_megatron.outer.snapshot import RoundBuffers
from pier_megatron.outer.staging import OWN, SHARED, WORK, Buffers, Staged, Staging, chunks_of, one_ahead
from pier_megatron.outer.state import ANCHOR, REDUCED, RESIDUAL, sum_of_bits
from pier_megatron.outer.stopwatch import Stopwatch
from pier_megatron.outer.verdicts import ABSENT, GOOD, Verdicts

PRODUCTS = 4
"""Sums over the elements of each chunk: own * own, own * mean, mean * mean, momentum * momentum."""

CHECKSUM, ELEMENTS = range(PRODUCTS, PRODUCTS + 2)
"""Behind the products: bits of a part of the new anchor; numbers that were summed up."""

# Each round compares the groups' anchors in one of this many parts of what it has changed.
_PARTS_TO_COMPARE = 16

# Sums of these numbers over all ranks of a model are exact in float64.
_CHECKSUMS_BELOW = 2**31


def _launches(span: int) -> tuple[int, int]:
    """Iterations after the beginning of a round in which its sum begins, and is sent on (all-gather of a codec's sum).

    One launch an iteration, and the first one is that of the verdicts: with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` a collective
    that waits for another one holds up every kernel behind it.

    Args:
        span: Iterations after which the round ends, at least 1.
    """
    begin = int(span > 2)
    return begin, max(begin + 1, (begin + span) // 2)


class OuterRound:
    """One outer step of some fragments: all at once, or spread over iterations, from :meth:`begin` to :meth:`finish`.

    A group sends what its rule makes of its parameters as they were when the round began, and the rule makes the new anchor of
    what arrives.

    Attributes:
        fragments: Fragments that it exchanges.
        rule: What is sent, and what is made of what arrives.
        begun: Iteration after which it began.
        verdict: Verdict on the pseudo-gradient of this group.
        lengths: Frobenius norms of its matrices, in the order of the chunks, once they are measured; float32.
        exchange: Collectives between the participants, once they have met.
        verdicts: Their verdicts, likewise.
        sums: Over the chunks that this rank counts, in the order of :data:`PRODUCTS` and what follows it; float64.
        bytes_sent: Bytes sent by this rank to other groups.
        stopwatch: Time spent on it so far.
        training: Training losses and gradient norms of this rank since the outer step before began, see
            :meth:`pier_megatron.outer.report.OuterStepReports.take_training`.
        restarted_before: Whether each group of the run was restarted since the outer step before, where groups meet in between.
    """

    exchange: GroupExchange
    verdicts: Verdicts

    def __init__(
        self,
        stagings: Sequence[Staging],
        fragments: Sequence[int],
        rule: OuterRule,
        begun: int,
        verdict: int,
        stopwatch: Stopwatch,
        device: torch.device,
    ) -> None:
        """Prepares a round: :meth:`run` it, or :meth:`begin` it and let it :meth:`proceed` until it can :meth:`finish`.

        The ``stagings`` of the outer states are changed in place, the caller runs the ``stopwatch`` while it works on the
        round, and the ``device`` is that of the sums. A pseudo-gradient that does not count is not sent; its group is moved to
        the common point all the same.
        """
        self.fragments, self.rule, self.begun, self.verdict = fragments, rule, begun, verdict
        self.chunks = list(chunks_of(stagings, fragments))
        self.kept: list[Buffers] = []
        # One for all chunks; None before they leave.
        self._under_way: list[Sum] | None = None
        self._is_sent_on = False
        parts = max(1, min(_PARTS_TO_COMPARE, len(self.chunks)))
        # The same on all ranks, and every part's turn comes whatever the intervals are.
        self._compared = [chunk for _, chunk in self.chunks[random.Random(begun).randrange(parts) :: parts]]
        self.stopwatch = stopwatch
        self._dropped: list[tuple[Staged, Residual, slice]] = []
        ends = itertools.accumulate((len(chunk.matrix_shapes) for _, chunk in self.chunks), initial=0)
        places = itertools.starmap(slice, itertools.pairwise(ends))
        self._matrices = {chunk: place for (_, chunk), place in zip(self.chunks, places, strict=True)}
        self.lengths = torch.empty(0, device=device)
        self.restarted_before: Gathered | None = None
        self.training = torch.zeros(4, dtype=torch.float64, device=device)
        self.sums = torch.zeros(ELEMENTS + 1, dtype=torch.float64, device=device)
        self.bytes_sent = 0

    def meet(self, exchange: GroupExchange, verdicts: Verdicts) -> None:
        """Learns who takes part; again, if those before were lost.

        Args:
            exchange: Collectives between the participants.
            verdicts: Their verdicts.
        """
        self.exchange, self.verdicts = exchange, verdicts
        self.bytes_sent += sum(
            exchange.wire.bytes_of_sum(chunk.carried, chunk.shards.travel_exactly(exchange.codec)) for _, chunk in self.chunks
        )

    def measure(self) -> None:
        """Measures the own matrices, where the rule takes any: before anything is sent, for all groups to know in time."""
        norms: list[Tensor] = []
        with_matrices = ((staging, chunk) for staging, chunk in self.chunks if chunk.matrix_shapes)
        for staged in one_ahead(staging.lend(chunk, (ANCHOR,)) for staging, chunk in with_matrices):
            self._subtract(staged)
            norms += [matrix.norm() for matrix in staged.chunk.matrices(staged.own)]
            staged.give_back()
        if norms:
            self.lengths = torch.stack(norms)

    def begin(self) -> None:
        """Takes the pseudo-gradients."""
        self.kept = [staging.keep() for staging, _ in self.chunks]
        for staged in self._lent(ANCHOR):
            self._subtract(staged)
            staged.give_back((OWN,))

    def proceed(self, age: int, span: int) -> None:
        """Launches what is due ``age`` iterations after the beginning, of ``span``; called at the same ages on every rank."""
        begin, onward = _launches(span)
        if age >= begin:
            self._send()
        if age >= onward:
            self._send_on()

    def arrive(self) -> None:
        """Waits for everything."""
        self._send()
        self._send_on()
        for each in self._under_way or ():
            each.finish()
        self._under_way = []

    def settle(self) -> RoundBuffers:
        """Waits for everything to arrive, so that only :meth:`finish` is left; returns copies on the host, without verdicts."""
        self.arrive()
        for staging in {staging for staging, _ in self.chunks}:
            staging.synchronize()
        # On the device they would take eight more bytes a parameter, and a file is written from the host anyway.
        sizes = [chunk.numel for _, chunk in self.chunks]
        copies = {name: torch.empty(sum(sizes), dtype=torch.float32, device="cpu") for name in WORK}
        for name, copy in copies.items():
            for part, of_chunk in zip(self._parts(), copy.split(sizes), strict=True):
                of_chunk.copy_(part[name])
        return RoundBuffers(self.begun, copies[OWN], copies[SHARED], self.verdicts.lengths.cpu())

    def resume(self, saved: RoundBuffers) -> None:
        """Continues where :meth:`settle` has left another round; replaces :meth:`begin`."""
        self.kept, self._under_way = [staging.keep() for staging, _ in self.chunks], []
        sizes = [chunk.numel for _, chunk in self.chunks]
        for name, whole in ((OWN, saved.own), (SHARED, saved.sum)):
            for part, of_chunk in zip(self._parts(), whole.split(sizes), strict=True):
                part[name].copy_(of_chunk)

    def finish(self, keep_progress: bool = True) -> None:
        """Applies the result, and perhaps keeps what this group has learned since :meth:`begin`.

        Then the parameters become the new common point plus their progress since the start of the step: the delayed outer step
        of "Eager Updates for Overlapped Communication and Computation in DiLoCo", arXiv 2502.12996.
        """
        self.arrive()
        for staged in self._lent(OWN, ANCHOR, *self.rule.memory):
            self._apply(staged, keep_progress)
            staged.give_back((ANCHOR, *self.rule.memory))
        self._release()

    def lose(self) -> None:
        """Gives up what is on the wire of a communicator that is lost: the round can :meth:`meet` others.

        Nobody can wait for its sums, which may still write to their buffers. These are not used again.
        """
        if self._under_way:
            for staging in {staging for staging, _ in self.chunks}:
                staging.synchronize()
            lost, self.kept = self.kept, [staging.keep() for staging, _ in self.chunks]
            for (_, chunk), before, after in zip(self.chunks, lost, self.kept, strict=True):
                after.of(chunk)[OWN].copy_(before.of(chunk)[OWN])
        # A lost communicator ends once nobody holds its sums.
        self._under_way, self._is_sent_on, self.bytes_sent, self._dropped = None, False, 0, []

    def keep_dropped(self) -> None:
        """Keeps what the codec has dropped of an exchange that all islands have."""
        for staged, dropped, reduces in self._dropped:
            sent, reduced = (staged.homes.get(name, staged.tensors[name]) for name in (RESIDUAL, REDUCED))
            sent.copy_(dropped.sent)
            reduced.zero_()[reduces].copy_(dropped.reduced[: reduces.stop - reduces.start])
        self._dropped = []

    def drop(self) -> None:
        """Gives all buffers back, and forgets what they hold; called on every rank alike."""
        if self._under_way:
            self.arrive()
        self._release()

    def _release(self) -> None:
        for (staging, _), kept in zip(self.chunks, self.kept, strict=False):
            staging.release(kept)
        self.kept = []

    def _lent(self, *reads: str) -> Iterator[Staged]:
        pairs = zip(self.chunks, self.kept, strict=True)
        return one_ahead(staging.lend(chunk, reads, kept) for (staging, chunk), kept in pairs)

    def _parts(self) -> list[dict[str, Tensor]]:
        return [kept.of(chunk) for (_, chunk), kept in zip(self.chunks, self.kept, strict=True)]

    def _send(self) -> None:
        if self._under_way is not None:
            return
        self._under_way, left = [], []
        for staged in self._lent(RESIDUAL, REDUCED, *{*self.rule.sent_of, *averaging(self.rule).sent_of}):
            self._write_sent(staged)
            if staged.lent is None:
                left.append(staged)
            else:  # Offloaded, a residual is on the device only now.
                self._under_way.append(self._sum([staged]))
                staged.give_back(() if REDUCED in staged.tensors else (RESIDUAL,))
        if left:
            self._under_way.append(self._sum(left))

    def _send_on(self) -> None:
        if not self._is_sent_on:
            self._is_sent_on = True
            for each in self._under_way or ():
                each.advance()

    def run(self) -> None:
        """Does it all at once, pipelined over the chunks; all groups hold the same parameters afterwards."""
        in_flight: collections.deque[tuple[Staged, Sum]] = collections.deque()

        def land() -> None:
            staged, under_way = in_flight.popleft()
            under_way.finish()
            self._apply(staged, keep_progress=False)
            staged.give_back(staged.homes)

        for staged in one_ahead(staging.lend(chunk, staging.state.flats) for staging, chunk in self.chunks):
            if len(in_flight) == PIPELINE_DEPTH:
                land()
            self._subtract(staged)
            self._write_sent(staged)
            # Before the codecs work on the chunk before it, so that the wire does not wait for them.
            in_flight.append((staged, self._sum([staged])))
            if len(in_flight) > 1:
                in_flight[-2][1].advance()
        if in_flight:
            in_flight[-1][1].advance()
        while in_flight:
            land()

    def _sum(self, batch: Sequence[Staged]) -> Sum:
        alike: dict[tuple[dist.ProcessGroup | None, bool], list[Staged]] = {}
        for staged in batch:
            shards = staged.chunk.shards
            alike.setdefault((shards.holders, shards.travel_exactly(self.exchange.codec)), []).append(staged)
        sums = []
        for (holders, exactly), together in alike.items():
            vectors, residuals = zip(*((staged.shared, self._residual(staged)) for staged in together), strict=True)
            sums.append(sum_over(self.exchange, holders, vectors, residuals, exactly))
        return Sum(sums)

    def _residual(self, staged: Staged) -> Residual | None:
        """What the codec has dropped of earlier vectors: for elastic islands, apart until all of them have the sum.

        An island adds what it has dropped of sums to the next one of these numbers. Where it reduces other ones now, because
        islands have come or gone, nobody has that but this one, which sends it.
        """
        if REDUCED not in staged.tensors or self.exchange.size == 1:
            return staged.residual
        sent, reduced = staged.tensors[RESIDUAL], staged.tensors[REDUCED]
        segment = self.exchange.wire.segment_numel(len(sent))
        reduces = slice(*(min(place * segment, len(sent)) for place in (self.exchange.rank, self.exchange.rank + 1)))
        now = Residual(sent + reduced, sent.new_zeros(segment))
        now.sent[reduces] = sent[reduces]
        now.reduced[: reduces.stop - reduces.start] = reduced[reduces]
        if self.verdict == ABSENT:
            # It belonged to another life of this island.
            now.sent.zero_()
            now.reduced.zero_()
        self._dropped.append((staged, now, reduces))
        return now

    def _rule_of(self, staged: Staged) -> OuterRule:
        return averaging(self.rule) if staged.chunk.shards.is_averaged else self.rule

    def _subtract(self, staged: Staged) -> None:
        """Takes the pseudo-gradient, ``own = anchor - parameters``; zero if this group does not count."""
        staged.subtract_parameters(staged.own)
        if self.verdict != GOOD:
            staged.own.zero_()  # Not a product with zero, which would keep every nan.

    def _write_sent(self, staged: Staged) -> None:
        self._rule_of(staged).send(staged)
        if self.verdicts.weights is not None:
            staged.shared.mul_(self.verdicts.weights[self.exchange.rank])

    def _apply(self, staged: Staged, keep_progress: bool) -> None:
        """Takes the step for a sum that has arrived in ``staged.shared``, and writes the parameters.

        They keep what they have moved by since the pseudo-gradient was taken, or have not moved, and become the anchor.
        """
        own, shared, anchor, momentum = staged.own, staged.shared, staged.anchor, staged.momentum
        staged.lengths = self.verdicts.lengths[self._matrices[staged.chunk]]
        rule, size, shards = self._rule_of(staged), self.exchange.size, staged.chunk.shards
        rule.combine(staged, size, sum(self.verdicts.counted))
        # Before the update, which may overwrite what it was computed from.
        products = [torch.dot(*pair) for pair in ((own, own), (own, shared), (shared, shared))]
        if keep_progress:
            # The old anchor less the pseudo-gradient is where the parameters were: own becomes what they must move by.
            own.sub_(anchor)
        rule.update(staged, is_alone=size == 1 and self.verdict == GOOD and not keep_progress)
        if keep_progress:
            staged.chunk.move_parameters(own.add_(anchor))
        else:
            staged.chunk.set_parameters(anchor)
        products.append(torch.dot(momentum, momentum))
        if shards.is_counted:
            self.sums[:PRODUCTS] += torch.stack(products).double()
            self.sums[ELEMENTS] += staged.chunk.numel
        if (shards.is_counted or shards.is_averaged) and staged.chunk in self._compared:
            self.sums[CHECKSUM] += sum_of_bits(anchor) % _CHECKSUMS_BELOW
