"""The study's simulation of all groups in one process, against the reference."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import simulation
import together
import torch
from rows import ADAM, MUON, SYNCHRONOUS
from search import WINNER
from simulation import Inner, Run, train
from small_gpt import MATRIX, SEQUENCE, Parameters, Text, initial, losses
from together import train_together
from torch import Tensor

from pier_megatron import PierConfig, reference

# Threads that wait for each other are in the way of all else on the machine.
torch.set_num_threads(1)

_RUN = Run(method="pier-rising", groups=2, interval=2, iterations=10, batch=4, layers=1, width=16, lazy_start=0.2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder: Path = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    for name in ("train", "excerpt"):
        # Every byte comes twice, so that there is something to learn.
        generator.integers(0, 8, 5000, dtype=np.uint16).repeat(2).tofile(folder / f"{name}.bin")
    return Text(folder)


def referenced(run: Run, text: Text) -> float:
    """Final loss of the same run by ``reference.train``, in float64."""
    start = initial(run.layers, run.width, run.seed)
    generator = np.random.default_rng(run.seed)
    batches = [text.batch(generator, run.batch) for _ in range(run.iterations)]

    def named(parameters: Sequence[Tensor]) -> Parameters:
        return dict(zip(start, (parameter.unsqueeze(0) for parameter in parameters), strict=True))

    def gradient(parameters: Sequence[Tensor], group: int, iteration: int) -> Sequence[Tensor]:
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        own = batches[iteration - 1].view(run.groups, -1, SEQUENCE + 1)[group]
        return torch.autograd.grad(losses(named(leaves), own.unsqueeze(0)).sum(), leaves)

    class InnerOfOneGroup(torch.optim.Optimizer):
        """The simulation's, for the parameters of one group."""

        def __init__(self, parameters: list[Tensor]) -> None:
            super().__init__(parameters, {})
            self._parameters, self._inner, self._iteration = parameters, Inner(run, named(parameters)), 0

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self._iteration += 1
            gradients = named([parameter.grad for parameter in self._parameters])  # type: ignore[misc]
            self._inner.step(named(self._parameters), gradients, run.rate_factor(self._iteration))

    config = PierConfig(
        run.iterations,
        run.groups,
        sync_interval=run.interval,
        preset=run.method,
        lazy_start_fraction=run.lazy_start,
        overlap=run.overlap,
        outer_rule="muon" if run.rule == WINNER.rule else None,
        fragments=run.fragments,
    )
    if run.sites > 1:
        # The simulation names the averages inside a site first, the plugin the outer steps between sites.
        levels = {"sync_interval": run.site_interval, "preset": run.site_method, "site_interval": run.interval}
        config = dataclasses.replace(config, sites=run.sites, **levels)
    trained = reference.train(
        [value[0] for value in start.values()],
        gradient,
        InnerOfOneGroup,
        config,
        matrices=lambda index, tensor: [tensor] if list(start)[index].endswith(MATRIX) else [],
    )
    with torch.no_grad():
        return losses(named(trained), text.validation).item()


@pytest.mark.parametrize("inner", [ADAM, MUON])
@pytest.mark.parametrize(("preset", "overlap"), [("diloco", 0), ("pier-rising", 1)])
def test_groups_train_as_the_reference_says(inner: str, preset: str, overlap: int, text: Text) -> None:
    run = dataclasses.replace(_RUN, inner=inner, method=preset, overlap=overlap)
    found = train(run, text)
    assert found.final == pytest.approx(referenced(run, text), rel=2e-5)
    untrained = losses(initial(run.layers, run.width, run.seed), text.validation).item()
    assert found.final < untrained - 0.1
    assert len(found.norms) == 4
    assert len(found.correlations) == 3


@pytest.mark.parametrize("inner", [ADAM, MUON])
def test_sites_train_as_the_reference_says(inner: str, text: Text) -> None:
    run = dataclasses.replace(_RUN, inner=inner, method="local-sgd", groups=4, iterations=12, lazy_start=1 / 3)
    sites = dataclasses.replace(run, sites=2, site_interval=4, site_method="pier-rising")
    found = train(sites, text).final
    assert found == pytest.approx(referenced(sites, text), rel=2e-5)
    assert abs(found - train(run, text).final) > 1e-4


@pytest.mark.parametrize("overlap", [0, 1])
def test_orthogonal_steps_are_those_of_the_reference(overlap: int, text: Text) -> None:
    usual = dataclasses.replace(_RUN, overlap=overlap)
    run = dataclasses.replace(usual, rule=WINNER.rule, rule_rate=WINNER.rule_rate)
    found = train(run, text).final
    assert found == pytest.approx(referenced(run, text), rel=2e-5)
    assert abs(found - train(usual, text).final) > 1e-3


