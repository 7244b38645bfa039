"""Pier on one page: plain float64 PyTorch, one process, no Megatron. Read this first.

This is the oracle of the tests: what the distributed implementation computes must equal what this page computes.

Reference: Fan & Zhang, "Pier: Efficient Large Language Model pretraining with Relaxed Global Communication",
arXiv 2511.17849, built on DiLoCo, arXiv 2311.08105.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pier_megatron.config import PierConfig

Gradient = Callable[[Sequence[Tensor], int, int], Sequence[Tensor]]
InnerOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def train(
    initial: Sequence[Tensor],
    gradient: Gradient,
    inner_optimizer: InnerOptimizer,
    config: PierConfig,
    clip_grad: float = 0.0,
    on_iteration: Callable[[int, list[list[Tensor]]], None] = lambda iteration, groups: None,
) -> list[Tensor]:
    """Trains ``config.groups`` groups with Pier.

    Args:
        initial: Parameters that all groups start from, any shapes.
        gradient: ``gradient(parameters, group, iteration)`` returns the gradient, averaged over the group's samples of
            that iteration. Groups are 0-based, iterations 1-based.
        inner_optimizer: Makes the inner optimizer of one group for its parameters.
        config: Schedules and sizes.
        clip_grad: Largest global gradient norm, or 0 for no clipping.
        on_iteration: Called at the end of each iteration with all groups' parameters.

    Returns:
        The parameters that all groups agree on after the last iteration, float64.
    """
    groups = [[tensor.detach().to(torch.float64, copy=True) for tensor in initial] for _ in range(config.groups)]
    optimizers = [inner_optimizer(theta) for theta in groups]
    anchor = [tensor.clone() for tensor in groups[0]]
    momentum = [torch.zeros_like(tensor) for tensor in anchor]

    for t in range(1, config.train_iters + 1):
        # Inner step. In the lazy start the gradient is the mean over all groups, later over the samples of one group.
        gradients = [gradient(theta, group, t) for group, theta in enumerate(groups)]
        if config.is_lazy(t):
            gradients = [_mean(gradients)] * config.groups
        for theta, grads, optimizer in zip(groups, gradients, optimizers, strict=True):
            norm = torch.stack([grad.double().norm() for grad in grads]).norm().item()
            scale = min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0
            for parameter, grad in zip(theta, grads, strict=True):
                parameter.grad = grad.double() * scale
            optimizer.step()

        # Momentum warmup: the groups are identical, nothing is communicated, the parameters stay.
        if config.is_momentum_warmup(t):
            momentum = [config.momentum_at(t) * m + (a - p) for m, a, p in zip(momentum, anchor, groups[0], strict=True)]
        if config.is_lazy(t) and t % config.sync_interval == 0:
            anchor = [parameter.clone() for parameter in groups[0]]

        # Outer step: Nesterov in PyTorch's form on the mean pseudo-gradient.
        if config.is_outer_step(t):
            mu, eta = config.momentum_at(t), config.learning_rate_at(t)
            delta = _mean([[a - p for a, p in zip(anchor, theta, strict=True)] for theta in groups])
            momentum = [mu * m + d for m, d in zip(momentum, delta, strict=True)]
            anchor = [a - eta * (d + mu * m) for a, d, m in zip(anchor, delta, momentum, strict=True)]
            for theta in groups:
                for parameter, a in zip(theta, anchor, strict=True):
                    parameter.copy_(a)
        on_iteration(t, groups)
    return anchor


def _mean(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack([tensor.double() for tensor in tensors]).mean(0) for tensors in zip(*groups, strict=True)]
