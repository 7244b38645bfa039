"""The study's simulation of all groups in one process, against the reference."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import together
import torch
from codings import CODINGS
from route_losses import backward
from rows import ADAM, MUON, SYNCHRONOUS
from simulation import Inner, Outcome, Outer, Run, train
from small_gpt import SEQUENCE, Parameters, Text, initial, losses
from together import train_together
from torch import Tensor

from pier_megatron import PierConfig, reference
from pier_megatron.exchange.codecs import BLOCK, CODECS
from pier_megatron.exchange.coding import decode, encode

pytestmark = pytest.mark.slow

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
    )
    if run.sites > 1:
        # The simulation names the averages inside a site first, the plugin the outer steps between sites.
        levels = {"sync_interval": run.site_interval, "preset": run.site_method, "site_interval": run.interval}
        config = dataclasses.replace(config, sites=run.sites, **levels)
    trained = reference.train([value[0] for value in start.values()], gradient, InnerOfOneGroup, config)
    with torch.no_grad():
        return losses(named(trained), text.validation).item()


@pytest.mark.parametrize("inner", [ADAM, MUON])
@pytest.mark.parametrize(("preset", "overlap"), [("pier-rising", 0), ("diloco", 0), ("pier", 0), ("pier-rising", 1)])
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


def test_groups_need_not_end_where_one_does(text: Text) -> None:
    # Otherwise the comparison above could not fail.
    both, one = (train(dataclasses.replace(_RUN, groups=groups), text).final for groups in (2, 1))
    assert abs(both - one) > 1e-3


def test_result_that_is_a_whole_interval_late_replaces_the_prediction(text: Text) -> None:
    late = dataclasses.replace(_RUN, method="local-sgd", overlap=2)
    predicted = dataclasses.replace(late, own_share=0.3, predicted_share=0.6)
    # With a rate of zero nothing is learned meanwhile, and no prediction is left in the end.
    for run in (late, predicted):
        parameters = initial(run.layers, run.width, run.seed)
        outer, outcome = Outer(run, parameters), Outcome()
        parameters = {name: value.repeat(2, *[1] * (value.dim() - 1)) for name, value in parameters.items()}
        for step, offset in enumerate((0.25, 0.5), start=2):
            parameters["tokens"][0] += offset
            moved = parameters["tokens"].mean(0)
            outer.step(2 * step, parameters, outcome)
            outer._finish(parameters)
            torch.testing.assert_close(parameters["tokens"], moved.expand_as(parameters["tokens"]))


def test_exchange_is_coded_both_ways_as_the_plugins(text: Text) -> None:
    run = dataclasses.replace(_RUN, dtype="int2", sum_dtype="int2")
    outer, generator = Outer(run, initial(run.layers, run.width, run.seed)), torch.Generator().manual_seed(1)
    codec, numel = CODECS["int2"], 5 * BLOCK
    own_dropped, sum_dropped = torch.zeros(2, numel), torch.zeros(numel)
    for _ in range(3):
        vectors = torch.randn(2, numel, generator=generator)
        found = outer._coded("sum", outer._coded("own", vectors, "int2").sum(0, keepdim=True), "int2")
        payloads = [encode(codec, vector[None].clone(), own) for vector, own in zip(vectors, own_dropped, strict=True)]
        total = torch.stack([decode(codec, payload) for payload in payloads]).sum(0)
        assert torch.equal(found, decode(codec, encode(codec, total, sum_dropped)))


@pytest.mark.parametrize("name", CODINGS)
def test_feedback_delivers_late_what_a_coding_drops(name: str) -> None:
    coding, vector = CODINGS[name], torch.randn(1, 5000, generator=torch.Generator().manual_seed(1))
    dropped, delivered = torch.zeros_like(vector), torch.zeros_like(vector)
    for _ in range(300):
        arrived = coding.arrives(vector + dropped)
        dropped = vector + dropped - arrived
        delivered += arrived
    assert (delivered / 300 - vector).norm() < 0.1 * vector.norm()


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


def test_micro_batches_take_the_layers_of_their_routes(text: Text) -> None:
    parameters = {name: vector.double().requires_grad_() for name, vector in initial(4, 16, seed=1).items()}
    paths = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3), (0, 2, 1, 3)]
    batch = text.batch(np.random.default_rng(0), 8).chunk(4)
    backward(parameters, batch, paths)
    expected = 0.0
    for tokens, path in zip(batch, paths, strict=True):
        # A model of just these layers.
        others = {name: vector for name, vector in parameters.items() if not name[0].isdigit()}
        layers = [
            (f"{place}.{name.partition('.')[2]}", vector)
            for place, layer in enumerate(path)
            for name, vector in parameters.items()
            if name.startswith(f"{layer}.")
        ]
        expected = expected + losses(others | dict(layers), tokens[None]).sum() / 4
    assert isinstance(expected, Tensor)
    for found, gradient in zip(parameters.values(), torch.autograd.grad(expected, list(parameters.values())), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad, gradient)


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