def test_moments_are_averaged_when_they_are_due() -> None:
    parameters = initial(1, 16, 1)
    inner = Inner(dataclasses.replace(_RUN, moments="denoised", moments_groups=2, moments_interval=2), parameters)
    inner.change(lambda moment: torch.rand(2, *moment.shape[1:], generator=torch.Generator().manual_seed(moment.numel())))
    inner._steps = 5
    moments = [value.clone() for state in (inner._first, inner._second) for value in (state["tokens"],)]
    inner.share(1)
    assert torch.equal(inner._second["tokens"], moments[1])
    inner.share(2)
    first = moments[0].mean(0)
    signal = (first / (1 - 0.9**5)) ** 2 * (1 - 0.99**5)
    second = moments[1].mean(0)
    torch.testing.assert_close(inner._second["tokens"], (signal + (second - signal).clamp(min=0) / 2).expand(2, -1, -1))
    assert torch.equal(inner._first["tokens"][0], inner._first["tokens"][1])


@pytest.mark.parametrize(("intervals", "expected"), [("rising", [1, 3, 5, 8]), ("falling", [3, 5, 7, 8])])
def test_unequal_intervals_have_as_many_outer_steps(intervals: str, expected: list[int], text: Text) -> None:
    run = dataclasses.replace(_RUN, intervals=intervals, lazy_start=0.2)
    due = [iteration - 2 for iteration in range(1, 11) if simulation.Timetable(run, simulation.config_of(run)).due(iteration)]
    assert due == expected


def test_fragments_step_in_turn_or_by_what_has_moved(text: Text) -> None:
    longer = dataclasses.replace(_RUN, interval=4, iterations=24, lazy_start=1 / 6)
    whole, turn, moved = (
        train(dataclasses.replace(longer, fragments=fragments, by_change=by_change), text)
        for fragments, by_change in ((1, False), (2, False), (2, True))
    )
    assert len({round(outcome.final, 6) for outcome in (whole, turn, moved)}) == 3


def test_groups_need_not_end_where_one_does(text: Text) -> None:
    # Otherwise the comparison above could not fail.
    both, one = (train(dataclasses.replace(_RUN, groups=groups), text).final for groups in (2, 1))
    assert abs(both - one) > 1e-3


def test_inner_step_is_that_of_adamw(text: Text) -> None:
    run = dataclasses.replace(_RUN, iterations=100)
    start = initial(run.layers, run.width, run.seed)
    mine = {name: value.clone() for name, value in start.items()}
    inner = Inner(run, mine)
    theirs = {name: value.clone().requires_grad_() for name, value in start.items()}
    vectors = [value for name, value in theirs.items() if name.endswith((".bias", ".scale"))]
    others = [value for name, value in theirs.items() if not name.endswith((".bias", ".scale"))]
    grouped = [{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(grouped, lr=1.0, betas=(0.9, 0.99))
    generator = np.random.default_rng(1)
    for iteration in range(1, 6):
        batch = text.batch(generator, 4).unsqueeze(0)
        gradients = dict(zip(theirs, torch.autograd.grad(losses(theirs, batch).sum(), list(theirs.values())), strict=True))
        for name, value in theirs.items():
            value.grad = gradients[name].clone()
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = run.learning_rate * run.rate_factor(iteration)
        adamw.step()
        inner.step(mine, gradients, run.rate_factor(iteration))
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inner", [ADAM, MUON])
def test_runs_that_train_together_are_those_that_train_alone(inner: str, text: Text) -> None:
    base = dataclasses.replace(_RUN, groups=4, iterations=20, lazy_start=0.2, method=SYNCHRONOUS, inner=inner)
    sites = {"method": "local-sgd", "sites": 2, "site_interval": 4, "site_method": "pier-rising"}
    changes = ({}, {"method": "pier", "learning_rate": 4e-3}, {"method": "diloco", "overlap": 1, "muon_rate": 1e-2}, sites)
    runs = [dataclasses.replace(base, **change) for change in changes]
    for run, outcome in zip(runs, train_together(runs, text), strict=True):
        assert outcome.final == pytest.approx(train(run, text).final, abs=2e-5)


def test_interrupted_training_continues_to_the_same_end(text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, saves = [dataclasses.replace(_RUN, dtype="int2", sum_dtype="int2")], tmp_path / "saves"
    whole = train_together(runs, text)
    monkeypatch.setattr(together, "_SAVE_INTERVAL", 7)
    with monkeypatch.context() as patch:
        # Interrupted in the iteration after it was saved.
        patch.setattr(Path, "unlink", lambda path, **_: None)
        train_together(runs, text, saves)
    assert torch.load(saves, weights_only=False).iteration == 7
    assert train_together(runs, text, saves) == whole
    assert not saves.exists()
