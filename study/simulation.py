"""Pier in one process: all groups of a run side by side, many times faster than a process each.

For surveys that would take days through the plugin: it computes what ``reference.py`` does, in FP32, on a GPT of its own. What
it finds is checked against rows that were trained through the plugin: docs/study.md.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from codings import CODINGS
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from outer_rules import RULES
from rows import ADAM, BATCH, ITERATIONS, MUON, SYNCHRONOUS
from small_gpt import MATRIX, SEQUENCE, VECTORS, Parameters, Text, initial, losses
from torch import Tensor

from pier_megatron import PierConfig

_WARMUP, _LOWEST_RATE = 0.1, 0.1
BETA1, BETA2, WEIGHT_DECAY, CLIP = 0.9, 0.99, 0.1, 1.0
MUON_MOMENTUM, MUON_STEPS = 0.95, 5

_EVALUATION_INTERVAL = 20

# Numbers of last anchors whose mean is evaluated too.
_AVERAGED = (2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: :data:`rows.SYNCHRONOUS`, or a preset of the outer schedule.
        seed: Seed of weights and data.
        groups: Number of groups.
        interval: Iterations between outer steps.
        lazy_start: Share of the run that is synchronous.
        iterations: Length of the run.
        batch: Sequences in a batch of all groups together.
        layers: Number of layers.
        width: Hidden size.
        inner: What trains inside a group, or synchronously.
        learning_rate: Learning rate of AdamW.
        muon_rate: Learning rate of Muon.
        muon_positions: Whether Muon trains position embeddings, as in Megatron, or AdamW does.
        tail: Share of the run at its end that is synchronous again, from the mean of all groups and of their moments.
        dtype: What a pseudo-gradient is sent as, with error feedback: a name in :data:`codings.CODINGS`, or fp32.
        sum_dtype: What the sum comes back as, with error feedback too.
        overlap: Iterations after which the result of an exchange is applied, at most ``interval``.
        own_share: Share of its own pseudo-gradient that a group keeps while its exchange is under way.
        predicted_share: Share of the last mean pseudo-gradients' mean that it adds meanwhile, as what is to be expected.
        prediction_decay: Decay of that mean in an outer step; 0 for the last pseudo-gradient alone.
        outer_momentum: Outer momentum, which overrides the preset's.
        outer_lr: Outer learning rate, which overrides the preset's.
        divides_noise: Whether groups divide the noise in AdamW's second moment by their number, to have the steps of all.
        slow_share: Share of an AdamW step that follows a slow momentum, averaged in outer steps (MT-DAO, arXiv 2510.05361).
        slow_beta: Decay of that momentum.
        sites: Sites among which the groups are divided; 1 for groups that all meet at once.
        site_interval: Iterations between outer steps of all sites, a multiple of ``interval``.
        site_method: Preset of the outer schedule between sites; ``method`` is that inside them.
        site_dtype: What a site's pseudo-gradient and the sum are sent as between sites, with error feedback.
        rule: What the outer step does: a name in :data:`outer_rules.RULES`.
        rule_rate: Number that is the rule's own.
        moments: AdamW's moments that are averaged in outer steps: "", "second", or "both"; "denoised" for both, after which the
            second has the noise of a mean over ``moments_groups`` groups.
        moments_interval: Outer steps between these averages.
        second_interval: The same for the second moment, where it has an interval of its own (DES-LOC, arXiv 2505.22549).
        moments_groups: See ``moments``.
        moments_dtype: What moments are sent as, the second as its square root.
        mixing: Share of a group's own weights where a late result is applied, and of the new anchor for the rest (torchft's
            alpha); None for the result and all progress since.
        intervals: "equal", "rising" from half to one and a half of ``interval``, "falling", or "by noise": longer where groups
            agree less on their way than before.
        fragments: Parts of the parameters that have outer steps of their own, in turn.
        by_change: Whether the next fragment is the one with the largest move since its last outer step.
    """

    method: str = SYNCHRONOUS
    seed: int = 1
    groups: int = 8
    interval: int = 20
    lazy_start: float = 0.1
    iterations: int = ITERATIONS
    batch: int = BATCH
    layers: int = 2
    width: int = 64
    inner: str = ADAM
    learning_rate: float = 8e-3
    muon_rate: float = 4e-2
    muon_positions: bool = False
    tail: float = 0.0
    dtype: str = "fp32"
    sum_dtype: str = "fp32"
    overlap: int = 0
    own_share: float = 1.0
    predicted_share: float = 0.0
    prediction_decay: float = 0.0
    outer_momentum: float | None = None
    outer_lr: float | None = None
    divides_noise: bool = False
    slow_share: float = 0.0
    slow_beta: float = 0.99
    sites: int = 1
    site_interval: int = 0
    site_method: str = SYNCHRONOUS
    site_dtype: str = "fp32"
    rule: str = "nesterov"
    rule_rate: float = 1.0
    moments: str = ""
    moments_interval: int = 1
    second_interval: int | None = None
    moments_groups: int = 1
    moments_dtype: str = "fp32"
    mixing: float | None = None
    intervals: str = "equal"
    fragments: int = 1
    by_change: bool = False

    @property
    def between_sites(self) -> "Run":
        """The outer level, on which each site is a group."""
        return dataclasses.replace(
            self,
            groups=self.sites,
            interval=self.site_interval,
            method=self.site_method,
            dtype=self.site_dtype,
            sum_dtype=self.site_dtype,
            outer_momentum=None,
            outer_lr=None,
            sites=1,
        )

    def rate_factor(self, iteration: int) -> float:
        """Factor of the inner learning rates in an iteration, counted from 1: Megatron's warmup and cosine."""
        warmup = int(_WARMUP * self.iterations)
        if iteration <= warmup:
            return iteration / warmup
        progress = (iteration - warmup) / (self.iterations - warmup)
        return _LOWEST_RATE + (1 - _LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclasses.dataclass
class Outcome:
    """What came out of a training; losses in nats per byte on all validation data.

    A brief one has the final loss, and means of the correlations over ten stretches of the local phase.

    Attributes:
        final: Loss after the last iteration.
        curve: Loss of the anchor after some outer steps and at the switch, by iteration.
        norms: Mean square norm of the groups' pseudo-gradients and of their mean, for each outer step.
        averaged: Loss of the mean of the last anchors.
        correlations: Cosine of successive mean pseudo-gradients, for each outer step from the second.
    """

    final: float = math.nan
    curve: dict[int, float] = dataclasses.field(default_factory=dict)
    norms: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    averaged: dict[int, float] = dataclasses.field(default_factory=dict)
    correlations: list[float] = dataclasses.field(default_factory=list)


class Inner:
    """AdamW, or Muon and AdamW, of all groups at once, after clipping each group's gradient to a norm of 1."""

    def __init__(self, run: Run, parameters: Parameters) -> None:
        self._run, self._steps = run, 0
        self._first, self._second = ({name: torch.zeros_like(value) for name, value in parameters.items()} for _ in range(2))
        self._slow = {name: torch.zeros_like(value) for name, value in parameters.items()} if run.slow_share else {}

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function to all moments, when groups part or join."""
        for state in (self._first, self._second, self._slow):
            state.update({name: function(tensor) for name, tensor in state.items()})

    def share(self, outer_steps: int) -> None:
        """Takes means over the groups after an outer step: of the slow momenta, and of the moments that are due."""
        self._slow = {name: _of_mean(slow).expand_as(slow).clone() for name, slow in self._slow.items()}
        run = self._run
        sends_first = run.moments in ("both", "denoised") and outer_steps % run.moments_interval == 0
        sends_second = bool(run.moments) and outer_steps % (run.second_interval or run.moments_interval) == 0
        for name, second in self._second.items():
            first = self._first[name]
            if sends_second:
                second.copy_(_of_mean(self._sent(second.flatten(1).sqrt()).square()).view_as(second[:1]))
            if sends_first:
                first.copy_(_of_mean(self._sent(first.flatten(1))).view_as(first[:1]))
            if sends_second and run.moments == "denoised":
                signal = (first / (1 - BETA1**self._steps)).square() * (1 - BETA2**self._steps)
                second.copy_(signal + (second - signal).clamp(min=0) / run.moments_groups)

    def _sent(self, rows: Tensor) -> Tensor:
        dtype = self._run.moments_dtype
        return rows if dtype == "fp32" else CODINGS[dtype].arrives(rows)

    @torch.no_grad()
    def step(self, parameters: Parameters, gradients: Parameters, factor: float) -> None:
        """Steps in place, with rates times a factor; clips the gradients of each group before."""
        run = self._run
        self._steps += 1
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()]).sum(0)
        clip = (CLIP / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for name, gradient in gradients.items():
            parameter = parameters[name]
            if not name.endswith(VECTORS):
                parameter.mul_(1 - run.learning_rate * factor * WEIGHT_DECAY)
            gradient = gradient * clip.view(-1, *[1] * (gradient.dim() - 1))
            if run.inner == MUON and (name.endswith(MATRIX) or (run.muon_positions and name == "positions")):
                self._muon(name, parameter, gradient, run.muon_rate * factor)
            else:
                self._adam(name, parameter, gradient, run.learning_rate * factor)

    def _muon(self, name: str, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        momentum = self._first[name].lerp_(gradient, 1 - MUON_MOMENTUM)
        update = newton_schulz(gradient.lerp(momentum, MUON_MOMENTUM).float(), MUON_STEPS)
        rows, columns = parameter.shape[-2:]
        parameter.sub_(update, alpha=rate * max(1.0, rows / columns) ** 0.5)

    def _adam(self, name: str, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        run = self._run
        first = self._first[name].lerp_(gradient, 1 - BETA1) / (1 - BETA1**self._steps)
        self._second[name].mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        second = self._second[name] / (1 - BETA2**self._steps)
        if run.divides_noise and len(parameter) > 1:
            square = first.square()
            second = square + (second - square).clamp(min=0) / run.groups
        if run.slow_share:
            slow = self._slow[name].lerp_(gradient, 1 - run.slow_beta) / (1 - run.slow_beta**self._steps)
            first = (1 - run.slow_share) * first + run.slow_share * slow
        parameter.addcdiv_(first, second.sqrt_().add_(1e-8), value=-rate)


def config_of(run: Run) -> PierConfig:
    """The plugin's settings of a run."""
    return PierConfig(
        train_iters=run.iterations,
        groups=run.groups,
        sync_interval=run.interval,
        preset=run.method,
        lazy_start_fraction=run.lazy_start,
        outer_momentum=run.outer_momentum,
        outer_lr=run.outer_lr,
        fragments=run.fragments,
    )


@dataclasses.dataclass
class _Flight:
    """An exchange under way.

    Attributes:
        begun: Iteration after which it began.
        piece: Number of the fragment.
        delta: Mean pseudo-gradient that will arrive.
        left: Parameters of the fragment from which the groups continued, flat.
    """

    begun: int
    piece: int
    delta: Tensor
    left: Tensor


class Outer:
    """Anchor and momentum of the participants: all groups, or those of each site; flat, as the plugin's chunks are."""

    def __init__(self, run: Run, parameters: Parameters) -> None:
        self._run, self.config = run, config_of(run)
        self._anchor = flattened(parameters).repeat(run.sites, 1)
        size = self._anchor.shape[1]
        bounds = [size * piece // run.fragments for piece in range(run.fragments + 1)]
        self._pieces = [slice(*pair) for pair in itertools.pairwise(bounds)]
        shapes = {name: value.shape[1:] for name, value in parameters.items()}
        self._rules = [RULES[run.rule](shapes, run.rule_rate) for _ in self._pieces]
        self._delta, self._expected = (torch.zeros_like(self._anchor) for _ in range(2))
        self._dropped: dict[tuple[str, int], Tensor] = {}
        self._flights: list[_Flight] = []
        self._timetable = Timetable(run, self.config)

    def follow(self, iteration: int, parameters: Parameters) -> None:
        """The momentum warmup, where one is due, and the anchor of the lazy start."""
        if self.config.is_lazy(iteration) and iteration % self._run.interval == 0:
            own = flattened(parameters).expand_as(self._anchor).clone()
            if self.config.is_momentum_warmup(iteration):
                for piece, rule in zip(self._pieces, self._rules, strict=True):
                    rule.momentum = self.config.momentum_at(iteration) * rule.momentum + (self._anchor - own)[:, piece]
            self._anchor = own

    def anchor(self, parameters: Parameters) -> Parameters:
        """Tensors with the names and shapes of the parameters of one group."""
        return _like(self._anchor[:1], parameters)

    def step(self, iteration: int, parameters: Parameters, outcome: Outcome) -> bool:
        """Does what is due after an iteration: changes the parameters; whether an outer step has been taken."""
        is_last = iteration == self.config.train_iters
        is_taken = False
        while self._flights and (iteration - self._flights[0].begun >= self._run.overlap or is_last):
            self._finish(parameters)
            is_taken = True
        for piece in self._due(iteration, parameters):
            self._begin(iteration, piece, parameters, outcome)
            if not self._run.overlap or is_last:
                self._finish(parameters)
                is_taken = True
        return is_taken

    def _due(self, iteration: int, parameters: Parameters) -> Sequence[int]:
        """Numbers of the fragments whose exchange begins."""
        due = self._timetable.due(iteration)
        if self._run.by_change and len(due) == 1:
            changes = (self._of_groups(self._anchor) - flattened(parameters)).square().mean(0)
            under_way = {flight.piece for flight in self._flights}
            free = [piece for piece in range(len(self._pieces)) if piece not in under_way]
            return [max(free, key=lambda piece: changes[self._pieces[piece]].mean().item())]
        return due

    def _begin(self, iteration: int, piece: int, parameters: Parameters, outcome: Outcome) -> None:
        run, flat, part = self._run, flattened(parameters), self._pieces[piece]
        anchor = self._of_groups(self._anchor)[:, part]
        own = anchor - flat[:, part]
        arrived = self._coded("own", piece, own, run.dtype)
        met = run.groups // run.sites
        delta = self._coded("sum", piece, arrived.view(run.sites, met, -1).sum(1), run.sum_dtype) / met
        square, of_mean = arrived.square().sum().item() / run.groups, delta.square().sum().item() / run.sites
        outcome.norms.append((square, of_mean))
        self._timetable.measured(square, of_mean)
        if self._delta[:, part].any():
            outcome.correlations.append(torch.cosine_similarity(delta, self._delta[:, part], dim=1).mean().item())
        self._delta[:, part] = delta
        delta = self._rules[piece].seen(own.view(run.sites, met, -1), delta)
        if run.own_share != 1 or run.predicted_share:
            flat[:, part] = anchor - run.own_share * own - run.predicted_share * self._of_groups(self._expected)[:, part]
            parameters.update(_like(flat, parameters))
        self._expected[:, part] = torch.lerp(delta, self._expected[:, part], run.prediction_decay)
        self._flights.append(_Flight(iteration, piece, delta, flat[:, part]))

    def _finish(self, parameters: Parameters) -> None:
        flight = self._flights.pop(0)
        mu, eta = self.config.momentum_at(flight.begun), self.config.learning_rate_at(flight.begun)
        part, flat = self._pieces[flight.piece], flattened(parameters)
        self._anchor[:, part] = self._rules[flight.piece].step(self._anchor[:, part], flight.delta, mu, eta)
        new = self._of_groups(self._anchor)[:, part]
        if self._run.mixing is None:
            flat[:, part] = new + (flat[:, part] - flight.left)
        else:
            flat[:, part] = torch.lerp(new, flat[:, part], self._run.mixing)
        parameters.update(_like(flat, parameters))

    def _of_groups(self, of_sites: Tensor) -> Tensor:
        """What belongs to each group's site."""
        return of_sites.repeat_interleave(self._run.groups // self._run.sites, 0)

    def _coded(self, which: str, piece: int, rows: Tensor, dtype: str) -> Tensor:
        """What arrives of rows."""
        if dtype == "fp32" or self._run.groups == 1:
            return rows
        coding = CODINGS[dtype]
        rows = rows + self._dropped.get((which, piece), 0)
        arrived = coding.arrives(rows)
        self._dropped[which, piece] = coding.feedback * (rows - arrived)
        return arrived


class Timetable:
    """Iterations after which fragments meet; as many altogether as at equal intervals."""

    # Limits of a change "by noise", and how long the usual agreement is remembered.
    _LEAST, _MOST, _DECAY = 0.5, 2.0, 0.9

    def __init__(self, run: Run, config: PierConfig) -> None:
        self._run, self._config = run, config
        self._next, self._usual, self._interval = 0, math.nan, float(run.interval)
        begin, number = config.lazy_start, math.ceil((run.iterations - config.lazy_start) / run.interval)
        slope = {"rising": 0.5, "falling": -0.5}.get(run.intervals, 0.0)
        shares = [step / number for step in range(1, number + 1)]
        self._set = {begin + round((run.iterations - begin) * ((1 - slope) * at + slope * at**2)) for at in shares}

    def due(self, iteration: int) -> Sequence[int]:
        """Numbers of the fragments."""
        if self._run.intervals == "equal":
            return self._config.fragments_due(iteration)
        if self._config.is_lazy(iteration):
            return ()
        if self._run.intervals != "by noise":
            return (0,) if iteration in self._set else ()
        self._next = self._next or self._config.lazy_start + self._run.interval
        if iteration < self._next and iteration < self._run.iterations:
            return ()
        return (0,)

    def measured(self, square: float, square_of_mean: float) -> None:
        """Given the mean square norm of pseudo-gradients and that of their mean, finds the interval to the next."""
        agreed = square_of_mean / square
        self._usual = agreed if math.isnan(self._usual) else self._DECAY * self._usual + (1 - self._DECAY) * agreed
        self._interval = self._run.interval * min(max(agreed / self._usual, self._LEAST), self._MOST) ** self._run.rule_rate
        self._next += round(self._interval)


class _Sites(Outer):
    """Groups that average in their site, and sites that average less often; the weights of a site are its groups' anchor."""

    def __init__(self, run: Run, parameters: Parameters) -> None:
        super().__init__(run, parameters)
        self._between = Outer(run.between_sites, parameters)
        assert self._between.config.lazy_start == self.config.lazy_start
        assert run.site_interval % run.interval == 0

    def follow(self, iteration: int, parameters: Parameters) -> None:
        super().follow(iteration, parameters)
        self._between.follow(iteration, parameters)

    def step(self, iteration: int, parameters: Parameters, outcome: Outcome) -> bool:
        """The outer step inside each site; then, if it is due, that between sites. The outcome has the norms of the latter."""
        is_taken = super().step(iteration, parameters, Outcome())
        anchors = _like(self._anchor, parameters)
        if self._between.step(iteration, anchors, outcome):
            self._anchor = flattened(anchors)
            parameters.update(_like(self._of_groups(self._anchor), parameters))
        return is_taken


def new_outer(run: Run, parameters: Parameters) -> Outer:
    """The outer level of a run that begins with the parameters of one group."""
    return (_Sites if run.sites > 1 else Outer)(run, parameters)


def flattened(parameters: Parameters) -> Tensor:
    """Shape ``[groups, elements]``."""
    return torch.cat([value.flatten(1) for value in parameters.values()], 1)


def _like(flat: Tensor, parameters: Parameters) -> Parameters:
    """The opposite; copies."""
    parts = flat.split([value[0].numel() for value in parameters.values()], 1)
    return {name: part.reshape(-1, *parameters[name].shape[1:]).clone() for name, part in zip(parameters, parts, strict=True)}


def train(run: Run, text: Text, is_brief: bool = False) -> Outcome:
    """Trains a run; the same batches in the same order as all runs of its seed and batch.

    Args:
        run: What to train.
        text: What it is trained on.
        is_brief: Whether the outcome is brief, for files that hold many.
    """
    outcome, generator = Outcome(), np.random.default_rng(run.seed)
    parameters = initial(run.layers, run.width, run.seed)
    inner = Inner(run, parameters)
    outer = None if run.method == SYNCHRONOUS else new_outer(run, parameters)
    outer_steps = 0
    apart_until = run.iterations
    if run.tail:
        apart_until = round((1 - run.tail) * run.iterations) // run.interval * run.interval
    anchors: list[Parameters] = []
    for iteration in range(1, run.iterations + 1):
        groups = len(parameters["tokens"])
        batch = text.batch(generator, run.batch).view(groups, -1, SEQUENCE + 1)
        inner.step(parameters, _gradients(parameters, batch), run.rate_factor(iteration))
        if outer is None or iteration > apart_until:
            continue
        outer.follow(iteration, parameters)
        if outer.step(iteration, parameters, outcome):
            outer_steps += 1
            inner.share(outer_steps)
            if not is_brief:
                anchors = [*anchors[1 - max(_AVERAGED) :], outer.anchor(parameters)]
                if iteration % _EVALUATION_INTERVAL == 0:
                    outcome.curve[iteration] = _evaluate(parameters, text)
        if groups < run.groups and not outer.config.is_lazy(iteration + 1):
            if not is_brief:
                outcome.curve[iteration] = _evaluate(parameters, text)
            _change(parameters, inner, lambda common: common.repeat(run.groups, *[1] * (common.dim() - 1)))
        if run.tail and iteration == apart_until:
            _change(parameters, inner, _of_mean)
    outcome.final = _evaluate(parameters, text)
    if is_brief:
        tenths = np.array_split(outcome.correlations, min(10, len(outcome.correlations)) or 1)
        return Outcome(round(outcome.final, 5), correlations=[round(float(tenth.mean()), 3) for tenth in tenths if len(tenth)])
    for number in _AVERAGED:
        if len(anchors) >= number:
            mean = {name: torch.stack([anchor[name] for anchor in anchors[-number:]]).mean(0) for name in parameters}
            outcome.averaged[number] = _evaluate(mean, text)
    return outcome


def _gradients(parameters: Parameters, batch: Tensor) -> Parameters:
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    found = torch.autograd.grad(losses(leaves, batch).sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def _change(parameters: Parameters, inner: Inner, function: Callable[[Tensor], Tensor]) -> None:
    parameters.update({name: function(value) for name, value in parameters.items()})
    inner.change(function)


def _of_mean(tensor: Tensor) -> Tensor:
    return tensor.mean(0, keepdim=True)


def _evaluate(parameters: Parameters, text: Text) -> float:
    with torch.no_grad():
        return losses({name: value[:1] for name, value in parameters.items()}, text.validation).item()
