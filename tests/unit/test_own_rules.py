"""A rule of the user's own in the outer step, by name; its memory lasts wherever the anchor does."""

import argparse
import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pier_megatron import PierConfig, PierConfigError
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.integration.arguments import check_arguments
from pier_megatron.integration.startup import Takes
from pier_megatron.outer import OuterLoop, OuterRule, OuterStepReport, Shards, Snapshot
from pier_megatron.outer.chunks import matrix_in
from pier_megatron.outer.rules import bits_of_products, orthogonalised
from pier_megatron.outer.state import OuterState

SETTINGS: list[dict[str, Any]] = [
    {},
    {"fragments": 2},
    {"overlap": 2, "fragments": 3, "offload": True},
    {"exchange_dtype": "int8", "overlap": 1},
]


class Adam(OuterRule):
    """Adam on the mean pseudo-gradient, whose second moment remembers twenty outer steps."""

    memory = ("momentum", "squares")

    def step(self, anchor: Tensor, delta: Tensor, *memory: Tensor) -> None:
        momentum, squares = memory
        momentum.lerp_(delta, 1 - self.mu)
        squares.lerp_(delta**2, 0.05)
        anchor.sub_(self.eta * momentum / (squares.sqrt() + 1e-3))


class Descent(OuterRule):
    """No momentum at all."""

    def step(self, anchor: Tensor, delta: Tensor, *memory: Tensor) -> None:
        anchor.sub_(self.eta * delta)


class Three(Descent):
    memory = ("momentum", "second", "third")


class Taken(Descent):
    memory = ("momentum", "residual")


class Pairs(OuterRule):
    has_common_anchor = False


class Idle(OuterRule):
    """Without step()."""


def nothing() -> None:
    """No rule."""


ADAM, DESCENT = "test_own_rules:Adam", "test_own_rules:Descent"


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
    """One group that SGD draws to a moving target."""

    def __init__(self, config: PierConfig) -> None:
        self.parameters = [torch.zeros(size) for size in ((3, 5), (1,), (7,))]
        self.reports: list[OuterStepReport] = []
        self._inner = torch.optim.SGD(self.parameters, lr=0.1)
        exchange = GroupExchange(codec=config.codec, groups=range(config.groups))
        self.loop = OuterLoop.for_optimizer(self._inner, config, exchange, report=self.reports.append)

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


@pytest.mark.parametrize("settings", [{}, {"fragments": 2}, {"lazy_start_iters": 8}, {"preset": "diloco"}])
def test_adam_is_what_its_formula_says_also_in_the_warmup(settings: dict[str, Any]) -> None:
    config = _config(**settings)
    run = _Run(_config(outer_rule=ADAM, **settings))
    fragments = torch.empty(23)
    for chunk in run.loop.states[0].chunks:
        chunk.of(fragments).fill_(chunk.fragment)
    weights, anchor, first, second = (torch.zeros(23, dtype=torch.float64) for _ in range(4))
    for iteration in range(1, 19):
        weights = weights - 0.1 * (weights - _target(iteration))
        is_warmup = config.is_momentum_warmup(iteration)
        mu, eta = config.momentum_at(iteration), config.learning_rate_at(iteration)
        for fragment in range(config.fragments) if is_warmup else config.fragments_due(iteration):
            here = fragments == fragment
            delta = anchor[here] - weights[here]
            first[here] = mu * first[here] + (1 - mu) * delta
            second[here] = 0.95 * second[here] + 0.05 * delta**2
            anchor[here] -= eta * first[here] / (second[here].sqrt() + 1e-3)
            if not is_warmup:
                weights[here] = anchor[here]
        if config.is_lazy(iteration) and (is_warmup or iteration == config.lazy_start):
            anchor = weights.clone()
    torch.testing.assert_close(run.train(18).weights().double(), weights, rtol=1e-5, atol=1e-5)
    assert run.reports[-1].mu == config.momentum_at(18)


