"""Pier on one page: plain float64 PyTorch, one process, no Megatron. Read this first.

This is the oracle of the tests: what the distributed implementation computes must equal what this page computes.

References: Fan & Zhang, "Pier: Efficient Large Language Model pretraining with Relaxed Global Communication",
arXiv 2511.17849, built on DiLoCo, arXiv 2311.08105; Kolehmainen et al., "NoLoCo", arXiv 2506.10911, for gossip pairs.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.exchange.codecs import BLOCK, Codec
from pier_megatron.exchange.pairs import draw_subgroups
from pier_megatron.schedules import NEWTON_SCHULZ

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
    averaged: Collection[int] = (),
    blocks: Sequence[Tensor] | None = None,
    matrices: Callable[[int, Tensor], Sequence[Tensor]] = lambda index, tensor: [tensor] if tensor.dim() == 2 else [],
) -> list[Tensor]:
    """Trains ``config.groups`` groups with Pier.

    Args:
        initial: Parameters that all groups start from, any shapes.
        gradient: ``gradient(parameters, group, iteration)`` returns the gradient, averaged over the group's samples of
            that iteration, or None if it overflowed and the group skips its step. Groups are 0-based, iterations 1-based.
        inner_optimizer: Makes the inner optimizer of one group for its parameters.
        config: Schedules and sizes.
        clip_grad: Largest global gradient norm, or 0 for no clipping.
        fragment_masks: Masks of the elements that belong to each fragment, by parameter; None: one fragment, all of them.
        on_iteration: Called at the end of each iteration with all groups' parameters.
        skipped: Iterations in which nobody trains; what is due after them is done all the same.
        averaged: Indices of parameters that outer steps average without momentum: the biases of routers.
        blocks: Numbers of the blocks that share a scale where few bits are sent, by parameter and element, int64; elements of
            -1 travel exactly. None: all parameters in one vector, cut every 128 elements.
        matrices: Views of a tensor, given the index of its parameter, that ``--pier-outer-rule muon`` makes orthogonal each by
            itself, as long as the groups' own in the root mean square.

    Returns:
        The parameters that all groups agree on after the last iteration, float64: where they have met in subgroups only, the
        mean of their slow weights.
    """
    groups = [[tensor.detach().to(torch.float64, copy=True) for tensor in initial] for _ in range(config.groups)]
    optimizers = [inner_optimizer(theta) for theta in groups]
    # One entry for each group. Where all groups meet at every outer step, all hold the same.
    anchors = [[tensor.clone() for tensor in theta] for theta in groups]
    momenta = [[torch.zeros_like(tensor) for tensor in anchor] for anchor in anchors]
    masks = fragment_masks or [[torch.ones_like(tensor, dtype=torch.bool) for tensor in initial]]
    if blocks is None:
        places = torch.arange(sum(tensor.numel() for tensor in initial)) // BLOCK
        blocks = [part.view(of.shape) for part, of in zip(places.split([of.numel() for of in initial]), initial, strict=True)]
    wire = _Wire(config, [torch.full_like(part, -1) if i in averaged else part for i, part in enumerate(blocks)])
    underway: list[_Exchange] = []
    restarted = [-1] * config.groups  # Iteration at whose end a group was restarted last.

    def land(exchange: _Exchange, t: int) -> None:
        """Outer step of one fragment, in each subgroup."""
        for met in _meetings(config, exchange.begun):
            good = [group for group in met if all(bool(tensor.isfinite().all()) for tensor in exchange.sent[group])]
            moved = {group: [a - sent for a, sent in zip(anchors[group], exchange.sent[group], strict=True)] for group in good}
            if config.has_common_anchor:
                # All groups see the same mean, as if each had sent it.
                mean = wire.mean(moved, masks[exchange.fragment])
                if config.rule_name == "muon":
                    for i, of_parameter in ((i, part) for i, part in enumerate(mean) if i not in averaged):
                        of_groups = [matrices(i, moved[group][i]) for group in good]
                        for matrix, *each in zip(matrices(i, of_parameter), *of_groups, strict=True):
                            length = torch.stack([one.norm() for one in each]).square().mean().sqrt()
                            direction = _orthogonal(matrix)
                            matrix.copy_(length / direction.norm().clamp(min=1e-30) * direction)
                moved = dict.fromkeys(good, mean)
            for i, mask in enumerate(masks[exchange.fragment]):
                own = {group: moved[group][i] for group in good}
                step = _mean_of_parameters if i in averaged else _nesterov if config.has_common_anchor else _noloco
                stepped = step(config, exchange.begun, {group: (anchors[group][i], momenta[group][i]) for group in met}, own)
                for group, (new_anchor, new_momentum) in stepped.items():
                    # The new slow weights, plus the progress of the group since then.
                    theta, since = groups[group][i], exchange.since[group][i]
                    theta.copy_(torch.where(mask, new_anchor + (theta - since), theta))
                    momenta[group][i] = torch.where(mask, new_momentum, momenta[group][i])
                    anchors[group][i] = torch.where(mask, new_anchor, anchors[group][i])
            # An excluded group is restarted as a whole, once for all exchanges that excluded it.
            for group in (group for group in met if group not in good and restarted[group] <= exchange.begun):
                for parameter, anchor in zip(groups[group], anchors[group], strict=True):
                    parameter.copy_(anchor)
                # In the first group that is good; with sites, of those that carry the same part of what their sites send.
                alike = [other for other in good if config.sites is None or (other - group) % config.groups_in_site == 0]
                _hand_over(optimizers[alike[0]] if alike else None, optimizers[group])
                restarted[group] = t
                for other in underway:
                    other.since[group] = [tensor.clone() for tensor in anchors[group]]

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
            momenta = [
                [mu * m + (a - p) for m, a, p in zip(momentum, anchor, theta, strict=True)]
                for momentum, anchor, theta in zip(momenta, anchors, groups, strict=True)
            ]
        if config.is_lazy(t) and t % config.sync_interval == 0:
            anchors = [[parameter.clone() for parameter in theta] for theta in groups]

        # Outer steps that began earlier take effect `overlap` iterations later, at the latest after the last iteration.
        is_last = t == config.train_iters
        for exchange in [exchange for exchange in underway if is_last or t - exchange.begun == config.overlap]:
            underway.remove(exchange)
            land(exchange, t)
        if config.is_site_average(t):
            for begin in range(0, config.groups, config.groups_in_site):
                site = groups[begin : begin + config.groups_in_site]
                finite = [all(bool(tensor.isfinite().all()) for tensor in theta) for theta in site]
                for of_site in zip(*site, strict=True) if any(finite) else ():
                    mean = torch.stack([parameter for parameter, counts in zip(of_site, finite, strict=True) if counts]).mean(0)
                    for parameter in of_site:
                        parameter.copy_(mean)
                for group in (begin + index for index, counts in enumerate(finite) if any(finite) and not counts):
                    _hand_over(optimizers[begin + finite.index(True)], optimizers[group])
        sent = [[parameter.clone() for parameter in theta] for theta in groups]
        due = [_Exchange(fragment, t, sent, list(sent)) for fragment in config.fragments_due(t)]
        if config.overlap and not is_last:
            underway += due
        else:
            for exchange in due:
                land(exchange, t)
        if is_last and not config.has_common_anchor:
            for i, of_groups in enumerate(zip(*anchors, strict=True)):
                mean = torch.stack(of_groups).mean(0)
                for theta, anchor in zip(groups, anchors, strict=True):
                    theta[i].copy_(mean)
                    anchor[i] = mean
        on_iteration(t, groups)
    return anchors[0]


class _Wire:
    """The mean of pseudo-gradients as it arrives in few bits, with error feedback: arXiv 1901.09847.

    Each group sends its own, and what was dropped of it before, encoded. Their sum, and what was dropped of sums before, comes
    back encoded. A group that is excluded sends nothing new. With sites the first group of each speaks for all of them.
    """

    def __init__(self, config: PierConfig, blocks: Sequence[Tensor]) -> None:
        self._config, self._sizes = config, [part.numel() for part in blocks]
        self._senders = range(0, config.groups, config.groups_in_site if config.sites else 1)
        self._blocks = torch.cat([part.flatten() for part in blocks])
        numel = len(self._blocks)
        self._dropped = {sender: torch.zeros(numel, dtype=torch.float64) for sender in (*self._senders, "sum")}

    def mean(self, moved: Mapping[int, Sequence[Tensor]], mask: Sequence[Tensor]) -> list[Tensor]:
        """Mean of what the groups that count have ``moved`` by, where the fragment's mask is set."""
        here, zero = torch.cat([part.flatten() for part in mask]), torch.zeros(len(self._blocks), dtype=torch.float64)
        own = {group: torch.cat([part.flatten() for part in parts]) for group, parts in moved.items()}
        total = torch.stack([self._through(sender, own.get(sender, zero), here) for sender in self._senders]).sum(0)
        mean = self._through("sum", total, here) / sum(sender in own for sender in self._senders)
        return [part.view(of.shape) for part, of in zip(mean.split(self._sizes), mask, strict=True)]

    def _through(self, sender: int | str, exact: Tensor, here: Tensor) -> Tensor:
        """What arrives of a vector; the rest is kept for the next one, with error feedback."""
        if self._config.codec.lossless or len(self._senders) == 1:
            return exact
        exact = torch.where(here, exact + self._dropped[sender], 0.0)
        arrives = torch.where(self._blocks < 0, exact, decoded(self._config.codec, exact, self._blocks))
        if self._config.has_error_feedback:
            self._dropped[sender] = torch.where(here, exact - arrives, self._dropped[sender])
        return arrives


