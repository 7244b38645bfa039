"""The two updates of the outer optimizer, on the flat buffers of one rank."""

from torch import Tensor

from pier_megatron.outer.exchange import GroupExchange
from pier_megatron.outer.state import OuterState


def momentum_warmup(state: OuterState, mu: float) -> None:
    """Builds up the outer momentum while the groups are still identical, hence without communication.

    Computes ``momentum = mu * momentum + (anchor - parameters)``, then ``anchor = parameters``; arXiv 2511.17849,
    algorithm 1.

    Args:
        state: Changed in place.
        mu: Outer momentum coefficient.
    """
    state.momentum.mul_(mu).add_(state.pseudo_gradient())
    state.copy_parameters_to(state.anchor)


def nesterov_step(
    state: OuterState, exchange: GroupExchange, mu: float, eta: float, contributors: int, contributes: bool = True
) -> tuple[Tensor, Tensor]:
    """Moves all groups to one common point: Nesterov in PyTorch's form on the mean pseudo-gradient.

    Computes ``delta = mean(anchor - parameters)`` over the contributing groups, ``momentum = mu * momentum + delta``,
    ``anchor = anchor - eta * (delta + mu * momentum)``, and ``parameters = anchor``; arXiv 2311.08105, section 2.

    Args:
        state: Changed in place.
        exchange: Collectives between the groups.
        mu: Outer momentum coefficient.
        eta: Outer learning rate.
        contributors: Number of groups whose pseudo-gradient counts; the same on every rank.
        contributes: Whether this group's does. A group that does not is moved to the common point all the same.

    Returns:
        This group's pseudo-gradient and the mean one; float32, shape ``[numel]``.
    """
    own = state.pseudo_gradient()
    if not contributes:
        own.zero_()  # Not own * 0: that keeps every nan.
    mean = own.clone()
    exchange.sum_(mean).div_(contributors)
    state.momentum.mul_(mu).add_(mean)

    # anchor - eta * (mean + mu * momentum), written from the mean of the parameters. A single group knows that mean
    # exactly; (anchor - (anchor - parameters)) would lose its last bits, and eta = 1, mu = 0 must be the identity.
    if exchange.size == 1 and contributes:
        state.copy_parameters_to(state.anchor)
    else:
        state.anchor.sub_(mean)
    state.anchor.add_(mean, alpha=1 - eta).add_(state.momentum, alpha=-eta * mu)
    state.set_parameters_to_anchor()
    return own, mean
