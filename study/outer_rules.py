"""What an outer step may do with the mean pseudo-gradient: the plugin's Nesterov step, and what was tried in its place.

Each works on the participants' flat tensors, float32 of shape ``[sites, numel]``.
"""

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from small_gpt import MATRIX
from torch import Tensor

_EPSILON = 1e-12


class Nesterov:
    """Momentum and step of the paper, Algorithms 1 and 2."""

    def __init__(self, shapes: Mapping[str, torch.Size], rate: float) -> None:
        """Begins without momentum.

        Args:
            shapes: Shapes of one participant's tensors by name, in the order in which they are flattened.
            rate: A number of the rule's own: what it is, the rule says. This one has none.
        """
        self.momentum = torch.zeros(())
        self._shapes, self._rate = shapes, rate

    def seen(self, rows: Tensor, delta: Tensor) -> Tensor:
        """What becomes of the mean pseudo-gradient, given the group's own, of shape ``[sites, groups, numel]``."""
        return delta

    def step(self, anchor: Tensor, delta: Tensor, mu: float, eta: float) -> Tensor:
        """Returns the next anchor."""
        self.momentum = mu * self.momentum + delta
        return anchor - eta * self._direction(anchor, delta + mu * self.momentum)

    def _direction(self, anchor: Tensor, nesterov: Tensor) -> Tensor:
        return nesterov

    def _by_tensor(self, function: Callable[..., Tensor], *flat: Tensor) -> Tensor:
        """Applies a function to each tensor of each participant, as ``[sites, *shape]``."""
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts = zip(*(value.split(sizes, -1) for value in flat), strict=True)
        changed = [
            function(*(value.view(*value.shape[:-1], *shape) for value in values))
            for shape, values in zip(self._shapes.values(), parts, strict=True)
        ]
        return torch.cat([value.flatten(1) for value in changed], 1)


class Muon(Nesterov):
    """Matrices step in the orthogonalised direction, as far as the Nesterov step times ``rate``."""

    with_embeddings = True

    def _direction(self, anchor: Tensor, nesterov: Tensor) -> Tensor:
        return self._orthogonalised(nesterov)

    def _orthogonalised(self, flat: Tensor) -> Tensor:
        names = iter(self._shapes)
        return self._by_tensor(lambda tensor: self._orthogonal(next(names), tensor), flat)

    def _orthogonal(self, name: str, matrix: Tensor) -> Tensor:
        if not name.endswith(MATRIX) and (matrix.dim() < 3 or not self.with_embeddings):
            return matrix
        direction = newton_schulz(matrix, 5)
        return direction * (self._rate * _norm(matrix) / (_norm(direction) + _EPSILON))


class MuonOfDelta(Muon):
    """Matrices of each pseudo-gradient become orthogonal, before the momentum."""

    def seen(self, rows: Tensor, delta: Tensor) -> Tensor:
        """See :meth:`Nesterov.seen`."""
        return self._orthogonalised(delta)

    def _direction(self, anchor: Tensor, nesterov: Tensor) -> Tensor:
        return nesterov


class MuonInside(Muon):
    """Like :class:`Muon`, except embeddings, which step as they did."""

    with_embeddings = False


class MuonOfDeltaInside(MuonOfDelta):
    """Like :class:`MuonOfDelta`, except embeddings."""

    with_embeddings = False


class MuonAsLongAsOwn(MuonOfDeltaInside):
    """The same, each as long as ``rate`` times what groups themselves have moved, in the mean square."""

    def seen(self, rows: Tensor, delta: Tensor) -> Tensor:
        """See :meth:`Nesterov.seen`."""
        names = iter(self._shapes)

        def one(rows: Tensor, delta: Tensor) -> Tensor:
            direction = self._orthogonal(next(names), delta)
            if direction is delta:
                return delta
            own = _squares(rows).mean(1).sqrt().view(-1, *[1] * (delta.dim() - 1))
            return direction * (own / (_norm(delta) + _EPSILON))

        return self._by_tensor(one, rows, delta)


class Adam(Nesterov):
    """Adam on pseudo-gradients (FedAdam, arXiv 2003.00295): ``mu`` is its first decay, 0.95 the second.

    Each tensor's step is as long as the Nesterov step times ``rate``, so that only its direction is another.
    """

    _DECAY = 0.95

    def __init__(self, shapes: Mapping[str, torch.Size], rate: float) -> None:
        super().__init__(shapes, rate)
        self._second, self._steps = torch.zeros(()), 0

    def step(self, anchor: Tensor, delta: Tensor, mu: float, eta: float) -> Tensor:
        """See :meth:`Nesterov.step`."""
        self._steps += 1
        self._second = self._DECAY * self._second + (1 - self._DECAY) * delta.square()
        self.momentum = mu * self.momentum + delta
        nesterov = delta + mu * self.momentum
        direction = nesterov / ((self._second / (1 - self._DECAY**self._steps)).sqrt() + 1e-6)

        def scaled(direction: Tensor, nesterov: Tensor) -> Tensor:
            return direction * (self._rate * _norm(nesterov) / (_norm(direction) + _EPSILON))

        return anchor - eta * self._by_tensor(scaled, direction, nesterov)


class Trust(Nesterov):
    """Each tensor's step is as long as ``rate`` times the tensor (LAMB, arXiv 1904.00962), but at most thrice as it was."""

    def _direction(self, anchor: Tensor, nesterov: Tensor) -> Tensor:
        def scaled(weight: Tensor, step: Tensor) -> Tensor:
            return step * (self._rate * _norm(weight) / (_norm(step) + _EPSILON)).clamp(max=3.0)

        return self._by_tensor(scaled, anchor, nesterov)


