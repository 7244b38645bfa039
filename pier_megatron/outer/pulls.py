"""Slow weights of the groups that will meet next, sent behind training: NoLoCo's second tensor."""

import math
from collections.abc import Callable, Collection, Container, Iterable, Sequence

import torch
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import Exchange, Sum
from pier_megatron.outer.flights import Crossing, Flight
from pier_megatron.outer.share import Share
from pier_megatron.outer.staging import Staged
from pier_megatron.outer.state import COMMON, MOMENTUM


class Pulls:
    """Takes the distance of the slow weights to their mean into the momentum, before the outer step that this belongs to.

    ``momentum = alpha * momentum + gamma / beta * (anchor - mean(anchor))`` over the groups that will meet. Neither of the two
    changes until then, so it does not matter when that is done, and nothing has to be kept.

    Attributes:
        done: Fragments whose momentum is ready for their next outer step.
    """

    def __init__(self, config: PierConfig, share: Share, participants_at: Callable[[int], Exchange]) -> None:
        """Begins with nothing under way.

        Args:
            config: Settings of the run.
            share: Outer state of this rank.
            participants_at: Collectives between the participants of outer steps that begin after an iteration.
        """
        self._config, self._share, self._participants_at = config, share, participants_at
        # Each with the iteration at whose end it began.
        self._under_way: list[tuple[_Pull, int]] = []
        # Also before a last outer step that comes earlier: in fewer iterations more would be on the wire at a time.
        self._span = config.sync_interval - config.overlap
        self.done: set[int] = set()
        # Of pulls that have finished: the distances, and the bytes sent.
        self._finished: dict[int, tuple[Tensor, int]] = {}
        # Fragments whose slow weights may differ between groups.
        self._apart: set[int] = set()

    def restart(self, done: Iterable[int] | None = None) -> None:
        """Forgets what is under way; called on every rank alike.

        Args:
            done: Fragments whose momentum is ready; None if all groups hold the same slow weights.
        """
        for pull, _ in self._under_way:
            pull.drop()
        self._under_way, self._finished, self.done = [], {}, set(done or ())
        self._apart = set() if done is None else set(range(self._config.fragments))

    def begin(self, begun: int, iteration: int) -> None:
        """Begins to send the slow weights of a round to the groups that are met next.

        Args:
            begun: Iteration after which the round began.
            iteration: Iteration at whose end it has ended.
        """
        fragments = self._config.fragments_due(begun)
        self._apart.update(fragments)
        # Also what a run that pulls has left to one that does not.
        self.done.difference_update(fragments)
        for fragment in fragments if self._config.pulls else ():
            due = self._config.next_outer_step(fragment, begun)
            if due is None:
                continue
            alpha, strength = self._config.momentum_at(due), self._config.pull_at(due)
            pull = _Pull(self._share, self._participants_at(due), fragment, alpha, strength)
            self._under_way.append((pull, iteration))
            if due > iteration:
                pull.proceed(0, self._span)

    def proceed(self, iteration: int) -> None:
        """Moves on what is due at the end of an iteration; called in the same iterations on every rank."""
        for pull, begun in self._under_way:
            pull.proceed(iteration - begun, self._span)

    def finish(self, fragments: Container[int]) -> None:
        """Waits for the slow weights of some fragments."""
        for pull, _ in (crossing for crossing in self._under_way if crossing[0].fragment in fragments):
            pull.arrive()
            self.done.add(pull.fragment)
            self._finished[pull.fragment] = pull.distance, pull.bytes_sent
        self._under_way = [crossing for crossing in self._under_way if crossing[0].fragment not in fragments]

    def take(self, fragments: Collection[int]) -> tuple[Tensor, int]:
        """Waits for the slow weights of fragments whose outer step is due.

        Returns:
            Sum of the squares of the distances to the mean, over what this rank counts, a float64 scalar; nan where groups may
            hold slow weights of their own and none crossed in this process. Bytes sent.
        """
        self.finish(fragments)
        none = torch.zeros((), dtype=torch.float64, device=self._share.device)
        if self._config.has_common_anchor or not self._config.sends_differences:
            # What is sent in the outer step says where the weights are.
            return none, 0
        unknown = none.new_full((), math.nan)
        found = [self._finished.pop(fragment, (unknown if fragment in self._apart else none, 0)) for fragment in fragments]
        return torch.stack([distance for distance, _ in found]).sum(), sum(sent for _, sent in found)


class _Pull(Crossing):
    """Slow weights of one fragment on their way."""

    def __init__(self, share: Share, exchange: Exchange, fragment: int, alpha: float, strength: float) -> None:
        flights = [Flight(staging, chunk) for staging, chunk in share.chunks((fragment,))]
        super().__init__(COMMON, exchange.wire.launches_of_sum(exactly=True), flights)
        self.fragment = fragment
        self._exchange, self._alpha, self._strength = exchange, alpha, strength
        self.distance = torch.zeros((), dtype=torch.float64, device=share.device)
        self.bytes_sent = sum(exchange.wire.bytes_of_sum(flight.chunk.numel, exactly=True) for flight in self._flights)

    def _take_off(self, batch: Sequence[Staged]) -> Sum:
        for staged in batch:
            staged.shared.copy_(staged.anchor)
        return self._exchange.sum([staged.shared for staged in batch], exactly=True)

    def _land(self, staged: Staged) -> None:
        distance = torch.sub(staged.anchor, staged.shared, alpha=1 / self._exchange.size, out=staged.shared)
        if staged.chunk.shards.is_counted:
            self.distance += torch.dot(distance, distance)
        torch.add(staged.momentum.mul_(self._alpha), distance, alpha=self._strength, out=staged.momentum)
        staged.give_back((MOMENTUM,))