def decoded(codec: Codec, vector: Tensor, blocks: Tensor) -> Tensor:
    """What arrives of a vector that a codec encodes: the largest number of each block maps to the largest integer.

    Args:
        codec: Codec with few bits.
        vector: float64 of shape ``[n]``.
        blocks: Number of the block of each element, int64.
    """
    if not codec.scaled:
        return vector.to(torch.bfloat16).double()
    half, place = 2 ** (codec.bits - 1), blocks.unique(return_inverse=True)[1]
    largest = torch.zeros(len(vector), dtype=torch.float64).scatter_reduce(0, place, vector.abs(), "amax")
    # With one and two bits the levels are the middles between integers: zero would take one that cannot be spared.
    few = codec.bits <= 2
    scale: Tensor = (largest / half).to(torch.bfloat16).double() if few else largest / (half - 1)
    units = vector / torch.where(scale == 0, 1.0, scale)[place]
    levels = units.floor().clamp(-half, half - 1) + 0.5 if few else units.round()
    return levels * scale[place]


_State = tuple[Tensor, Tensor]  # Anchor and momentum of one group.


def _nesterov(
    config: PierConfig,
    begun: int,
    states: Mapping[int, _State],
    own: Mapping[int, Tensor],
) -> dict[int, _State]:
    """Nesterov in PyTorch's form on the mean pseudo-gradient of the groups that are finite."""
    mu, eta = config.momentum_at(begun), config.learning_rate_at(begun)
    delta = torch.stack(list(own.values())).mean(0)
    stepped = {}
    for group, (anchor, momentum) in states.items():
        new_momentum = mu * momentum + delta
        stepped[group] = anchor - eta * (delta + mu * new_momentum), new_momentum
    return stepped


