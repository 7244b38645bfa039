"""Pier on one page: plain float64 PyTorch, one process, no Megatron. Read this first.

This is the oracle of the tests: what the distributed implementation computes must equal what this page computes.

Reference: Fan & Zhang, "Pier: Efficient Large Language Model pretraining with Relaxed Global Communication",
arXiv 2511.17849, built on DiLoCo, arXiv 2311.08105.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from pier_megatron.config import PierConfig

Gradient = Callable[[Sequence[Tensor], int, int], Sequence[Tensor] | None]
InnerOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


@dataclasses.dataclass
class _Exchange:
    """An outer step under way: its fragment, when it began, and all groups' parameters then.

    ``since`` is where the progress of a group counts from: its parameters then, or the anchor if it was restarted meanwhile.
    """

    fragment: int
    begun: int
    sent: list[list[Tensor]]
    since: list[list[Tensor]]


def train(
    initial: Sequence[Tensor],
    gradient: Gradient,
    inner_optimizer: InnerOptimizer,
    config: PierConfig,
    clip_grad: float = 0.0,
    fragment_masks: Sequence[Sequence[Tensor]] | None = None,
    on_iteration: Callable[[int, list[list[Tensor]]], None] = lambda iteration, groups: None,
    skipped: Collection[int] = (),
) -> list[Tensor]:
    """Trains ``config.groups`` groups with Pier.

    Args:
        initial: Parameters that all groups start from, any shapes.
        gradient: ``gradient(parameters, group, iteration)`` returns the gradient, averaged over the group's samples of
            that iteration, or None if it overflowed and the group skips its step. Groups are 0-based, iterations 1-based.
        inner_optimizer: Makes the inner optimizer of one group for its parameters.
        config: Schedules and sizes.
        clip_grad: Largest global gradient norm, or 0 for no clipping.
        fragment_masks: For each fragment, which elements of each parameter belong to it. None: one fragment, all of them.
        on_iteration: Called at the end of each iteration with all groups' parameters.
        skipped: Iterations in which nobody trains; what is due after them is done all the same.

    Returns:
        The parameters that all groups agree on after the last iteration, float64.
    """
    groups = [[tensor.detach().to(torch.float64, copy=True) for tensor in initial] for _ in range(config.groups)]
    optimizers = [inner_optimizer(theta) for theta in groups]
    anchor = [tensor.clone() for tensor in groups[0]]
    momentum = [torch.zeros_like(tensor) for tensor in anchor]
    masks = fragment_masks or [[torch.ones_like(tensor, dtype=torch.bool) for tensor in anchor]]
    underway: list[_Exchange] = []
    restarted = [-1] * config.groups  # Iteration at whose end a group was restarted last.

    def land(exchange: _Exchange, t: int) -> None:
        """Outer step of one fragment: Nesterov in PyTorch's form on the mean pseudo-gradient of the groups that are finite."""
        mu, eta = config.momentum_at(exchange.begun), config.learning_rate_at(exchange.begun)
        good = [all(bool(tensor.isfinite().all()) for tensor in theta) for theta in exchange.sent]
        usable = [theta for theta, counts in zip(exchange.sent, good, strict=True) if counts]
        for i, mask in enumerate(masks[exchange.fragment]):
            delta = torch.stack([anchor[i] - theta[i] for theta in usable]).mean(0)
            new_momentum = mu * momentum[i] + delta
            new_anchor = anchor[i] - eta * (delta + mu * new_momentum)
            for theta, was in zip(groups, exchange.since, strict=True):
                # The new common point, plus the way that the group has gone meanwhile.
                theta[i].copy_(torch.where(mask, new_anchor + (theta[i] - was[i]), theta[i]))
            momentum[i] = torch.where(mask, new_momentum, momentum[i])
            anchor[i] = torch.where(mask, new_anchor, anchor[i])
        # A group that was left out is restarted as a whole, once for all exchanges that saw it in trouble.
        for group in (group for group, counts in enumerate(good) if not counts and restarted[group] <= exchange.begun):
            for parameter, common in zip(groups[group], anchor, strict=True):
                parameter.copy_(common)
            _hand_over(optimizers[good.index(True)], optimizers[group])
            restarted[group] = t
            for other in underway:
                other.since[group] = [tensor.clone() for tensor in anchor]

    for t in range(1, config.train_iters + 1):
        # Inner step. In the lazy start the gradient is the mean over all groups, later over the samples of one group.
        gradients = [gradient(theta, group, t) if t not in skipped else None for group, theta in enumerate(groups)]
        if config.is_lazy(t):
            gradients = [_mean(gradients)] * config.groups
        for theta, grads, optimizer in zip(groups, gradients, optimizers, strict=True):
            if grads is None:
                continue
            norm = torch.stack([grad.double().norm() for grad in grads]).norm().item()
            scale = min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0
            for parameter, grad in zip(theta, grads, strict=True):
                parameter.grad = grad.double() * scale
            optimizer.step()

        # Momentum warmup: the groups are identical, nothing is communicated, the parameters stay.
        if config.is_momentum_warmup(t):
            mu = config.momentum_at(t)
            momentum = [mu * m + (a - p) for m, a, p in zip(momentum, anchor, groups[0], strict=True)]
        if config.is_lazy(t) and t % config.sync_interval == 0:
            anchor = [parameter.clone() for parameter in groups[0]]

        # Outer steps that began earlier take effect `overlap` iterations later, at the latest after the last iteration.
        is_last = t == config.train_iters
        for exchange in [exchange for exchange in underway if is_last or t - exchange.begun == config.overlap]:
            underway.remove(exchange)
            land(exchange, t)
        sent = [[parameter.clone() for parameter in theta] for theta in groups]
        due = [_Exchange(fragment, t, sent, list(sent)) for fragment in config.fragments_due(t)]
        if config.overlap and not is_last:
            underway += due
        else:
            for exchange in due:
                land(exchange, t)
        on_iteration(t, groups)
    return anchor


def _mean(groups: Sequence[Sequence[Tensor] | None]) -> list[Tensor] | None:
    known = [tensors for tensors in groups if tensors is not None]
    if len(known) < len(groups):
        return None
    return [torch.stack([tensor.double() for tensor in tensors]).mean(0) for tensors in zip(*known, strict=True)]


def _hand_over(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Moments of one group for another; nothing but zeros if one of the two has not stepped yet."""
    pairs = zip(source.param_groups, target.param_groups, strict=True)
    for one, other in ((one, other) for of, to in pairs for one, other in zip(of["params"], to["params"], strict=True)):
        for name, moment in target.state[other].items():
            if moment.shape == other.shape:
                moment.copy_(source.state[one][name]) if source.state[one] else moment.zero_()
