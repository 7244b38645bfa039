"""The oracle itself: on problems small enough to work out by hand, and in the cases that have a name."""

import pytest
import torch
from torch import Tensor

from pier_megatron import PierConfig, reference
from pier_megatron.exchange.codecs import BLOCK, CODECS, Codec
from pier_megatron.exchange.coding import decode_plainly, encode_plainly
from pier_megatron.exchange.pairs import draw_subgroups


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def constant_gradients(parameters: list[Tensor], group: int, iteration: int) -> list[Tensor]:
    """Group 0 is pulled by 1, group 1 by 3, whatever its parameters."""
    return [torch.full_like(parameter, 1.0 + 2 * group) for parameter in parameters]


def trajectory(config: PierConfig, gradients: reference.Gradient = constant_gradients) -> list[list[float]]:
    """Each group's single parameter after each iteration, from 0."""
    states: list[list[float]] = []
    reference.train(
        [torch.zeros(1)],
        gradients,
        sgd,
        config,
        on_iteration=lambda t, groups: states.append([parameters[0].item() for parameters in groups]),
    )
    return states


def test_worked_example() -> None:
    config = PierConfig(train_iters=4, groups=2, sync_interval=1, lazy_start_iters=2, outer_lr=0.5, outer_momentum=0.9)
    states = trajectory(config)
    # Lazy start: both follow the mean gradient 2. Warmup: m = 0.2, then 0.9 * 0.2 + 0.2 = 0.38.
    torch.testing.assert_close(states[:2], [[-0.2, -0.2], [-0.4, -0.4]])
    # delta = mean(0.1, 0.3) = 0.2; m = 0.9 * 0.38 + 0.2 = 0.542; theta = -0.4 - 0.5 * (0.2 + 0.9 * 0.542).
    torch.testing.assert_close(states[2], [-0.7439, -0.7439])
    # m = 0.9 * 0.542 + 0.2 = 0.6878; theta = -0.7439 - 0.5 * (0.2 + 0.9 * 0.6878).
    torch.testing.assert_close(states[3], [-1.15341, -1.15341])


def test_one_group_with_unit_steps_is_the_inner_optimizer() -> None:
    config = PierConfig(train_iters=5, groups=1, sync_interval=1, lazy_start_iters=1, preset="local-sgd")
    torch.testing.assert_close(trajectory(config), [[-0.1 * t] for t in range(1, 6)])


def test_diloco_is_nesterov_of_pytorch_on_the_mean_pseudo_gradient() -> None:
    config = PierConfig(train_iters=12, groups=2, sync_interval=2, lazy_start_iters=0, preset="diloco")
    parameter = torch.zeros(1, dtype=torch.float64)
    outer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for state in trajectory(config)[1::2]:
        parameter.grad = torch.full_like(parameter, 0.4)  # Two inner steps of 0.1 times the mean gradient 2.
        outer.step()
        torch.testing.assert_close(state, [parameter.item()] * 2)


def test_one_bit_is_a_sign_and_what_it_drops_comes_with_the_next() -> None:
    config = PierConfig(
        train_iters=2, groups=2, sync_interval=1, lazy_start_iters=0, outer_lr=1.0, outer_momentum=0.0, exchange_dtype="int1"
    )
    # Each sends half of its 0.1 and 0.3; of their sum 0.2 half is sent back: a mean of 0.05. Then 0.15 and 0.45 less half, and
    # half of their sum 0.3 with the 0.1 that was dropped of the first: 0.1.
    torch.testing.assert_close(trajectory(config), [[-0.05, -0.05], [-0.15, -0.15]], rtol=1e-2, atol=0)


@pytest.mark.parametrize("codec", list(CODECS.values())[1:], ids=lambda codec: codec.name)
def test_what_arrives_is_what_the_codec_makes_of_it(codec: Codec) -> None:
    vector = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(2))
    vector[BLOCK : 2 * BLOCK] *= 1e-3
    vector[2 * BLOCK :] = 0
    found = reference.decoded(codec, vector.double(), torch.arange(len(vector)) // BLOCK)
    expected = decode_plainly(codec, encode_plainly(codec, vector[None].clone()))[0]
    torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("size", "gamma"), [(2, 0.7), (2, 1.2), (3, 0.9)])
def test_noloco_is_equation_2_with_the_sign_of_equation_32(size: int, gamma: float) -> None:
    def pull(parameters: list[Tensor], group: int, iteration: int) -> list[Tensor]:
        """Each group is drawn to a place of its own."""
        return [parameter - (1.0 + group) for parameter in parameters]

    alpha, beta, n = 0.5, gamma, size
    common = {"train_iters": 12, "groups": 6, "sync_interval": 2, "lazy_start_iters": 0, "preset": "noloco"}
    config = PierConfig(**common, subgroup_size=n, outer_lr=gamma)
    found = torch.tensor(trajectory(config, pull), dtype=torch.float64)
    phi, delta, theta = (torch.zeros(6, dtype=torch.float64) for _ in range(3))
    for t in range(1, 13):
        theta = theta - 0.1 * (theta - (1.0 + torch.arange(6)))
        if t % 2 == 0:
            was, moved = phi.clone(), theta - phi
            for met in map(list, draw_subgroups(6, n, 0, t)):
                for i in met:
                    delta[i] = alpha * delta[i] + beta / n * moved[met].sum() - gamma * (was[i] - was[met].sum() / n)
                    phi[i] = was[i] + delta[i]
            theta = phi.clone()
        if t < 12:
            torch.testing.assert_close(found[t - 1], theta, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[-1], phi.mean().expand(6), rtol=0, atol=1e-12)
