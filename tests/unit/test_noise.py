"""The noise of pseudo-gradients."""

import math

import pytest
import torch

from pier_megatron.outer.expectation import share_by_noise
from pier_megatron.outer.noise import noise_to_signal


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
