"""What the parameters of this rank hold: what is trained, or what all groups agreed on."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer.meetings import write_mean_of_anchors
from pier_megatron.outer.staging import Staging


class Weights:
    """The parameters, between the inner optimizer that trains them and the outer state that they come back to."""

    def __init__(self, stagings: Sequence[Staging], exchange: GroupExchange, on_change: Callable[[], None]) -> None:
        """Begins with parameters that the model knows.

        Args:
            stagings: Of the outer states over them.
            exchange: Collectives between all groups.
            on_change: Called after the parameters have changed, on all ranks of the group.
        """
        self._stagings, self._exchange, self._on_change = stagings, exchange, on_change
        self._is_committed = True

    def commit(self) -> None:
        """Lets the model know the parameters."""
        self._on_change()
        self._is_committed = True

    def commit_what_is_left(self) -> None:
        """Does so if an error kept it from being done."""
        if not self._is_committed:
            self.commit()

    def become_anchor(self) -> None:
        """Takes the present parameters for the anchor."""
        for staging in self._stagings:
            staging.synchronize()
            staging.state.copy_parameters_to(staging.state.anchor)

    def return_to_anchor(self) -> None:
        """Takes the anchor for the parameters."""
        for staging in self._stagings:
            staging.synchronize()
            staging.state.set_parameters(staging.state.anchor)

    def agree_on_mean(self) -> None:
        """Takes the mean of all groups' anchors for the parameters and for the anchor."""
        write_mean_of_anchors(self._stagings, self._exchange)
        self.become_anchor()
        self.commit()

    @contextlib.contextmanager
    def showing_anchor(self, as_mean: bool) -> Iterator[list[Tensor]]:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.anchor_in_model`."""
        states = [staging.state for staging in self._stagings]
        with torch.no_grad():
            trained = [state.copy_parameters_to(torch.empty(state.numel, dtype=torch.float32)) for state in states]
        try:
            with torch.no_grad():
                if as_mean:
                    write_mean_of_anchors(self._stagings, self._exchange)
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
