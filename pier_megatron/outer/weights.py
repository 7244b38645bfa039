"""What the parameters of this rank hold: what is trained, or what all groups agreed on."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pier_megatron.exchange.collectives import GroupExchange, Sum
from pier_megatron.outer.share import Share
from pier_megatron.outer.staging import Staged, one_ahead
from pier_megatron.outer.state import ANCHOR


class Weights:
    """The parameters: the inner optimizer trains them, and the outer state resets them."""

    def __init__(self, share: Share, exchange: GroupExchange, on_change: Callable[[], None]) -> None:
        """Begins with parameters that the model knows.

        Args:
            share: Parameters and outer state of this rank.
            exchange: Collectives between all groups.
            on_change: Called after the parameters have changed, on all ranks of the group.
        """
        self.share, self._exchange, self._on_change = share, exchange, on_change
        self._is_committed = True

    def commit(self) -> None:
        """Lets the model know the parameters."""
        self._on_change()
        self._is_committed = True

    def commit_pending(self) -> None:
        """Commits if an error has prevented :meth:`commit`."""
        if not self._is_committed:
            self.commit()

    def become_anchor(self) -> None:
        """Copies the present parameters into the anchor."""
        self.share.synchronize()
        for state in self.share.states:
            state.copy_parameters_to(state.anchor)

    def return_to_anchor(self) -> None:
        """Takes the anchor for the parameters."""
        self.share.synchronize()
        for state in self.share.states:
            state.set_parameters(state.anchor)

    def agree_on_mean(self) -> None:
        """Takes the mean of all groups' anchors for the parameters and for the anchor."""
        self._write_mean_of_anchors()
        self.become_anchor()
        self.commit()

    @contextlib.contextmanager
    def showing_anchor(self, as_mean: bool) -> Iterator[list[Tensor]]:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.anchor_in_model`."""
        states = self.share.states
        with torch.no_grad():
            trained = [state.parameters_on_host() for state in states]
        try:
            with torch.no_grad():
                if as_mean:
                    self._write_mean_of_anchors()
                else:
                    self.return_to_anchor()
            self.commit()
            yield trained
        finally:
            with torch.no_grad():
                for state, parameters in zip(states, trained, strict=True):
                    state.set_parameters(parameters)
            # Not here: after an error on one rank the others would not take part.
            self._is_committed = False
        self.commit()

    def average(self, exchange: GroupExchange, counted: Sequence[bool]) -> None:
        """Takes the mean of the parameters of the groups that count: the same bits in all, copies included.

        Args:
            exchange: Collectives between the groups.
            counted: Whether each of them counts; at least one does.
        """
        stagings = self.share.stagings
        for staged in one_ahead(staging.lend(chunk, ()) for staging in stagings for chunk in staging.state.chunks):
            staged.chunk.copy_parameters_to(staged.shared)
            if not counted[exchange.rank]:
                staged.shared.zero_()
            total = exchange.sum([staged.shared], exactly=staged.chunk.shards.travel_exactly(exchange.codec))
            _write_mean(staged, total, sum(counted))

    def _write_mean_of_anchors(self) -> None:
        """Writes the mean of all groups' anchors to the parameters: the same bits in all of them, whatever their anchors."""
        stagings = self.share.stagings
        for staged in one_ahead(staging.lend(chunk, (ANCHOR,)) for staging in stagings for chunk in staging.state.chunks):
            staged.shared.copy_(staged.anchor)
            _write_mean(staged, self._exchange.sum([staged.shared], exactly=True), self._exchange.size)


def _write_mean(staged: Staged, total: Sum, number: int) -> None:
    """Waits for the sum of ``number`` groups in ``staged.shared``, and takes the mean for the parameters."""
    total.advance()
    total.finish()
    staged.chunk.set_parameters(staged.shared.div_(number))
    staged.give_back()