def _through_a_file(snapshot: Snapshot) -> Snapshot:
    file = io.BytesIO()
    torch.save(snapshot, file)
    file.seek(0)
    found: Snapshot = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("rule", [ADAM, DESCENT])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("stop", [4, 9, 13])
def test_resume_is_exact(rule: str, settings: dict[str, Any], stop: int) -> None:
    config = _config(outer_rule=rule, **settings)
    stopped = _Run(config).train(stop)
    stored = _through_a_file(stopped.loop.snapshot())
    expected = _Run(config).train(18)
    # Twice: the loop that continues from a snapshot leaves it as it is.
    for _ in range(2):
        run = _Run(config)
        for parameter, kept in zip(run.parameters, stopped.parameters, strict=True):
            parameter.copy_(kept)
        run.loop.restore(stored)
        run.train(18)
        assert torch.equal(run.weights(), expected.weights())
        run.loop.snapshot()
        expected.loop.snapshot()
        assert all(torch.equal(run.loop.states[0].kept[name], of) for name, of in expected.loop.states[0].kept.items())


def test_memory_is_registered_once_and_lasts_everywhere() -> None:
    """Saved, restored, reset, compared; what is handed to an island that joins is the same list."""
    run = _Run(_config(outer_rule=ADAM, exchange_dtype="int8")).train(10)
    [state], [saved] = run.loop.states, run.loop.snapshot().states
    assert saved["squares"].any()
    assert run.loop.checksums()[0].keys() == {"anchor", "momentum", "squares"}
    assert state.nbytes == sum(tensor.nbytes for tensor in saved.values())
    run.loop.reset()
    assert [name for name, tensor in state.kept.items() if tensor.any()] == ["anchor"]


def test_snapshot_of_another_rule_is_refused_or_begins_without_memory() -> None:
    stopped = _Run(_config(outer_rule=ADAM, overlap=2)).train(9)
    snapshot = stopped.loop.snapshot()
    for other, named in ((None, "nesterov"), (DESCENT, DESCENT)):
        with pytest.raises(PierConfigError, match=rf"are {ADAM}'s, .* {named}'s.*override_checkpoint"):
            _Run(_config(outer_rule=other, overlap=2)).loop.restore(snapshot)
        run = _Run(_config(outer_rule=other, overlap=2, override_checkpoint=True))
        for parameter, kept in zip(run.parameters, stopped.parameters, strict=True):
            parameter.copy_(kept)
        run.loop.restore(snapshot)
        assert torch.equal(run.loop.states[0].anchor, snapshot.states[0]["anchor"])
        assert not run.loop.states[0].momentum.any()
        assert run.loop.snapshot().rounds == []
        assert run.train(18).weights().isfinite().all()
    pairs = _Run(_config(preset="noloco", groups=2))
    with pytest.raises(PierConfigError, match="outer steps are nesterov's, and this loop's are noloco's"):
        pairs.loop.restore(_Run(_config()).train(6).loop.snapshot())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("no_such_module:Rule", r"No module named 'no_such_module'.*PYTHONPATH"),
        ("test_own_rules:Missing", r"no attribute 'Missing'"),
        ("test_own_rules:nothing", r"not a subclass of pier_megatron.outer.OuterRule"),
        ("test_own_rules:Pairs", r"by which all groups agree"),
        ("test_own_rules:Idle", r"it has no method step\(\)"),
        ("test_own_rules:Three", r"its memory is \('momentum', 'second', 'third'\), must be"),
        ("test_own_rules:Taken", r"with a NAME of letters other than anchor, momentum, residual"),
    ],
)
def test_what_is_no_rule_is_refused(rule: str, message: str) -> None:
    with pytest.raises(PierConfigError, match=rf"--pier-outer-rule {rule}: .*{message}"):
        _Run(_config(outer_rule=rule))


