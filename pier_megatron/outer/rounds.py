"""The passes of the outer optimizer over the parameters, chunk by chunk, so that subtracting, sending and updating overlap."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pier_megatron.exchange.collectives import GroupExchange, Sum
from pier_megatron.outer.rules import OuterRule
from pier_megatron.outer.staging import Staged, Staging, chunks_of, staged_ahead
from pier_megatron.outer.verdicts import Verdicts

PIPELINE_DEPTH = 4
"""Chunks on their way at once in a blocking outer step: one is subtracted, two are on the wire, one is updated."""

PRODUCTS = 4
"""Of each chunk, summed over its elements: own * own, own * mean, mean * mean, momentum * momentum."""


def momentum_warmup(stagings: Sequence[Staging], mu: float) -> None:
    """Builds up the outer momentum while the groups are still identical, hence without communication.

    Computes ``momentum = mu * momentum + (anchor - parameters)``, then ``anchor = parameters``; arXiv 2511.17849,
    algorithm 1.

    Args:
        stagings: Of the outer states, which are changed in place.
        mu: Outer momentum coefficient.
    """
    for staged in staged_ahead((staging, chunk) for staging in stagings for chunk in staging.state.chunks):
        staged.subtract_parameters()
        torch.add(staged.own, staged.momentum, alpha=mu, out=staged.momentum)
        staged.chunk.copy_parameters_to(staged.anchor)
        staged.staging.give_back(staged)


class OuterRound:
    """One outer step of some fragments, in the three moves that an exchange takes: begin, advance, finish.

    A group sends what its rule makes of its parameters as they were when the round began. What arrives is averaged over the
    groups that count, and the rule makes the new anchor of it.

    Attributes:
        rule: What is sent, and what is made of what arrives.
        begun: Iteration after which it began.
        verdicts: On the pseudo-gradients of all groups.
        sums: Sums of the products of :data:`PRODUCTS` over the chunks that this rank counts; float64, shape ``[4]``.
        bytes_sent: By this rank to other groups.
        seconds: Wall-clock time spent on it so far.
    """

    def __init__(
        self,
        stagings: Sequence[Staging],
        exchange: GroupExchange,
        fragments: Sequence[int],
        rule: OuterRule,
        verdicts: Verdicts,
        begun: int,
        device: torch.device,
    ) -> None:
        """Prepares a round; :meth:`run` it, or call the three moves in different iterations.

        Args:
            stagings: Of the outer states, which are changed in place.
            exchange: Collectives between the groups.
            fragments: Which take part.
            rule: What is sent, and what is made of what arrives.
            verdicts: A pseudo-gradient that does not count is not sent; its group is moved to the common point all the same.
            begun: Iterations completed.
            device: Of the sums.
        """
        self._exchange, self.rule = exchange, rule
        self._chunks = list(chunks_of(stagings, fragments))
        self._in_flight: list[_ChunkInFlight] = []
        self._is_advanced = False
        self.begun, self.verdicts = begun, verdicts
        self.sums = torch.zeros(PRODUCTS, dtype=torch.float64, device=device)
        self.bytes_sent = sum(exchange.wire.bytes_of_sum(chunk.numel, chunk.shards.is_tied) for _, chunk in self._chunks)
        self.seconds = 0.0

    def begin(self) -> None:
        """Takes the pseudo-gradients and sends them off."""
        counts = self.verdicts.own_counts()
        self._in_flight = [self._send(staged, counts) for staged in staged_ahead(self._chunks)]

    def advance(self) -> None:
        """Sends on what has arrived; does nothing when called again."""
        if not self._is_advanced:
            for in_flight in self._in_flight:
                in_flight.sum.advance()
            self._is_advanced = True

    def settle(self) -> dict[str, Any]:
        """Waits for everything that is on the wire, so that only :meth:`finish` is left to do.

        Returns:
            The round as plain data: when it began, the verdicts, its ``own`` pseudo-gradients, and the ``sum`` over the groups
            that has arrived; both float32 and as long as the round's chunks together.
        """
        self.advance()
        for in_flight in self._in_flight:
            in_flight.sum.finish()
            in_flight.sum = Sum()
            # What the codec dropped on the way is known now, and part of the state wherever that lives.
            in_flight.staged.staging.write_back(in_flight.staged)
        staged = [in_flight.staged for in_flight in self._in_flight]
        own, total = ([getattr(chunk, name) for chunk in staged] or [torch.empty(0)] for name in ("own", "shared"))
        return {"begun": self.begun, "verdicts": list(self.verdicts.all()), "own": torch.cat(own), "sum": torch.cat(total)}

    def resume(self, own: Tensor, total: Tensor) -> None:
        """Goes on where :meth:`settle` has left another round; in place of :meth:`begin`."""
        sizes = [chunk.numel for _, chunk in self._chunks]
        for staged, own_part, total_part in zip(staged_ahead(self._chunks), own.split(sizes), total.split(sizes), strict=True):
            staged.own.copy_(own_part)
            staged.shared.copy_(total_part)
            self._in_flight.append(_ChunkInFlight(staged, Sum()))
        self._is_advanced = True

    def forget_progress(self) -> None:
        """Says that this group's parameters have been set to the anchor since :meth:`begin`: what it moved by is undone."""
        for in_flight in self._in_flight:
            in_flight.staged.own.zero_()

    def finish(self) -> None:
        """Applies the result and keeps what this group has learned since :meth:`begin`.

        The parameters become the new common point plus the way they have gone meanwhile, as in the delayed outer step of
        "Eager Updates for Overlapped Communication and Computation in DiLoCo", arXiv 2502.12996.
        """
        counted = sum(self.verdicts.counted())
        for in_flight in self._in_flight:
            self._apply(in_flight, counted, keep_progress=True)
        self._in_flight = []

    def run(self) -> None:
        """Does all three moves at once, pipelined over the chunks; all groups hold the same parameters afterwards."""
        counts = self.verdicts.own_counts()
        in_flight: collections.deque[_ChunkInFlight] = collections.deque()

        def land() -> None:
            self._apply(in_flight.popleft(), sum(self.verdicts.counted()), keep_progress=False)

        for staged in staged_ahead(self._chunks):
            if len(in_flight) == PIPELINE_DEPTH:
                land()
            if in_flight:
                in_flight[-1].sum.advance()
            in_flight.append(self._send(staged, counts))
        if in_flight:
            in_flight[-1].sum.advance()
        while in_flight:
            land()

    def _send(self, staged: Staged, counts: bool) -> "_ChunkInFlight":
        staged.subtract_parameters()
        if not counts:
            staged.own.zero_()  # Not a product with zero, which would keep every nan.
        self.rule.send(staged)
        return _ChunkInFlight(staged, self._exchange.sum(staged.shared, staged.residual, exactly=staged.chunk.shards.is_tied))

    def _apply(self, in_flight: "_ChunkInFlight", counted: int, keep_progress: bool) -> None:
        staged = in_flight.staged
        own, shared, anchor = staged.own, staged.shared, staged.anchor
        in_flight.sum.finish()
        shared.div_(counted)
        counts_here = staged.chunk.shards.is_counted
        # Before the update, which may overwrite what it was computed from.
        products = [torch.dot(*pair) for pair in ((own, own), (own, shared), (shared, shared))] if counts_here else []
        if keep_progress:
            # The old anchor less the pseudo-gradient is where the parameters were: own becomes what they must move by.
            own.sub_(anchor)
        is_alone = self._exchange.size == 1 and not keep_progress and self.verdicts.own_counts()
        self.rule.receive(staged, is_alone)
        if counts_here:
            self.sums += torch.stack([*products, torch.dot(staged.momentum, staged.momentum)]).double()
        if keep_progress:
            staged.chunk.move_parameters(own.add_(anchor))
        else:
            staged.chunk.set_parameters(anchor)
        staged.staging.give_back(staged)


@dataclasses.dataclass
class _ChunkInFlight:
    """A chunk on its way, and the sum that it waits for."""

    staged: Staged
    sum: Sum
