"""Outer rules: what a group sends in an outer step, and what it makes of what arrives.

A rule is all that distinguishes one outer optimizer from another. Which groups take part, which pieces travel and what happens
to the progress of a group meanwhile is the business of :mod:`pier_megatron.outer.rounds`, whatever the rule.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.outer.staging import OWN, WORK, Staged
from pier_megatron.outer.state import ANCHOR, MOMENTUM, REDUCED, RESIDUAL, sum_of_bits
from pier_megatron.schedules import NEWTON_SCHULZ
from pier_megatron.values import OUTER_RULES

_TAKEN = (ANCHOR, MOMENTUM, RESIDUAL, REDUCED, *WORK)


@dataclasses.dataclass(frozen=True)
class OuterRule:
    """One outer step along the mean pseudo-gradient of all groups, chunk by chunk.

    A rule of your own is a subclass with :meth:`step`, named by ``--pier-outer-rule package.module:Class``. The other methods
    are for rules that send something else.

    Attributes:
        mu: Outer momentum coefficient of this step.
        eta: Outer learning rate of this step; 0 in the momentum warmup, after which the anchor moves to the parameters.
        memory: Names of the flat FP32 buffers that the rule keeps, zero at first: the momentum, and at most one more. They are
            saved, restored, reset, offloaded and handed to an island that joins, as the anchor is.
        has_common_anchor: Whether all groups hold the same anchor afterwards.
        sent_of: Names of what :meth:`send` reads.
        takes_matrices: Whether it works on whole matrices, which chunks then do not cut.
    """

    mu: float
    eta: float
    memory: ClassVar[tuple[str, ...]] = (MOMENTUM,)
    has_common_anchor: ClassVar[bool] = True
    sent_of: ClassVar[tuple[str, ...]] = (OWN,)
    takes_matrices: ClassVar[bool] = False

    def step(self, anchor: Tensor, delta: Tensor, *memory: Tensor) -> None:
        """Updates the anchor and the memory in place, element by element.

        Args:
            anchor: Parameters that all groups agreed on last; float32, shape ``[numel]``, a piece of the flat parameters.
            delta: Mean over the groups of ``anchor - parameters``, the same piece; may be overwritten.
            memory: The buffers of :attr:`memory`, the same piece.
        """
        raise NotImplementedError

    def send(self, staged: Staged) -> None:
        """Writes what this group sends to ``staged.shared``: here, its pseudo-gradient.

        Args:
            staged: Buffers, with this group's pseudo-gradient in ``staged.own``; zero if the group is excluded.
        """
        staged.shared.copy_(staged.own)

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Turns the sum in ``staged.shared`` into the direction that this group descends along: here, the mean.

        Args:
            staged: Buffers, with the sum over the participants of what they sent in ``staged.shared``.
            size: Number of participants.
            counted: Number of participants that are not excluded.
        """
        staged.shared.div_(counted)

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Updates anchor and memory.

        Args:
            staged: Buffers, with what :meth:`combine` has left in ``staged.shared``.
            is_alone: Whether that is what this group sent, and the parameters have not moved since.
        """
        self.step(staged.anchor, staged.shared, *(staged.tensors[name] for name in self.memory))


class Nesterov(OuterRule):
    """Nesterov momentum in PyTorch's form on the mean pseudo-gradient; arXiv 2311.08105, section 2.

    ``momentum = mu * momentum + delta``, ``anchor = anchor - eta * (delta + mu * momentum)`` with
    ``delta = mean(anchor - parameters)``.
    """

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step; see :meth:`OuterRule.update`."""
        delta, anchor, momentum = staged.shared, staged.anchor, staged.momentum
        torch.add(delta, momentum, alpha=self.mu, out=momentum)
        if self.eta == 0:  # In the momentum warmup two passes over the anchor would add zeros.
            return
        if is_alone:
            # A single group knows the mean of the parameters exactly. anchor - (anchor - parameters) loses its last bits,
            # and eta = 1, mu = 0 must be the identity.
            staged.chunk.copy_parameters_to(anchor)
            anchor.add_(delta, alpha=1 - self.eta)
        else:
            anchor.add_(delta, alpha=-self.eta)
        anchor.add_(momentum, alpha=-self.eta * self.mu)


class Muon(Nesterov):
    """Nesterov momentum on mean pseudo-gradients whose matrices are made orthogonal: docs/study.md.

    Where a parameter is a matrix, ``delta`` becomes ``own o / |o|`` with ``o`` the orthogonal matrix next to it, by five
    Newton-Schulz iterations, ``own`` the root mean square over the groups of their ``|anchor - parameters|``, and Frobenius
    norms. So the outer step is as long as AdamW's own, and not shorter where gradients are mostly noise. A tensor-parallel rank
    takes its part of a matrix for one, as Megatron's Muon can. The momentum warmup, whose pseudo-gradients are those of
    synchronous steps, takes them as they are.
    """

    takes_matrices: ClassVar[bool] = True

    def update(self, staged: Staged, is_alone: bool) -> None:
        """Takes the step; see :meth:`OuterRule.update`."""
        for matrix, length in zip(staged.chunk.matrices(staged.shared), staged.lengths, strict=True) if self.eta else ():
            matrix.copy_(orthogonalised(matrix).mul_(length))
        super().update(staged, is_alone=False)