@pytest.mark.parametrize(("text", "message"), [("x = y", "NameError: name 'y'"), ("def f(:", "SyntaxError: ")])
def test_module_that_fails_is_refused(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_rules.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PierConfigError, match=f"--pier-outer-rule failing_rules:Rule: the import .*{message}"):
        _Run(_config(outer_rule="failing_rules:Rule"))


@pytest.mark.parametrize("offload", [False, True])
def test_memory_is_in_what_is_planned(offload: bool) -> None:
    config = _config(outer_rule=ADAM, offload=offload)
    [state] = _Run(config).loop.states
    assert Takes.planned(config, (23, 0, 0), False, "cpu").state == state.nbytes == 3 * 4 * 23
    four = dataclasses.replace(config, groups=4)
    [traffic, _] = Takes.planned(four, (20_000, 0, 0), False, "cpu").lines(four, "cpu")
    assert "(synchronous training: 0.12 MB in each" in traffic


def test_arguments_are_refused_before_anything_is_built() -> None:
    given = vars(_config()) | {"outer_rule": "no_such_module:Rule"}
    args = argparse.Namespace(**{f"pier_{name}": value for name, value in given.items()}, train_iters=18)
    with (
        mock.patch("pier_megatron.integration.refusals.check_sizes_and_intervals"),
        mock.patch("pier_megatron.integration.nccl_options.check"),
        pytest.raises(PierConfigError, match="no_such_module"),
    ):
        check_arguments(args)


def test_the_rule_of_the_page_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/api.md").read_text()
    [code] = re.findall(r"```python\n(# my_rules.py\n.*?)```", page, re.DOTALL)
    assert len(code.strip().splitlines()) <= 10
    (tmp_path / "my_rules.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    loop = _Run(_config(outer_rule="my_rules:HeavyBall", outer_lr=0.7, outer_momentum=0.6)).train(12).loop
    built_in = _Run(_config(outer_lr=0.7, outer_momentum=0.6)).train(12).loop
    assert not torch.allclose(loop.states[0].anchor, built_in.states[0].anchor, atol=1e-3)
    loop = _Run(_config(outer_rule="my_rules:HeavyBall", outer_lr=0.7, outer_momentum=0.0)).train(12).loop
    built_in = _Run(_config(outer_lr=0.7, outer_momentum=0.0)).train(12).loop
    torch.testing.assert_close(loop.states[0].anchor, built_in.states[0].anchor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (8, 8), (1, 5)])
def test_orthogonal_is_what_muon_takes(shape: tuple[int, int]) -> None:
    muon_utils = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found, wanted = orthogonalised(matrix), muon_utils.newton_schulz(matrix, 5)
    torch.testing.assert_close(found / found.norm(), wanted / wanted.norm(), rtol=0, atol=1e-6)


def test_orthogonal_has_length_one_and_nothing_stays_nothing() -> None:
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(3))
    found = orthogonalised(matrix)
    assert found.norm() == pytest.approx(1, rel=1e-6)
    # Its singular values are about the same, and it points where the matrix does.
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.5 * values.min()
    assert torch.cosine_similarity(found.flatten(), matrix.flatten(), dim=0) > 0.9
    assert torch.equal(orthogonalised(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_orthogonal_has_the_same_bits_whatever_the_script_sets() -> None:
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(3))
    usual = orthogonalised(matrix)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu"):
            assert torch.equal(orthogonalised(matrix), usual)
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        # After this PyTorch cannot say what it is set to as a whole.
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert torch.equal(orthogonalised(matrix), usual)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("rule", "is_refused"), [("muon", True), (None, False)])
def test_groups_that_round_otherwise_are_refused_at_the_start(rule: str | None, is_refused: bool) -> None:
    gathered = mock.Mock(result=lambda: torch.tensor([[7], [8]]))
    loop = _Run(_config(outer_rule=rule, groups=2)).loop
    refused = pytest.raises(PierConfigError, match=r"groups \[1\] round matrix products otherwise than group 0")
    with (
        mock.patch.object(GroupExchange, "gather", return_value=gathered),
        mock.patch("pier_megatron.outer.steps.sum_over"),
        mock.patch("pier_megatron.outer.steps.bits_of_products", wraps=bits_of_products) as bits,
        refused if is_refused else contextlib.nullcontext(),
    ):
        loop.rehearse()
    # It takes the memory and the kernels of the largest matrix.
    shapes = [shape for chunk in loop.states[0].chunks for shape in chunk.matrix_shapes]
    assert [call.args[1] for call in bits.call_args_list] == ([max(shapes, key=torch.Size.numel)] if is_refused else [])


