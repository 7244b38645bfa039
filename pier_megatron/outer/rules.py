"""Outer rules: what a group sends when groups meet, and what it does with what arrives.

A rule is all that distinguishes one outer optimizer from another. When groups meet, which pieces travel, who is left out and
what happens to the progress of a group meanwhile is the business of :mod:`pier_megatron.outer.rounds`, whatever the rule.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor, nn

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.outer.staging import OWN, Staged
from pier_megatron.outer.state import ANCHOR, OuterState

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
"""Builds an optimizer over parameters, as the class of an optimizer does, or a ``functools.partial`` of it."""


class OuterRule(Protocol):
    """One outer step's update, chunk by chunk.

    Attributes:
        has_common_anchor: Whether all groups hold the same anchor afterwards.
        sent_of: Names of what :meth:`send` reads.
        sends_slow_weights: Whether :meth:`send` also writes ``staged.slow``, whose exact sum :meth:`combine` finds there.
    """

    has_common_anchor: ClassVar[bool]
    sent_of: ClassVar[tuple[str, ...]]

    @property
    def sends_slow_weights(self) -> bool: ...  # noqa: D102

    def send(self, staged: Staged) -> None:
        """Writes what this group sends to ``staged.shared``.

        Args:
            staged: Buffers, with this group's pseudo-gradient in ``staged.own``; zero if the group is excluded.
        """

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Turns the sum in ``staged.shared`` into the direction that this group descends along.

        Args:
            staged: Buffers, with the sum over the participants of what they sent in ``staged.shared``.
            size: Number of participants.
            counted: Number of participants that are not excluded.
        """

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Updates ``staged.anchor`` and ``staged.momentum``.

        Args:
            staged: Buffers, with what :meth:`combine` has left in ``staged.shared``.
            is_alone: Whether that is what this group sent, and the parameters have not moved since.
        """


class _OfMean:
    """What rules have in common that descend along the mean pseudo-gradient of all groups."""

    has_common_anchor: ClassVar[bool] = True
    sent_of: ClassVar[tuple[str, ...]] = (OWN,)
    sends_slow_weights: ClassVar[bool] = False

    def send(self, staged: Staged) -> None:
        """Sends the pseudo-gradient."""
        staged.shared.copy_(staged.own)

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Takes the mean over the groups that count."""
        staged.shared.div_(counted)


@dataclasses.dataclass(frozen=True)
class Nesterov(_OfMean):
    """Nesterov momentum in PyTorch's form on the mean pseudo-gradient; arXiv 2311.08105, section 2.

    ``momentum = mu * momentum + delta``, ``anchor = anchor - eta * (delta + mu * momentum)`` with
    ``delta = mean(anchor - parameters)``.

    Attributes:
        mu: Outer momentum coefficient.
        eta: Outer learning rate.
    """

    mu: float
    eta: float

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step; see :meth:`OuterRule.update`."""
        delta, anchor, momentum = staged.shared, staged.anchor, staged.momentum
        torch.add(delta, momentum, alpha=self.mu, out=momentum)
        if self.eta == 0:  # As in the momentum warmup: two passes over the anchor would add zeros.
            return
        if is_alone:
            # A single group knows the mean of the parameters exactly. anchor - (anchor - parameters) loses its last bits,
            # and eta = 1, mu = 0 must be the identity.
            staged.chunk.copy_parameters_to(anchor)
            anchor.add_(delta, alpha=1 - self.eta)
        else:
            anchor.add_(delta, alpha=-self.eta)
        anchor.add_(momentum, alpha=-self.eta * self.mu)


class OptimizerRule(_OfMean):
    """Any optimizer of PyTorch on the mean pseudo-gradient: one for each chunk, whose flat parameter is the anchor.

    It keeps its own state, and the outer momentum stays zero.
    """

    def __init__(self, factory: OptimizerFactory, states: Sequence[OuterState]) -> None:
        """Lays optimizers over the anchors of the outer states.

        Raises:
            TypeError: If ``factory`` is an optimizer.
        """
        if isinstance(factory, torch.optim.Optimizer):
            raise TypeError(
                f"outer_optimizer is a {type(factory).__name__}, but has to build one for each flat piece of the parameters: "
                "pass functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), for example."
            )
        self._factory, self._states = factory, states
        self.restart()

    def restart(self) -> None:
        """Begins again without state."""
        anchors = {chunk: nn.Parameter(chunk.of(state.anchor)) for state in self._states for chunk in state.chunks}
        self._optimizers = {chunk: self._factory([anchor]) for chunk, anchor in anchors.items()}

    @property
    def name(self) -> str | None:
        """Name of the optimizer's class; None on a rank without parameters."""
        kinds = (type(optimizer) for optimizer in self._optimizers.values())
        return next((f"{kind.__module__}.{kind.__qualname__}" for kind in kinds), None)

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step of the chunk's optimizer."""
        optimizer = self._optimizers[staged.chunk]
        [anchor] = optimizer.param_groups[0]["params"]
        anchor.grad = staged.shared
        optimizer.step()
        anchor.grad = None

    def state_dicts(self) -> "list[tuple[int, StateDict]]":
        """Returns the optimizers' own state dicts, each with the start of its chunk."""
        return [(chunk.start, optimizer.state_dict()) for chunk, optimizer in self._optimizers.items()]

    def load_state_dicts(self, saved: "Sequence[tuple[int, StateDict]]") -> None:
        """Takes over copies of what :meth:`state_dicts` has returned for chunks that are cut alike."""
        for optimizer, (_, state_dict) in zip(self._optimizers.values(), saved, strict=True):
            # An optimizer keeps the tensors that it loads, and its next step would change those of a snapshot.
            optimizer.load_state_dict(copy.deepcopy(dict(state_dict)))


