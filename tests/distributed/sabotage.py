"""Planted bugs and injected faults: what each test guards against, so that the test can be seen to fail."""

import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer import ChainedOptimizer

from pier_megatron import outer
from pier_megatron.integration import gradients

Patch = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def planted(names: list[str], directory: Path) -> Iterator[None]:
    """Runs with the bugs and faults of those names; they may leave marks in ``directory``."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_ALL[name](directory))
        yield


def _no_commit(directory: Path) -> Patch:
    """The published code's: the forward after an outer step still uses the old weights."""
    return mock.patch("pier_megatron.optimizer.commit_main_parameters")


def _no_rescaling(directory: Path) -> Patch:
    """The published code's: gradients summed over one group are divided by the size of all."""
    averaging = gradients.GradientAveraging
    return mock.patch.object(averaging, "over_own_group", lambda self: self._set(instances=1, scale=1))


def _unaware_of_nan(directory: Path) -> Patch:
    """A pseudo-gradient that is not finite goes into the mean like any other."""
    return mock.patch.object(outer.OuterState, "parameters_are_finite", return_value=torch.tensor(True))


def _no_progress_kept(directory: Path) -> Patch:
    """What a group has learned while an exchange was under way is thrown away."""
    apply = outer.OuterRound._apply
    forgetful = functools.partialmethod(lambda self, flight, n, keep_progress: apply(self, flight, n, keep_progress=False))
    return mock.patch.object(outer.OuterRound, "_apply", forgetful)


def _fault(group: int, iterations: tuple[int, ...], before: Any = None, after: Any = None) -> Patch:
    """Does something to one group around its inner step."""
    step = ChainedOptimizer.step

    def faulty_step(optimizer: Any) -> Any:
        strikes = optimizer.exchange.rank == group and optimizer.iteration in iterations
        if strikes and before:
            before(optimizer)
        result = step(optimizer)
        if strikes and after:
            after(optimizer)
        return result

    return mock.patch.object(ChainedOptimizer, "step", faulty_step)


def _group_1_waits_for_group_0(directory: Path) -> Patch:
    """Group 1 does not end iteration 7 before group 0 has ended iteration 8: impossible if they meet in between."""
    step = ChainedOptimizer.step
    mark = directory / "group 0 has ended iteration 8"

    def waiting_step(optimizer: Any) -> Any:
        result = step(optimizer)
        group, iteration = optimizer.exchange.rank, optimizer.iteration
        if (group, iteration) == (0, 8):
            mark.touch()
        if (group, iteration) == (1, 7):
            deadline = time.monotonic() + 60
            while not mark.exists():
                assert time.monotonic() < deadline, "group 0 waits for group 1"
                time.sleep(0.05)
        return result

    return mock.patch.object(ChainedOptimizer, "step", waiting_step)


def _overflow(optimizer: Any) -> None:
    for chunk in optimizer.model_chunks:
        next(chunk.parameters()).main_grad.fill_(float("inf"))


def _nan(optimizer: Any) -> None:
    optimizer.outer_states[0]._shards[0][0] = float("nan")


_ALL = {
    "no commit": _no_commit,
    "no rescaling": _no_rescaling,
    "unaware of nan": _unaware_of_nan,
    "overflow in group 1 at 8 and 9": lambda directory: _fault(1, (8, 9), before=_overflow),
    "nan in group 1 at 9": lambda directory: _fault(1, (9,), after=_nan),
    "group 1 waits for group 0": _group_1_waits_for_group_0,
    "no progress kept": _no_progress_kept,
}