def test_another_rule_is_another_run() -> None:
    snapshot = _Run(_config()).train(9).loop.snapshot()
    with pytest.raises(PierConfigError, match="whose outer steps are nesterov's, and this loop's are muon's"):
        _Run(_config(outer_rule="muon")).loop.restore(snapshot)
    # The default by its name.
    _Run(_config(outer_rule="nesterov")).loop.restore(snapshot)


def test_orthogonal_memory_is_in_what_is_planned() -> None:
    config = _config(outer_rule="muon", groups=2)
    taken = {matrix: Takes.planned(config, (10 * 600, 0, 0), False, "cpu", matrix=matrix).work for matrix in (600, 60)}
    # Chunks of four elements, but that a matrix is in one; six of them, with two vectors each, and copies of one matrix.
    assert taken == {matrix: 4 * matrix * (6 * 2 + 4) for matrix in taken}


@pytest.mark.parametrize(
    ("shape", "stretch", "begin", "found"),
    [
        ((6, 4), (0, 24), 0, (6, 4)),
        ((6, 4), (3, 22), 1, (4, 4)),
        ((6, 4), (8, 16), 0, (2, 4)),
        ((6, 4), (5, 7), None, None),
        ((6, 4), (5, 11), None, None),
        ((24,), (0, 24), None, None),
        ((2, 3, 4), (0, 24), None, None),
    ],
)
def test_whole_rows_of_a_stretch_are_a_matrix(
    shape: tuple[int, ...], stretch: tuple[int, int], begin: int | None, found: tuple[int, int] | None
) -> None:
    matrix = matrix_in(torch.zeros(shape), slice(*stretch))
    assert (None if matrix is None else (matrix.begin, tuple(matrix.shape))) == (None if found is None else (begin, found))
    at_the_ends = torch.nn.Parameter(torch.zeros(shape))
    at_the_ends.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
    assert matrix_in(at_the_ends, slice(*stretch)) is None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 40))
def test_chunks_and_fragments_divide_no_matrix(shapes: list[tuple[int, int]], fragments: int, chunk_numel: int) -> None:
    tensors = [tensor for shape in shapes for tensor in (torch.zeros(shape), torch.zeros(shape[0]))]
    matrices = [matrix_in(tensor, slice(0, tensor.numel())) for tensor in tensors]
    state = OuterState([Shards(tensors, matrices=matrices)], chunk_numel, fragments, cuts_matrices=False)
    numbers = torch.arange(1.0, state.numel + 1)
    for matrix in (matrix for chunk in state.chunks for matrix in chunk.matrices(chunk.of(numbers))):
        matrix.neg_()
    for (_, at), found in zip(state.slices(), matrices, strict=True):
        assert (numbers[at] < 0).all() == (found is not None)
    assert sum(chunk.numel for chunk in state.chunks) == state.numel
    longest = max(chunk_numel, max(tensor.numel() for tensor in tensors))
    assert all(0 < chunk.numel <= longest for chunk in state.chunks)


def test_pairs_are_refused() -> None:
    with pytest.raises(PierConfigError, match=rf"--pier-outer-rule {ADAM} with outer steps of 2 groups.*NoLoCo's rule"):
        _config(preset="noloco", groups=4, outer_rule=ADAM)
