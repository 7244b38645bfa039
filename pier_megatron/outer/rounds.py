"""The updates of the outer optimizer, chunk by chunk, so that subtracting, sending and updating overlap."""

import collections
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pier_megatron.exchange.collectives import Gathered, GroupExchange, Sum
from pier_megatron.outer.staging import Staged, Staging
from pier_megatron.outer.state import Chunk

PIPELINE_DEPTH = 4
"""Chunks on their way at once in a blocking outer step: one is subtracted, two are on the wire, one is updated."""

GOOD, NOT_FINITE, OUTLIER = 1, 0, -1
"""Verdicts on a group's pseudo-gradient."""

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
    for staged in _staged_ahead((staging, chunk) for staging in stagings for chunk in staging.state.chunks):
        staged.subtract_parameters()
        torch.add(staged.own, staged.momentum, alpha=mu, out=staged.momentum)
        staged.chunk.copy_parameters_to(staged.anchor)
        staged.staging.give(staged)


def squared_norm(stagings: Sequence[Staging], fragments: Sequence[int]) -> Tensor:
    """Squared norm of the own pseudo-gradient over the elements that this rank counts; a float64 scalar."""
    device = stagings[0].state.device if stagings else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    chunks = ((staging, chunk) for staging in stagings for chunk in staging.state.chunks if chunk.fragment in fragments)
    for staged in _staged_ahead(chunks):
        staged.subtract_parameters()
        if staged.chunk.part.is_counted:
            total += torch.dot(staged.own, staged.own).double()
        staged.staging.give(staged)
    return total