def check_outer_optimizer(config: PierConfig, is_elastic: bool) -> None:
    """Refuses settings with which an optimizer cannot take the place of the built-in rules.

    Raises:
        PierConfigError: If there is one.
    """
    own = "it has its own. Give it to the factory, and drop this"
    problems = (
        (config.outer_lr is not None, f"--pier-outer-lr {config.outer_lr}", own),
        (config.outer_momentum is not None, f"--pier-outer-momentum {config.outer_momentum}", own),
        (config.offload, "--pier-offload", "its state stays where the parameters are, and needs the anchor there. Drop this"),
        (
            config.subgroup is not None,
            f"{config.subgroup} groups that meet (--pier-preset noloco or --pier-subgroup-size)",
            "groups then keep anchors of their own, which only NoLoCo's rule pulls together. Let all groups meet",
        ),
        (config.sites is not None, f"--pier-sites {config.sites}", "the two have not been tried together. Drop one"),
        (is_elastic, "--pier-lighthouse", "an island that joins would lack its state. Use groups of one launch"),
    )
    for is_given, setting, reason in problems:
        if is_given:
            raise PierConfigError(f"{setting} cannot be used with an outer_optimizer: {reason}.")


@dataclasses.dataclass(frozen=True)
class NoLoCo:
    """Heavy-ball momentum among a few participants; arXiv 2506.10911, equations 2 and 3 with the sign of its equation 32.

    ``momentum = alpha * momentum + anchor - mean(parameters)``, ``anchor = anchor - beta * momentum``: the paper's ``delta``
    is ``-beta * momentum``, and its gamma is beta, so that pseudo-gradients and anchors need not cross apart. A group that does
    not count is taken for one that has not moved.

    Attributes:
        alpha: Outer momentum coefficient.
        beta: Outer learning rate.
    """

    alpha: float
    beta: float
    has_common_anchor: ClassVar[bool] = False
    sent_of: ClassVar[tuple[str, ...]] = (OWN, ANCHOR)

    @property
    def sends_slow_weights(self) -> bool:
        """See :attr:`OuterRule.sends_slow_weights`."""
        return False

    def send(self, staged: Staged) -> None:
        """Sends the parameters."""
        torch.sub(staged.anchor, staged.own, out=staged.shared)

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Takes the distance to the mean of the parameters."""
        torch.sub(staged.anchor, staged.shared, alpha=1 / size, out=staged.shared)

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step."""
        torch.add(staged.shared, staged.momentum, alpha=self.alpha, out=staged.momentum)
        staged.anchor.add_(staged.momentum, alpha=-self.beta)


@dataclasses.dataclass(frozen=True)
class NoLoCoOfDifferences(NoLoCo):
    """The same with any gamma, or in few bits, which only differences survive: pseudo-gradients and slow weights cross.

    ``momentum = alpha * momentum + pull * (anchor - mean(anchor)) + mean(anchor - parameters)``.

    Attributes:
        pull: Strength of the pull to the mean of the slow weights, gamma / beta; without one they do not cross.
    """

    pull: float

    @property
    def sends_slow_weights(self) -> bool:
        """See :attr:`OuterRule.sends_slow_weights`."""
        return self.pull > 0

    def send(self, staged: Staged) -> None:
        """Sends the pseudo-gradient, and the slow weights beside it."""
        staged.shared.copy_(staged.own)
        if self.sends_slow_weights:
            staged.slow.copy_(staged.anchor)

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Takes the mean over the groups that met, and the distance to the mean of their slow weights."""
        staged.shared.div_(size)
        if self.sends_slow_weights:
            torch.sub(staged.anchor, staged.slow, alpha=1 / size, out=staged.slow)

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step."""
        if self.sends_slow_weights:
            staged.momentum.mul_(self.alpha).add_(staged.slow, alpha=self.pull).add_(staged.shared)
        else:
            torch.add(staged.shared, staged.momentum, alpha=self.alpha, out=staged.momentum)
        staged.anchor.add_(staged.momentum, alpha=-self.beta)


def averaging(rule: OuterRule) -> OuterRule:
    """Returns the rule that takes the mean of the participants' parameters, for outer steps of ``rule``."""
    return Nesterov(0.0, 1.0) if rule.has_common_anchor else NoLoCo(0.0, 1.0)
