"""Planted bugs and injected faults: what each test guards against, so that the test can be seen to fail."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer import ChainedOptimizer

from pier_megatron import outer
from pier_megatron.integration import gradients

Patch = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def planted(names: list[str]) -> Iterator[None]:
    """Runs with the bugs and faults of those names."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_ALL[name]())
        yield


def _no_commit() -> Patch:
    """The published code's: the forward after an outer step still uses the old weights."""
    return mock.patch("pier_megatron.optimizer.commit_main_parameters")


def _no_rescaling() -> Patch:
    """The published code's: gradients summed over one group are divided by the size of all."""
    averaging = gradients.GradientAveraging
    return mock.patch.object(averaging, "over_own_group", lambda self: self._set(instances=1, scale=1))


def _unaware_of_nan() -> Patch:
    """A pseudo-gradient that is not finite goes into the mean like any other."""
    return mock.patch.object(outer.OuterState, "parameters_are_finite", return_value=torch.tensor(True))


def _fault(group: int, iterations: tuple[int, ...], before: Any = None, after: Any = None) -> Patch:
    """Does something to one group around its inner step."""
    step = ChainedOptimizer.step

    def faulty_step(optimizer: Any) -> Any:
        strikes = optimizer._exchange.rank == group and optimizer.iteration in iterations
        if strikes and before:
            before(optimizer)
        result = step(optimizer)
        if strikes and after:
            after(optimizer)
        return result

    return mock.patch.object(ChainedOptimizer, "step", faulty_step)


def _overflow(optimizer: Any) -> None:
    for chunk in optimizer.model_chunks:
        next(chunk.parameters()).main_grad.fill_(float("inf"))


def _nan(optimizer: Any) -> None:
    optimizer.outer_states[0]._shards[0][0] = float("nan")


_ALL = {
    "no commit": _no_commit,
    "no rescaling": _no_rescaling,
    "unaware of nan": _unaware_of_nan,
    "overflow in group 1 at 8 and 9": lambda: _fault(1, (8, 9), before=_overflow),
    "nan in group 1 at 9": lambda: _fault(1, (9,), after=_nan),
}
