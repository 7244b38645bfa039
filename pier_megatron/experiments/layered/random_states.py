"""Random states of micro-batches that pass a model together: each draws the numbers that it draws in Megatron's order.

There one forward pass follows the other, and each draws as many numbers. Where each of them begins is known as soon as
some have passed the layers alone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pier_megatron.megatron_api import log, versions

States = Mapping[str, Tensor]
"""States of the generators that a forward pass draws from, by name: the device's, and those of Megatron's tracker."""

_DEVICE = "the device's"

# Bytes of a CUDA generator's state: its seed, and how many numbers it has drawn.
_SEED_AND_OFFSET = 16

# A CPU's generator is a Mersenne twister: a header with its position, then so many words. As many draws replace all words.
_WORDS, _WORD, _HEAD = 624, 8, 24

# Numbers that a micro-batch may draw from a CPU's generator: with these it takes seconds to count them.
_MOST_ON_A_CPU = 10**8
_AT_ONCE = 2**20


@dataclasses.dataclass
class RandomStates:
    """What is known of the random numbers that micro-batches draw.

    Attributes:
        passed: Micro-batches that have passed alone.
        drawn: Numbers that each draws, by generator; None until two have passed alone, because the very first one may draw some
            that are drawn once in a run.
        has_complained: Whether it has been said that one draws more or fewer.
    """

    passed: int = 0
    drawn: Mapping[str, int] | None = None
    has_complained: bool = False

    def learn(self, before: States, after: States) -> None:
        """Takes the states before and after the layers of a micro-batch that has passed them alone."""
        self.passed += 1
        if self.passed > 1:
            self.drawn = {name: _drawn(state, after[name]) for name, state in before.items()}

    def starts(self, count: int) -> list[States]:
        """The states at which so many micro-batches begin, the next one now."""
        starts = [current()] if count else []
        while len(starts) < count and self.drawn is not None:
            starts.append({name: _advanced(state, self.drawn[name]) for name, state in starts[-1].items()})
        return starts

    def check(self, starts: Sequence[States], ends: Sequence[States]) -> None:
        """Says once if one forward pass has not ended where the next one has begun, as it does in Megatron's order."""
        is_equal = all(
            torch.equal(state, following[name])
            for end, following in zip(ends[:-1], starts[1:], strict=True)
            for name, state in end.items()
        )
        if not is_equal and not self.has_complained:
            self.has_complained = True
            log.print_last(
                " Pier: WARNING: --pier-layered: a micro-batch has drawn more or fewer random numbers than another one (of "
                "unequal sequences?): from here on losses differ from Megatron's order, as with another seed"
            )


def current() -> States:
    """The states now."""
    return {_DEVICE: torch.cuda.get_rng_state(), **_tracker().get_states()}


def put_back(states: States) -> None:
    """Draws on from these states."""
    torch.cuda.set_rng_state(states[_DEVICE])
    _tracker().set_states({name: state for name, state in states.items() if name != _DEVICE})


class _Tracker(Protocol):
    """What is used of Megatron's ``CudaRNGStatesTracker``."""

    def get_states(self) -> dict[str, Tensor]:
        """States of its generators, which it replaces and does not change."""

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Takes over states."""


def _tracker() -> _Tracker:
    tracker: _Tracker = versions.require("megatron.core.tensor_parallel", "get_cuda_rng_tracker")()
    return tracker


def _advanced(state: Tensor, numbers: int) -> Tensor:
    """The state after so many more numbers."""
    if not numbers:
        return state
    if state.numel() == _SEED_AND_OFFSET:
        advanced = state.clone()
        advanced.view(torch.int64)[1] += numbers
        return advanced
    generator, some = torch.Generator(), torch.empty(min(numbers, _AT_ONCE), dtype=torch.int32)
    generator.set_state(state)
    while numbers:
        some[:numbers].random_(generator=generator)
        numbers -= min(numbers, _AT_ONCE)
    return generator.get_state()


def _drawn(before: Tensor, after: Tensor) -> int:
    """How many numbers there are between two states."""
    if before.numel() == _SEED_AND_OFFSET:
        return int(after.view(torch.int64)[1] - before.view(torch.int64)[1])
    words = slice(_HEAD, _HEAD + _WORDS * _WORD)
    for count in range(0, _MOST_ON_A_CPU, _WORDS):
        if torch.equal(before[words], after[words]):
            # Before the place at which it began, or behind it.
            return count + _place(after) - _place(before)
        before = _advanced(before, _WORDS)
    raise RuntimeError(
        f"--pier-layered: a micro-batch draws more than {_MOST_ON_A_CPU} random numbers on a CPU. Set --hidden-dropout 0 and "
        "--attention-dropout 0, or drop --pier-layered."
    )


def _place(state: Tensor) -> int:
    """How many of its words a Mersenne twister has used."""
    left, _ = state[8:16].view(torch.int32).tolist()
    return _WORDS - int(left)