def orthogonalised(matrix: Tensor) -> Tensor:
    """The orthogonal matrix next to one, of length 1 in the Frobenius norm, or zero next to zero; float32, of its shape.

    In full precision, whatever the training script has set: all groups must compute the same bits.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = (matrix.mT if is_tall else matrix) / matrix.norm().clamp(min=1e-7)
    with _full_precision(), torch.autocast(matrix.device.type, enabled=False):
        for a, b, c in NEWTON_SCHULZ:
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if is_tall else x
    return x.div_(x.norm().clamp(min=torch.finfo(torch.float32).tiny))


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Products of float32 matrices without TF32 and BF16.

    Each library has a setting of its own: that for all of them cannot be read once a script has changed one.
    """
    if not hasattr(torch.backends.mkldnn, "matmul"):  # PyTorch 2.8.
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    libraries = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    set_before = [library.fp32_precision for library in libraries]
    try:
        for library in libraries:
            library.fp32_precision = "ieee"
        yield
    finally:
        for library, precision in zip(libraries, set_before, strict=True):
            library.fp32_precision = precision


def bits_of_products(device: torch.device, shape: Sequence[int] = (192, 128)) -> Tensor:
    """Returns the sum of the bits of one orthogonal matrix: other processors, libraries and releases round otherwise."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(1), device="cpu")
    return sum_of_bits(orthogonalised(drawn.to(device)).flatten())


class NoLoCo(OuterRule):
    """Heavy-ball momentum among a few participants; arXiv 2506.10911, equations 2 and 3 with the sign of its equation 32.

    ``momentum = mu * momentum + anchor - mean(parameters)``, ``anchor = anchor - eta * momentum``: the paper's alpha is ``mu``,
    its beta and gamma are ``eta``, so that pseudo-gradients and anchors need not cross apart, and its ``delta`` is
    ``-eta * momentum``. An excluded group is taken for one that has not moved.
    """

    has_common_anchor: ClassVar[bool] = False
    sent_of: ClassVar[tuple[str, ...]] = (OWN, ANCHOR)

    def send(self, staged: Staged) -> None:
        """Sends the parameters."""
        torch.sub(staged.anchor, staged.own, out=staged.shared)

    def combine(self, staged: Staged, size: int, counted: int) -> None:
        """Takes the distance to the mean of the parameters."""
        torch.sub(staged.anchor, staged.shared, alpha=1 / size, out=staged.shared)

    def step(self, anchor: Tensor, delta: Tensor, *memory: Tensor) -> None:
        """Takes the step."""
        [momentum] = memory
        torch.add(delta, momentum, alpha=self.mu, out=momentum)
        anchor.add_(momentum, alpha=-self.eta)


RULES: dict[str, type[OuterRule]] = dict(zip(OUTER_RULES, (Nesterov, Muon), strict=True))
"""Rules of ``--pier-outer-rule`` by name."""


def rule_at(config: PierConfig, iteration: int) -> OuterRule:
    """Returns the rule of outer steps that begin after an iteration, or of a momentum warmup then.

    Raises:
        PierConfigError: If ``--pier-outer-rule`` names none.
    """
    mu, eta = config.momentum_at(iteration), config.learning_rate_at(iteration)
    if config.has_common_anchor or config.is_lazy(iteration):
        return rule_class(config)(mu, eta)
    return NoLoCo(mu, eta)


def rule_class(config: PierConfig) -> type[OuterRule]:
    """Returns the class of the rule by which all groups take outer steps; see :func:`rule_at`."""
    if not config.has_common_anchor:
        return Nesterov  # All groups together have only momentum warmups.
    return RULES.get(config.rule_name) or _imported(config.rule_name)


def common_names(config: PierConfig) -> tuple[str, ...]:
    """Returns the names of the flat buffers that all groups agree on: the anchor, then the memory of the rule."""
    return ANCHOR, *rule_class(config).memory


@functools.cache
def _imported(name: str) -> type[OuterRule]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PierConfigError(
            f"--pier-outer-rule {name}: {error}. Name a class as package.module:Class, in a module that every rank finds: "
            "in the training script's folder, or on PYTHONPATH."
        ) from error
    except Exception as error:
        raise PierConfigError(
            f"--pier-outer-rule {name}: the import of {module} ends with {type(error).__name__}: {error}. Mend the module."
        ) from error
    if not (isinstance(found, type) and issubclass(found, OuterRule) and found.has_common_anchor):
        raise PierConfigError(
            f"--pier-outer-rule {name}: not a subclass of pier_megatron.outer.OuterRule by which all groups agree. Derive it "
            "from OuterRule, with a method step()."
        )
    if found.step is OuterRule.step and found.update is OuterRule.update:
        raise PierConfigError(f"--pier-outer-rule {name}: it has no method step(), which takes the outer step. Write one.")
    if (
        found.memory[:1] != (MOMENTUM,)
        or len(found.memory) > 2
        or any(name in _TAKEN or not name.isalpha() for name in found.memory[1:])
    ):
        raise PierConfigError(
            f"--pier-outer-rule {name}: its memory is {found.memory}, must be ('{MOMENTUM}',) or ('{MOMENTUM}', NAME), because "
            f"checkpoints have room for two, with a NAME of letters other than {', '.join(_TAKEN)}."
        )
    return found


def averaging(rule: OuterRule) -> OuterRule:
    """Returns the rule that takes the mean of the participants' parameters, for outer steps of ``rule``."""
    return Nesterov(0.0, 1.0) if rule.has_common_anchor else NoLoCo(0.0, 1.0)
