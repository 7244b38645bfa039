"""States of random generators by how many numbers they have drawn; in trainings, ``distributed/test_layered.py``."""

import pytest
import torch
from torch import Tensor

from pier_megatron.experiments.layered import random_states


def drawn_from(seed: int, *counts: int) -> list[Tensor]:
    """States of a CPU's generator before and after so many numbers each."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    states = [generator.get_state()]
    for count in counts:
        torch.empty(count, dtype=torch.int32).random_(generator=generator)
        states.append(generator.get_state())
    return states


@pytest.mark.parametrize("count", [0, 1, 5, 623, 624, 625, 1247, 1248, 5000])
@pytest.mark.parametrize("before", [0, 1, 600, 624, 1000])
def test_numbers_of_a_cpu_are_counted(before: int, count: int) -> None:
    _, begin, end = drawn_from(1, before, count)
    assert random_states._drawn(begin, end) == count
    assert torch.equal(random_states._advanced(begin, count), end)


def test_masks_are_counted() -> None:
    torch.manual_seed(1)
    states = [torch.get_rng_state()]
    for _ in range(2):
        torch.nn.functional.dropout(torch.ones(5000), 0.1)
        states.append(torch.get_rng_state())
    drawn = random_states._drawn(states[0], states[1])
    assert drawn > 0
    assert torch.equal(random_states._advanced(states[1], drawn), states[2])


def test_a_gpu_counts_itself() -> None:
    # Seed and offset, as torch.cuda.get_rng_state() returns them.
    state = torch.tensor([2**40 + 7, 12]).view(torch.uint8)
    advanced = random_states._advanced(state, 20)
    assert advanced.view(torch.int64).tolist() == [2**40 + 7, 32]
    assert random_states._drawn(state, advanced) == 20
    assert state.view(torch.int64).tolist() == [2**40 + 7, 12]


def test_numbers_that_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_states, "_MOST_ON_A_CPU", 10_000)
    begin, end = drawn_from(1, 20_000)
    with pytest.raises(RuntimeError, match="--pier-layered: a micro-batch draws more than 10000 random numbers"):
        random_states._drawn(begin, end)