class ScheduleFree(Nesterov):
    """Schedule-free averaging (arXiv 2405.15682) of a plain step times ``rate``; groups go on between both sequences."""

    def __init__(self, shapes: Mapping[str, torch.Size], rate: float) -> None:
        super().__init__(shapes, rate)
        self._fast: Tensor | None = None
        self._mean, self._steps = torch.zeros(()), 0

    def step(self, anchor: Tensor, delta: Tensor, mu: float, eta: float) -> Tensor:
        """See :meth:`Nesterov.step`."""
        if self._fast is None:
            self._fast, self._mean = anchor, anchor
        self._steps += 1
        self._fast = self._fast - self._rate * delta
        self._mean = torch.lerp(self._mean, self._fast, 1 / (self._steps + 1))
        return torch.lerp(self._fast, self._mean, 0.9)


class Agreement(Nesterov):
    """Each tensor's pseudo-gradient times how much groups agree, over how much they did on the way; ``rate`` is the power.

    Groups that move at random have a mean square, too; what exceeds it is what they agree on.
    """

    _DECAY = 0.9

    def __init__(self, shapes: Mapping[str, torch.Size], rate: float) -> None:
        super().__init__(shapes, rate)
        self._usual: list[Tensor] = []

    def seen(self, rows: Tensor, delta: Tensor) -> Tensor:
        """See :meth:`Nesterov.seen`."""
        number = itertools.count()

        def scaled(rows: Tensor, delta: Tensor) -> Tensor:
            place = next(number)
            share = _signal(_squares(rows).mean(1), _squares(delta.unsqueeze(1)).squeeze(1), rows.shape[1]).clamp(min=0.01)
            if place == len(self._usual):
                self._usual.append(share)
            self._usual[place] = torch.lerp(share, self._usual[place], self._DECAY)
            factor = (share / self._usual[place]) ** self._rate
            return delta * factor.view(-1, *[1] * (delta.dim() - 1))

        return self._by_tensor(scaled, rows, delta)


class ElementAgreement(Nesterov):
    """Each number of the pseudo-gradient times its signal over signal and noise, plus ``rate`` of the rest.

    The spread among groups tells the noise, and takes a second sum.
    """

    def seen(self, rows: Tensor, delta: Tensor) -> Tensor:
        """See :meth:`Nesterov.seen`."""
        share = _signal(rows.square().mean(1), delta.square(), rows.shape[1]).clamp(0, 1)
        return delta * (self._rate + (1 - self._rate) * share)


class SignAgreement(Nesterov):
    """Where fewer groups than all go one way, the pseudo-gradient times ``rate``, from unanimity down to a tie."""

    def seen(self, rows: Tensor, delta: Tensor) -> Tensor:
        """See :meth:`Nesterov.seen`."""
        agreement = rows.sign().mean(1).abs()
        return delta * (self._rate + (1 - self._rate) * agreement)


class Restored(Nesterov):
    """Each number of the pseudo-gradient times the size that groups' own have, over that of their mean, to the power ``rate``.

    Where noise prevails the mean over groups is small, and where they agree it is not: AdamW on the mean gradient would step
    alike. Both sizes are moving averages; the whole step is as long as before.
    """

    _DECAY = 0.9

    def __init__(self, shapes: Mapping[str, torch.Size], rate: float) -> None:
        super().__init__(shapes, rate)
        self._own, self._of_mean, self._steps = torch.zeros(()), torch.zeros(()), 0

    def seen(self, rows: Tensor, delta: Tensor) -> Tensor:
        """See :meth:`Nesterov.seen`."""
        self._own = torch.lerp(self._sizes(rows.square().mean(1)), self._own.expand_as(delta), self._DECAY)
        self._of_mean = torch.lerp(self._sizes(delta.square()), self._of_mean.expand_as(delta), self._DECAY)
        restored = delta * ((self._own + _EPSILON) / (self._of_mean + _EPSILON)) ** (self._rate / 2)
        return restored * (_norm(delta) / (_norm(restored) + _EPSILON))

    def _sizes(self, squares: Tensor) -> Tensor:
        return squares


class RestoredTensor(Restored):
    """The same for whole tensors, whose sizes cost nothing to send."""

    def _sizes(self, squares: Tensor) -> Tensor:
        return self._by_tensor(
            lambda square: square.flatten(1).mean(1).view(-1, *[1] * (square.dim() - 1)).expand_as(square), squares
        )


def _signal(square: Tensor, square_of_mean: Tensor, groups: int) -> Tensor:
    """The share of the square of a mean over groups that their independent noise does not explain."""
    noise = (square - square_of_mean) / max(groups - 1, 1)
    return (square_of_mean - noise) / (square_of_mean + _EPSILON)


def _norm(tensor: Tensor) -> Tensor:
    """Norms of each participant's tensor, of a shape that multiplies it."""
    return tensor.flatten(1).norm(dim=1).view(-1, *[1] * (tensor.dim() - 1))


def _squares(rows: Tensor) -> Tensor:
    return rows.flatten(2).square().sum(2)


RULES: dict[str, type[Nesterov]] = {
    "nesterov": Nesterov,
    "muon": Muon,
    "muon of each": MuonOfDelta,
    "muon inside": MuonInside,
    "muon of each inside": MuonOfDeltaInside,
    "muon as long as own": MuonAsLongAsOwn,
    "adam": Adam,
    "trust": Trust,
    "schedule-free": ScheduleFree,
    "agreement": Agreement,
    "element agreement": ElementAgreement,
    "sign agreement": SignAgreement,
    "restored": Restored,
    "restored tensor": RestoredTensor,
}
"""Rules by name."""
