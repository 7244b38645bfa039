"""An optimizer of the caller's choice in the outer step, over flat pieces of the parameters."""

import functools
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pier_megatron import PierConfig, PierConfigError
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer import OuterLoop, OuterStepReport, Shards, Snapshot
from pier_megatron.outer.elastic import ElasticMembership

LR, MU = 0.7, 0.6
NESTEROV = functools.partial(torch.optim.SGD, lr=LR, momentum=MU, nesterov=True)
ADAM = functools.partial(torch.optim.Adam, lr=0.3, betas=(0.8, 0.95), eps=1e-3)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"fragments": 2},
    {"overlap": 2, "fragments": 3},
    {"exchange_dtype": "int8", "overlap": 1},
]


@pytest.fixture(autouse=True)
def short_chunks() -> Iterator[None]:
    """Several chunks in each fragment, which cut tensors."""
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=4):
        yield


def _config(**settings: Any) -> PierConfig:
    return PierConfig(
        **{"train_iters": 18, "groups": 1, "preset": "pier", "sync_interval": 4, "lazy_start_iters": 4} | settings
    )


def _target(iteration: int) -> Tensor:
    return torch.randn(23, generator=torch.Generator().manual_seed(iteration)) + 1


class _Run:
    """One group that SGD draws to a target that moves."""

    def __init__(self, config: PierConfig, outer_optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        self.parameters = [torch.zeros(size) for size in ((3, 5), (1,), (7,))]
        self.reports: list[OuterStepReport] = []
        self._inner = torch.optim.SGD(self.parameters, lr=0.1)
        self.loop = OuterLoop.for_optimizer(
            self._inner,
            config,
            GroupExchange(codec=config.codec),
            report=self.reports.append,
            outer_optimizer=outer_optimizer,
        )

    def train(self, until: int) -> "_Run":
        for iteration in range(self.loop.iteration + 1, until + 1):
            self.loop.begin_iteration(iteration)
            for parameter, target in zip(self.parameters, _target(iteration).split((15, 1, 7)), strict=True):
                parameter.grad = parameter - target.view(parameter.shape)
            self._inner.step()
            self.loop.end_iteration()
        return self

    def weights(self) -> Tensor:
        return torch.cat([parameter.flatten() for parameter in self.parameters])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("preset", ["pier", "diloco"])
def test_sgd_is_the_built_in_nesterov(settings: dict[str, Any], preset: str) -> None:
    built_in = _Run(_config(preset=preset, outer_lr=LR, outer_momentum=MU, **settings)).train(18)
    own = _Run(_config(preset=preset, **settings), NESTEROV).train(18)
    torch.testing.assert_close(own.loop.states[0].anchor, built_in.loop.states[0].anchor, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(own.weights(), built_in.weights(), rtol=2e-6, atol=2e-6)
    without_outer_step = _Run(_config(preset=preset, lazy_start_iters=16, **settings), NESTEROV).train(16)
    assert not torch.allclose(own.weights(), without_outer_step.weights(), atol=1e-2)


@pytest.mark.parametrize("settings", [{}, {"fragments": 2}, {"lazy_start_iters": 8}, {"preset": "diloco"}])
def test_adam_is_what_its_paper_says(settings: dict[str, Any]) -> None:
    config = _config(**settings)
    run = _Run(config, ADAM)
    fragments = torch.empty(23)
    for chunk in run.loop.states[0].chunks:
        chunk.of(fragments).fill_(chunk.fragment)
    weights, anchor, first, second, steps = (torch.zeros(23, dtype=torch.float64) for _ in range(5))
    for iteration in range(1, 19):
        weights = weights - 0.1 * (weights - _target(iteration))
        is_warmup = config.is_momentum_warmup(iteration)
        for fragment in range(config.fragments) if is_warmup else config.fragments_due(iteration):
            here = fragments == fragment
            gradient = anchor[here] - weights[here]
            steps[here] += 1
            first[here] = 0.8 * first[here] + 0.2 * gradient
            second[here] = 0.95 * second[here] + 0.05 * gradient**2
            unbiased = first[here] / (1 - 0.8 ** steps[here]), second[here] / (1 - 0.95 ** steps[here])
            anchor[here] -= 0.3 * unbiased[0] / (unbiased[1].sqrt() + 1e-3)
            if not is_warmup:
                weights[here] = anchor[here]
        if config.is_lazy(iteration) and (is_warmup or iteration == config.lazy_start):
            anchor = weights.clone()
    torch.testing.assert_close(run.train(18).weights().double(), weights, rtol=1e-5, atol=1e-5)


def _through_a_file(snapshot: Snapshot) -> Snapshot:
    file = io.BytesIO()
    torch.save(snapshot, file)
    file.seek(0)
    found: Snapshot = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("factory", [NESTEROV, ADAM])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("stop", [4, 9, 13])
def test_resume_is_exact(factory: Callable[..., Any], settings: dict[str, Any], stop: int) -> None:
    config = _config(**settings)
    stopped = _Run(config, factory).train(stop)
    stored = _through_a_file(stopped.loop.snapshot())
    expected = _Run(config, factory).train(18)
    # Twice: the loop that continues from a snapshot leaves it as it is.
    for _ in range(2):
        run = _Run(config, factory)
        for parameter, kept in zip(run.parameters, stopped.parameters, strict=True):
            parameter.copy_(kept)
        run.loop.restore(stored)
        run.train(18)
        assert torch.equal(run.weights(), expected.weights())
        assert torch.equal(run.loop.states[0].anchor, expected.loop.states[0].anchor)


def test_snapshot_of_an_older_version_is_read() -> None:
    run = _Run(_config()).train(6)
    old = run.loop.snapshot()
    del old.__dict__["optimizers"], old.__dict__["rule"]
    found = _through_a_file(old)
    assert found.optimizers is None
    run.loop.restore(found)
    with pytest.raises(PierConfigError, match=r"outer_optimizer: the snapshot holds its state for 0 chunks.*has 6"):
        _Run(_config(), ADAM).loop.restore(found)


def test_snapshot_of_another_outer_optimizer_is_refused() -> None:
    snapshot = _Run(_config(), ADAM).train(6).loop.snapshot()
    for other, named in ((None, "nesterov"), (NESTEROV, "torch.optim.sgd.SGD")):
        with pytest.raises(PierConfigError, match=rf"are torch.optim.adam.Adam's, .* {named}'s.*override_checkpoint"):
            _Run(_config(), other).loop.restore(snapshot)
    pairs = _Run(_config(preset="noloco", groups=2))
    with pytest.raises(PierConfigError, match="outer steps are nesterov's, and this loop's are noloco's"):
        pairs.loop.restore(_Run(_config()).train(6).loop.snapshot())
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=5):
        other = _Run(_config(), ADAM)
    with pytest.raises(PierConfigError, match=r"state for 6 chunks.*has 5.*--pier-chunk-mib"):
        other.loop.restore(snapshot)


@pytest.mark.parametrize("factory", [None, NESTEROV])
def test_another_outer_optimizer_begins_without_momentum_where_that_is_accepted(factory: Callable[..., Any] | None) -> None:
    stopped = _Run(_config(overlap=2), ADAM).train(9)
    [state] = stopped.loop.snapshot().states
    run = _Run(_config(overlap=2, override_checkpoint=True), factory)
    for parameter, kept in zip(run.parameters, stopped.parameters, strict=True):
        parameter.copy_(kept)
    run.loop.restore(stopped.loop.snapshot())
    assert torch.equal(run.loop.states[0].anchor, state.anchor)
    assert not run.loop.states[0].momentum.any()
    assert not any(kept["state"] for _, kept in run.loop.snapshot().optimizers or ())
    assert run.loop.snapshot().rounds == []
    run.train(18)
    assert run.weights().isfinite().all()


def test_reset_forgets_the_state() -> None:
    run = _Run(_config(), ADAM).train(10)
    assert [bool(state["state"]) for _, state in run.loop.snapshot().optimizers or ()] == [True] * 6
    run.loop.reset()
    assert [bool(state["state"]) for _, state in run.loop.snapshot().optimizers or ()] == [False] * 6


def test_report_says_nothing_of_a_momentum_that_is_not_used() -> None:
    report = _Run(_config(), ADAM).train(8).reports[-1]
    assert (report.mu, report.eta, report.momentum_norm) == (None, None, None)
    assert " 8 | pseudo-gradient norm: " in report.line()
    assert "momentum" not in report.line()
    assert not {"pier/mu", "pier/eta", "pier/momentum-norm"} & set(report.scalars())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer_lr": 0.7}, r"--pier-outer-lr 0.7 cannot be used with an outer_optimizer: it has its own"),
        ({"outer_momentum": 0.9}, r"--pier-outer-momentum 0.9 cannot be used with an outer_optimizer: it has its own"),
        ({"offload": True}, r"--pier-offload cannot.*stays where the parameters are"),
        ({"preset": "noloco", "groups": 4}, r"2 groups that meet \(--pier-preset noloco.*only NoLoCo's rule"),
        ({"subgroup_size": 3, "groups": 4}, r"3 groups that meet .*--pier-subgroup-size\)"),
        ({"lighthouse": "http://other"}, r"--pier-lighthouse cannot.*an island that joins would lack its state"),
    ],
)
def test_what_cannot_be_right_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PierConfigError, match=message):
        _Run(_config(**settings), NESTEROV)


def test_elastic_islands_are_refused() -> None:
    islands = ElasticMembership(mock.Mock(), own=0, wait_seconds=60)
    with pytest.raises(PierConfigError, match="an island that joins would lack its state"):
        OuterLoop(
            [[Shards([torch.zeros(3)])]], _config(), GroupExchange(), islands=islands, outer_optimizer=torch.optim.Adagrad
        )


def test_optimizer_in_place_of_its_factory_is_refused() -> None:
    optimizer: Any = torch.optim.SGD([torch.zeros(3)], lr=0.7)
    with pytest.raises(TypeError, match=r"outer_optimizer is a SGD, but has to build one.*functools\.partial"):
        _Run(_config(), optimizer)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_finds_the_pieces_flat_and_says_so() -> None:
    with pytest.raises(ValueError, match="2D"):
        _Run(_config(), torch.optim.Muon)
