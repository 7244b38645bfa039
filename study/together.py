"""Many runs of the simulation at once, in one process: what they share costs once.

Small models spend their time on the calls of operations, not in them. Runs of one seed, batch and model differ in their rates
and outer steps only, so their groups stand side by side in one tensor. It computes what :func:`simulation.train` does.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from rows import MUON, SYNCHRONOUS
from simulation import (
    BETA1,
    BETA2,
    CLIP,
    MUON_MOMENTUM,
    MUON_STEPS,
    WEIGHT_DECAY,
    Outcome,
    Outer,
    Run,
    flattened,
    new_outer,
)
from small_gpt import MATRIX, SEQUENCE, VECTORS, Parameters, Text, initial, losses
from torch import Tensor

_SAVE_INTERVAL = 2000

# Evaluations of each run on its way.
_POINTS = 20

# What only simulation.train does.
_UNKNOWN = (
    "tail",
    "divides_noise",
    "slow_share",
    "own_share",
    "predicted_share",
    "muon_positions",
    "moments",
    "intervals",
    "fragments",
)

_ALIKE = ("seed", "iterations", "batch", "layers", "width", "inner", "groups")
"""What runs that train together have in common."""


def key(run: Run) -> tuple[Any, ...]:
    """Equal for runs that can train together."""
    return tuple(getattr(run, name) for name in _ALIKE)


class _Rows:
    """The parameters of all groups of all runs, a row each: float32 of shape ``[rows, numel]``, with views by name."""

    def __init__(self, start: Parameters, rows: int) -> None:
        self._shapes = {name: value.shape[1:] for name, value in start.items()}
        self.flat = flattened(start).repeat(rows, 1)
        decays = [torch.full((value[0].numel(),), float(not name.endswith(VECTORS))) for name, value in start.items()]
        self.decays = torch.cat(decays)

    def views(self, flat: Tensor) -> Parameters:
        """Parts of a tensor of this layout, by name."""
        parts = flat.split([math.prod(shape) for shape in self._shapes.values()], 1)
        return {name: part.view(-1, *shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


class _Inner:
    """The inner optimizer of all rows, each at its own rates; see :class:`simulation.Inner`."""

    def __init__(self, runs: Sequence[Run], rows: _Rows) -> None:
        self._rows, self.steps = rows, 0
        self._is_muon = runs[0].inner == MUON
        self.first, self.second = torch.zeros_like(rows.flat), torch.zeros_like(rows.flat)
        each = runs[0].groups
        self._adam_rates = torch.tensor([[run.learning_rate] for run in runs]).repeat_interleave(each, 0)
        self._muon_rates = torch.tensor([[run.muon_rate] for run in runs]).repeat_interleave(each, 0)

    def step(self, gradient: Tensor, factor: float) -> None:
        """Steps in place; ``gradient`` has the layout of the rows, and is overwritten."""
        self.steps += 1
        flat, rates = self._rows.flat, self._adam_rates * factor
        gradient *= (CLIP / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        flat.addcmul_(flat * self._rows.decays, rates, value=-WEIGHT_DECAY)
        matrices = {}
        if self._is_muon:
            matrices = {name: view for name, view in self._rows.views(self.first).items() if name.endswith(MATRIX)}
            averages = self._averaged(matrices, gradient)
        first = self.first.lerp_(gradient, 1 - BETA1)
        self.second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        size = (self.second / (1 - BETA2**self.steps)).sqrt_().add_(1e-8)
        update = torch.div(first, size, out=size).mul_(rates / (1 - BETA1**self.steps))
        if matrices:
            self._orthogonalise(matrices, averages, gradient, update, factor)
        flat.sub_(update)

    def _averaged(self, matrices: Parameters, gradient: Tensor) -> Parameters:
        gradients = self._rows.views(gradient)
        return {name: momentum.lerp(gradients[name], 1 - MUON_MOMENTUM) for name, momentum in matrices.items()}

    def _orthogonalise(
        self, matrices: Parameters, averages: Parameters, gradient: Tensor, update: Tensor, factor: float
    ) -> None:
        gradients, updates = self._rows.views(gradient), self._rows.views(update)
        by_shape: dict[torch.Size, list[str]] = {}
        for name, momentum in matrices.items():
            momentum.copy_(averages[name])
            by_shape.setdefault(momentum.shape, []).append(name)
        for shape, names in by_shape.items():
            directions = torch.cat([gradients[name].lerp(averages[name], MUON_MOMENTUM) for name in names])
            steps = newton_schulz(directions, MUON_STEPS).view(len(names), *shape)
            rates = (self._muon_rates * factor * max(1.0, shape[-2] / shape[-1]) ** 0.5).unsqueeze(2)
            for name, step in zip(names, steps, strict=True):
                updates[name].copy_(step * rates)


class _State:
    """All that training continues from."""

    def __init__(self, runs: Sequence[Run]) -> None:
        first = runs[0]
        start = initial(first.layers, first.width, first.seed)
        self.iteration, self.generator = 0, np.random.default_rng(first.seed)
        self.rows = _Rows(start, first.groups * len(runs))
        self.inner = _Inner(runs, self.rows)
        self.outers = [None if run.method == SYNCHRONOUS else new_outer(run, start) for run in runs]
        self.outcomes = [Outcome() for _ in runs]


def train_together(
    runs: Sequence[Run], text: Text, saves: Path | None = None, losses_of: Callable[[Parameters, Tensor], Tensor] = losses
) -> list[Outcome]:
    """Trains runs of one :func:`key`.

    Args:
        runs: What to train.
        text: What it is trained on.
        saves: File of what an interrupted training continues from.
        losses_of: What the gradient is of: :func:`small_gpt.losses`, or a compiled one.

    Returns:
        Final losses, and those at some iterations on the way.
    """
    for run in runs:
        for name in _UNKNOWN:
            if getattr(run, name) != getattr(Run, name):
                raise ValueError(f"{name} {getattr(run, name)}: runs that have it train alone")
    state = _State(runs)
    if saves is not None and saves.exists():
        state = torch.load(saves, weights_only=False)
    first, groups = runs[0], runs[0].groups
    configs = [outer.config if outer is not None else None for outer in state.outers]
    points = {round(first.iterations * point / _POINTS) for point in range(1, _POINTS + 1)}
    for iteration in range(state.iteration + 1, first.iterations + 1):
        batch = text.batch(state.generator, first.batch).view(groups, -1, SEQUENCE + 1).repeat(len(runs), 1, 1)
        gradient = _gradient(state.rows, batch, losses_of).view(len(runs), groups, -1)
        for of_run, config in zip(gradient, configs, strict=True):
            if config is None or config.is_lazy(iteration):
                of_run.copy_(of_run.mean(0, keepdim=True).expand_as(of_run))
        state.inner.step(gradient.view(len(runs) * groups, -1), first.rate_factor(iteration))
        for run, outer, of_run, outcome in zip(runs, state.outers, state.rows.flat.split(groups), state.outcomes, strict=True):
            if outer is not None:
                _follow(run, outer, state.rows, of_run, iteration, outcome)
        state.iteration = iteration
        if iteration in points:
            with torch.no_grad():
                _evaluate(state, runs, text)
        if saves is not None and iteration % _SAVE_INTERVAL == 0:
            torch.save(state, f"{saves}.new")
            os.replace(f"{saves}.new", saves)
    if saves is not None:
        saves.unlink(missing_ok=True)
    return [Outcome(outcome.curve[first.iterations], outcome.curve) for outcome in state.outcomes]


def _gradient(rows: _Rows, batch: Tensor, losses_of: Callable[[Parameters, Tensor], Tensor]) -> Tensor:
    leaves = {name: value.detach().requires_grad_() for name, value in rows.views(rows.flat).items()}
    found = torch.autograd.grad(losses_of(leaves, batch).sum(), list(leaves.values()))
    return flattened(dict(zip(leaves, found, strict=True)))


def _follow(run: Run, outer: Outer, rows: _Rows, of_run: Tensor, iteration: int, outcome: Outcome) -> None:
    """What is due after an iteration of one run; ``of_run`` are the rows of its groups."""
    has_arrivals = run.overlap and not outer.config.is_lazy(iteration)
    if iteration % run.interval and iteration < run.iterations and not has_arrivals:
        return
    outer.follow(iteration, rows.views(of_run[:1]))
    parameters = rows.views(of_run)
    if outer.step(iteration, parameters, outcome):
        of_run.copy_(flattened(parameters))
    outcome.norms.clear()
    outcome.correlations.clear()


def _evaluate(state: _State, runs: Sequence[Run], text: Text) -> None:
    groups = runs[0].groups
    for place, (outer, outcome) in enumerate(zip(state.outers, state.outcomes, strict=True)):
        shown = state.rows.views(state.rows.flat[place * groups :][:1])
        if outer is not None and not outer.config.is_lazy(state.iteration):
            # Between outer steps, what all groups agreed on last.
            shown = outer.anchor(shown)
        outcome.curve[state.iteration] = round(losses(shown, text.validation).item(), 5)


def batches(runs: Sequence[Run], most: int) -> list[list[Run]]:
    """Divides runs into those that train together, at most some at a time, and as many in each part."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in dict.fromkeys(runs):
        # A synchronous run has as many rows as the others, all alike.
        found.setdefault(key(run), []).append(run)
    parts = [(alike, math.ceil(len(alike) / most)) for alike in found.values()]
    return [
        alike[len(alike) * part // number : len(alike) * (part + 1) // number]
        for alike, number in parts
        for part in range(number)
    ]