def _orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal matrix next to one: singular values are mapped by odd polynomials towards 1, arXiv 2502.16982."""
    x: Tensor = matrix / matrix.norm().clamp(min=1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _mean_of_parameters(
    config: PierConfig, begun: int, states: Mapping[int, _State], own: Mapping[int, Tensor]
) -> dict[int, _State]:
    """Mean over the finite groups; in pairs, any other group counts as unmoved."""
    of = own if config.has_common_anchor else {group: own.get(group, torch.zeros_like(states[group][0])) for group in states}
    mean = torch.stack([states[group][0] - moved for group, moved in of.items()]).mean(0)
    return {group: (mean, anchor - mean) for group, (anchor, _) in states.items()}


def _noloco(config: PierConfig, begun: int, states: Mapping[int, _State], own: Mapping[int, Tensor]) -> dict[int, _State]:
    """Heavy ball with a pull to the mean of the anchors that meet: arXiv 2506.10911, equation 2 with the sign of equation 32.

    Its ``delta`` is ``-eta * momentum`` here, its gamma is its beta. A group with numbers that are not finite has not moved.
    """
    alpha, eta = config.momentum_at(begun), config.learning_rate_at(begun)
    delta = torch.stack([own.get(group, torch.zeros_like(anchor)) for group, (anchor, _) in states.items()]).mean(0)
    mean_anchor = torch.stack([anchor for anchor, _ in states.values()]).mean(0)
    stepped = {}
    for group, (anchor, momentum) in states.items():
        new_momentum = alpha * momentum + delta + (anchor - mean_anchor)
        stepped[group] = anchor - eta * new_momentum, new_momentum
    return stepped


def _meetings(config: PierConfig, begun: int) -> list[tuple[int, ...]]:
    """Which groups meet in the outer steps that begin after an iteration."""
    if config.subgroup is None:
        return [tuple(range(config.groups))]
    return draw_subgroups(config.groups, config.subgroup, config.subgroup_seed, begun)


def _mean(groups: Sequence[Sequence[Tensor] | None]) -> list[Tensor] | None:
    known = [tensors for tensors in groups if tensors is not None]
    if len(known) < len(groups):
        return None
    return [torch.stack([tensor.double() for tensor in tensors]).mean(0) for tensors in zip(*known, strict=True)]


def _hand_over(source: torch.optim.Optimizer | None, target: torch.optim.Optimizer) -> None:
    """Moments of one group for another; nothing but zeros if there is none, or one of the two has not stepped yet."""
    pairs = zip((source or target).param_groups, target.param_groups, strict=True)
    for one, other in ((one, other) for of, to in pairs for one, other in zip(of["params"], to["params"], strict=True)):
        for name, moment in target.state[other].items():
            if name != "step":
                moment.copy_(source.state[one][name]) if source and source.state[one] else moment.zero_()
