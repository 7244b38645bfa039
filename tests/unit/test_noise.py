"""The noise of pseudo-gradients."""

import math

import pytest
import torch

from pier_megatron.outer.expectation import share_by_noise
from pier_megatron.outer.noise import IntervalNoise, noise_to_signal


@pytest.mark.parametrize("groups", [2, 8])
def test_noise_to_signal_is_found_again(groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    signal = torch.randn(100_000, generator=generator, dtype=torch.float64)
    for noise in (0.0, 0.5, 3.0):
        own = signal + noise * torch.randn(groups, 100_000, generator=generator, dtype=torch.float64)
        found = noise_to_signal(own.square().sum(1).mean().item(), own.mean(0).square().sum().item(), groups)
        assert found == pytest.approx(noise**2, rel=0.03, abs=1e-9)


def test_groups_without_anything_in_common_are_all_noise() -> None:
    # Orthogonal pseudo-gradients, and opposite ones.
    assert noise_to_signal(1.0, 0.5, 2) == noise_to_signal(1.0, 0.0, 2) == math.inf
    assert share_by_noise(math.inf, 2, 2) == 0


def test_noise_of_fragments_is_that_of_their_interval() -> None:
    squares = [(5.0, 3.0, 4), (7.0, 6.0, 4)]
    noise = IntervalNoise(2)
    assert [noise.add(range(fragment, fragment + 1), squares[fragment]) for fragment in (0, 1, 0, 1)] == [
        None,
        noise_to_signal(12.0, 9.0, 4),
        None,
        noise_to_signal(12.0, 9.0, 4),
    ]
    # The run begins between two fragments, one of them cannot be estimated or had other participants, all are due at once.
    assert IntervalNoise(2).add(range(1, 2), squares[1]) is None
    for other in (None, (7.0, 6.0, 3)):
        assert [noise.add(range(1), squares[0]), noise.add(range(1, 2), other)] == [None, None]
    assert noise.add(range(2), squares[0]) is None
    assert IntervalNoise(1).add(range(1), squares[0]) == noise_to_signal(*squares[0])