class OuterRound:
    """One outer step of some fragments, in the three moves that an exchange takes: begin, advance, finish.

    Each group's pseudo-gradient is what its parameters were when the round began. Computes
    ``delta = mean(anchor - parameters)`` over the contributing groups, ``momentum = mu * momentum + delta`` and
    ``anchor = anchor - eta * (delta + mu * momentum)``; Nesterov in PyTorch's form, arXiv 2311.08105, section 2.

    Attributes:
        fragments: Which fragments take part.
        sums: Sums of the products of :data:`PRODUCTS` over the chunks that this rank counts; float64, shape ``[4]``.
    """

    def __init__(
        self,
        stagings: Sequence[Staging],
        exchange: GroupExchange,
        fragments: Sequence[int],
        mu: float,
        eta: float,
        verdict: int,
        verdicts: Tensor | None = None,
    ) -> None:
        """Prepares a round; :meth:`run` it, or call the three moves in different iterations.

        Args:
            stagings: Of the outer states, which are changed in place.
            exchange: Collectives between the groups.
            fragments: Which fragments take part.
            mu: Outer momentum coefficient.
            eta: Outer learning rate.
            verdict: On this group's pseudo-gradient. Only one that is :data:`GOOD` counts; a group whose own does not is
                moved to the common point all the same.
            verdicts: On those of all groups, of a round that they have agreed on before; see :meth:`resume`.
        """
        self._exchange, self._mu, self._eta = exchange, mu, eta
        self._contributes = verdict == GOOD
        self.fragments = fragments
        self._chunks = [
            (staging, chunk) for staging in stagings for chunk in staging.state.chunks if chunk.fragment in fragments
        ]
        self._flights: list[_Flight] = []
        self._is_advanced = False
        device = stagings[0].state.device if stagings else torch.device("cpu")
        self.sums = torch.zeros(PRODUCTS, dtype=torch.float64, device=device)
        self._verdicts = verdicts
        if verdicts is None:
            # Known before the first sum is finished, and not waited for earlier.
            self._verdicts_under_way: Gathered = exchange.gather(torch.tensor([float(verdict)], device=device))

    def verdicts(self) -> Tensor:
        """On the pseudo-gradients of all groups; int64 on the CPU, shape ``[groups]``. Waits for all of them."""
        if self._verdicts is None:
            self._verdicts = self._verdicts_under_way.result().flatten().cpu().long()
        return self._verdicts

    def contributors(self) -> Tensor:
        """Which groups count; boolean on the CPU, shape ``[groups]``. Waits for all of them."""
        return self.verdicts() == GOOD

    def begin(self) -> None:
        """Takes the pseudo-gradients and sends them off."""
        self._flights = [self._send(staged) for staged in _staged_ahead(self._chunks)]

    def advance(self) -> None:
        """Sends on what has arrived; does nothing when called again."""
        if not self._is_advanced:
            for flight in self._flights:
                flight.sum.advance()
            self._is_advanced = True

    def settle(self) -> tuple[Tensor, Tensor]:
        """Waits for everything that is on the wire, so that only :meth:`finish` is left to do.

        Returns:
            The own pseudo-gradients and their sums over the groups, both float32 and as long as the round's chunks together.
        """
        self.advance()
        for flight in self._flights:
            flight.sum.finish()
            flight.sum = Sum()
        if not self._flights:
            return torch.empty(0), torch.empty(0)
        staged = [flight.staged for flight in self._flights]
        return torch.cat([chunk.own for chunk in staged]), torch.cat([chunk.mean for chunk in staged])

    def numel(self) -> int:
        """Number of elements that this round moves on this rank."""
        return sum(chunk.numel for _, chunk in self._chunks)

    def resume(self, own: Tensor, total: Tensor) -> None:
        """Goes on where :meth:`settle` has left another round; in place of :meth:`begin`."""
        sizes = [chunk.numel for _, chunk in self._chunks]
        for staged, own_part, total_part in zip(_staged_ahead(self._chunks), own.split(sizes), total.split(sizes), strict=True):
            staged.own.copy_(own_part)
            staged.mean.copy_(total_part)
            self._flights.append(_Flight(staged, Sum()))
        self._is_advanced = True

    def finish(self) -> None:
        """Applies the result and keeps what this group has learned since :meth:`begin`.

        The parameters become the new common point plus the way they have gone meanwhile, as in the delayed outer step of
        "Eager Updates for Overlapped Communication and Computation in DiLoCo", arXiv 2502.12996.
        """
        contributors = int(self.contributors().sum())
        for flight in self._flights:
            self._apply(flight, contributors, keep_progress=self._contributes)
        self._flights = []

    def run(self) -> None:
        """Does all three moves at once, pipelined over the chunks; all groups hold the same parameters afterwards."""
        flights: collections.deque[_Flight] = collections.deque()

        def land() -> None:
            self._apply(flights.popleft(), int(self.contributors().sum()), keep_progress=False)

        for staged in _staged_ahead(self._chunks):
            if len(flights) == PIPELINE_DEPTH:
                land()
            if flights:
                flights[-1].sum.advance()
            flights.append(self._send(staged))
        if flights:
            flights[-1].sum.advance()
        while flights:
            land()

    def _send(self, staged: Staged) -> "_Flight":
        staged.subtract_parameters()
        if not self._contributes:
            staged.own.zero_()  # Not a product with zero, which would keep every nan.
        staged.mean.copy_(staged.own)
        return _Flight(staged, self._exchange.sum(staged.mean, staged.residual, exactly=staged.chunk.part.is_tied))

    def _apply(self, flight: "_Flight", contributors: int, keep_progress: bool) -> None:
        staged, mu, eta = flight.staged, self._mu, self._eta
        chunk, own, mean, anchor, momentum = staged.chunk, staged.own, staged.mean, staged.anchor, staged.momentum
        flight.sum.finish()
        mean.div_(contributors)
        torch.add(mean, momentum, alpha=mu, out=momentum)
        if chunk.part.is_counted:
            pairs = ((own, own), (own, mean), (mean, mean), (momentum, momentum))
            self.sums += torch.stack([torch.dot(left, right) for left, right in pairs]).double()
        if keep_progress:
            # The old anchor less the pseudo-gradient is where the parameters were: own becomes what they must move by.
            own.sub_(anchor)
        if self._exchange.size == 1 and self._contributes and not keep_progress:
            # A single group knows the mean of the parameters exactly. anchor - (anchor - parameters) loses its last bits,
            # and eta = 1, mu = 0 must be the identity.
            chunk.copy_parameters_to(anchor)
            anchor.add_(mean, alpha=1 - eta)
        else:
            anchor.add_(mean, alpha=-eta)
        anchor.add_(momentum, alpha=-eta * mu)
        if keep_progress:
            chunk.move_parameters(own.add_(anchor))
        else:
            chunk.set_parameters(anchor)
        staged.staging.give(staged)


class _Flight:
    """A chunk on its way."""

    def __init__(self, staged: Staged, sum_under_way: Sum) -> None:
        self.staged = staged
        self.sum = sum_under_way


def _staged_ahead(chunks: Iterable[tuple[Staging, Chunk]]) -> Iterator[Staged]:
    """Stages one chunk ahead, so that the copies of offloaded state run beside the work on the chunk before."""
    ahead: Staged | None = None
    for staging, chunk in chunks:
        staged = ahead
        if staged is not None:
            staged.staging.wait_for_copies()
        ahead = staging.take(chunk)
        if staged is not None:
            yield staged
    if ahead is not None:
        ahead.staging.wait_for_copies()
        yield ahead
