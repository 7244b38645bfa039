"""The seven points of the contract, on real Megatron in real processes.

Every check is also run on a training with the bug that it guards against, and must fail there.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch

from pier_megatron import PierConfig

pytestmark = pytest.mark.processes

_STOCK = "--train-iters 8 --exit-interval 6 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
_PIER = "--train-iters 8 --optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 2 --pier-lazy-start-iters 4"
_PIER_BY_SAMPLES = _PIER.replace("--train-iters 8", "--train-samples 64")
_TP2 = "--tensor-model-parallel-size 2 --global-batch-size 8 "
_DP2 = "--global-batch-size 16 "
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather "
_ONE_GROUP = (
    "--train-iters 5 --optimizer pier --pier-preset pier --pier-groups 1 --pier-sync-interval 1 --pier-lazy-start-iters 1 "
    "--pier-outer-lr 1 --pier-outer-momentum 0"
)
_FOUR_GROUPS = "--global-batch-size 8 --train-iters 8 --exit-interval 5 --clip-grad 0 "
_FOUR_PIER = "--optimizer pier --pier-preset pier --pier-groups 4 --pier-sync-interval 4 --pier-lazy-start-iters 4"
_FOUR_STOCK = "--use-distributed-optimizer --num-distributed-optimizer-instances 4"
_PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8 "
_NO_LAZY_START = (
    "--train-iters 6 --optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 3 --pier-lazy-start-iters 0 "
)
_FP16 = "--global-batch-size 16 --fp16 --initial-loss-scale 1024 "
_UNCHECKED = "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled "

# Faults that bring copies of a parameter apart, and where.
_DRIFTS = {
    "a tensor-parallel copy drifts": _TP2 + "--bf16 ",
    "a tied copy drifts": _PP2 + "--bf16 ",
    "a gather goes wrong": _DP2 + "--bf16 ",
}

_RUNS = [
    Run("stock", _TP2 + "--bf16 " + _STOCK),
    Run("pier", _TP2 + "--bf16 --eval-interval 4 " + _PIER, ["main", "inner", "outer", "stale"]),
    Run("overlap", _DP2 + "--bf16 " + _OVERLAP + _PIER, ["main", "stale"]),
    Run("overlap stock", _DP2 + "--bf16 " + _OVERLAP + _STOCK),
    Run("signal", _TP2 + "--bf16 --exit-signal-handler " + _PIER, ["main"], ["a signal behind the question"]),
    Run("between", _TP2 + "--bf16 --eval-interval 7 " + _PIER, ["main"]),
    Run("iterations", _TP2 + _PIER + " --lr-decay-style linear --lr-decay-iters 8 --lr-warmup-iters 2", ["main"]),
    Run("samples", _TP2 + _PIER_BY_SAMPLES + " --lr-decay-style linear --lr-decay-samples 64 --lr-warmup-samples 16", ["main"]),
    Run("one stock", _TP2 + "--bf16 --train-iters 5 --use-distributed-optimizer", ["main"]),
    Run("one", _TP2 + "--bf16 " + _ONE_GROUP, ["main"]),
    Run("four", _FOUR_GROUPS + _FOUR_PIER, ["gradients"]),
    Run("four stock", _FOUR_GROUPS + _FOUR_STOCK, ["gradients"]),
    Run("overflow", _FP16 + _PIER, ["main", "skipped", "stale"], ["overflow in group 1 at 5 and 6"]),
    Run(
        "logged",
        _PP2 + "--fp16 --initial-loss-scale 1024 --log-interval 2 " + _NO_LAZY_START,
        ["skipped"],
        ["overflow in group 1 at 1 and 2"],
    ),
    Run("not finite", _DP2 + _UNCHECKED + _PIER, ["main", "inner", "outer", "stale"], ["nan in group 1 at 6"]),
    *(Run(fault, argv + _NO_LAZY_START, ["main"], [fault], fails=True) for fault, argv in _DRIFTS.items()),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    return launch(tmp_path_factory.mktemp("contract"), corpus, _RUNS)


def fails(check: Callable[..., None], *arguments: object) -> bool:
    """Whether a check sees that something is wrong."""
    try:
        check(*arguments)
    except AssertionError:
        return True
    return False


def pairs(run: Recorded, key: str, iteration: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same part of the model in group 0 and in group 1."""
    return [(one[key][iteration], other[key][iteration]) for one, other in zip(run.of_group(0), run.of_group(1), strict=True)]


def groups_are_equal(run: Recorded, iteration: int) -> None:
    for one, other in pairs(run, "main", iteration):
        assert torch.equal(one, other)


# 1. G = 1, H = 1, eta = 1, mu = 0 is stock Megatron, bit for bit.


def test_one_group_with_unit_outer_steps_is_stock_megatron(runs: dict[str, Recorded]) -> None:
    assert runs["one"].losses == runs["one stock"].losses
    assert runs["one"].grad_norms == runs["one stock"].grad_norms
    for one, stock in zip(runs["one"].ranks, runs["one stock"].ranks, strict=True):
        assert all(torch.equal(one["main"][t], stock["main"][t]) for t in range(1, 6))


# 2. The lazy start is bitwise stock Megatron.


def lazy_start_is_stock(pier: Recorded, stock: Recorded) -> None:
    assert [pier.losses[t] for t in range(1, 5)] == [stock.losses[t] for t in range(1, 5)]
    assert [pier.grad_norms[t] for t in range(1, 5)] == [stock.grad_norms[t] for t in range(1, 5)]


@pytest.mark.parametrize(("pier", "stock"), [("pier", "stock"), ("overlap", "overlap stock")])
def test_lazy_start_is_stock_megatron(runs: dict[str, Recorded], pier: str, stock: str) -> None:
    lazy_start_is_stock(runs[pier], runs[stock])
    assert runs[pier].losses[6] != runs[stock].losses[6]


def test_training_by_samples_is_training_by_iterations(runs: dict[str, Recorded]) -> None:
    assert runs["samples"].losses == runs["iterations"].losses
    for one, other in zip(runs["samples"].ranks, runs["iterations"].ranks, strict=True):
        assert one["main"].keys() == other["main"].keys() == set(range(1, 9))
        assert all(torch.equal(one["main"][t], other["main"][t]) for t in range(1, 9))


# 3. The gradient is the mean over the samples of the averaging domain.


def gradients_are_means_of_their_domain(run: Recorded, stock: Recorded) -> None:
    # At the first local iteration the groups still have equal parameters: the mean over the groups of their gradients is
    # then the gradient that synchronous training computes from the same samples.
    mean = torch.stack([rank["gradients"][5] for rank in run.ranks]).mean(0)
    torch.testing.assert_close(mean, stock.ranks[0]["gradients"][5], rtol=1e-4, atol=1e-6)


def test_gradient_is_the_mean_over_the_averaging_domain(runs: dict[str, Recorded]) -> None:
    gradients_are_means_of_their_domain(runs["four"], runs["four stock"])
    assert not torch.equal(runs["four"].ranks[0]["gradients"][5], runs["four"].ranks[1]["gradients"][5])


def test_grad_norm_keeps_its_scale_at_the_switch(runs: dict[str, Recorded]) -> None:
    # With the published code's mean it drops by the number of groups, here from about 1.5 x to less than half.
    before, after = (runs["four"].grad_norms[iteration] for iteration in (4, 5))
    assert 0.7 < after / before < 2


# 4. After an outer step the model computes with the new parameters, rounded.


def nothing_is_stale(run: Recorded) -> None:
    # With --overlap-param-gather, Megatron gathers after its own steps no earlier than in the next forward.
    for rank in run.ranks:
        assert [rank["stale"][iteration] for iteration in (6, 8)] == [0, 0]


@pytest.mark.parametrize("name", ["pier", "overlap", "overflow", "not finite"])
def test_model_computes_with_the_new_parameters(runs: dict[str, Recorded], name: str) -> None:
    nothing_is_stale(runs[name])


# 5. Skipped steps and numbers that are not finite.


def test_groups_meet_though_one_skipped_its_step(runs: dict[str, Recorded]) -> None:
    run = runs["overflow"]
    skipped = [run.of_group(group)[0]["skipped"] for group in (0, 1)]
    assert [t for t, skip in skipped[0].items() if skip] == []
    assert [t for t, skip in skipped[1].items() if skip] == [5, 6]
    for iteration in (6, 8):
        groups_are_equal(run, iteration)
    assert all(one.isfinite().all() for one, _ in pairs(run, "main", 8))


def test_each_group_logs_its_own_loss_and_outer_steps_the_mean_over_the_groups(runs: dict[str, Recorded]) -> None:
    run = runs["logged"]
    # The printing group skips iterations.
    last_stages = [run.of_group(group)[-1] for group in (0, 1)]
    assert last_stages[1] is run.ranks[-1]
    assert [t for t, skip in last_stages[1]["skipped"].items() if skip] == [1, 2]
    done = [{t: rank["own losses"][t]["lm loss"] for t, skip in rank["skipped"].items() if not skip} for rank in last_stages]
    own = done[1]
    assert run.printed_losses == pytest.approx({4: (own[3] + own[4]) / 2, 6: (own[5] + own[6]) / 2}, rel=1e-6)
    lines = re.findall(r" iteration +(\d+)/ .* losses and norms: group 1 of 2 \|$", run.printed, re.MULTILINE)
    assert lines == ["1", "2", "4", "6"]
    said = re.findall(r"loss of groups \(mean, min, max\): \((\S+), (\S+), (\S+)\)", "\n".join(run.ranks[-1]["said"]))
    reported = [[float(number) for number in numbers] for numbers in said]
    for found, since in zip(reported, ((1, 2), (3, 4, 5)), strict=True):
        of_groups = [sum(group[t] for t in since) / len(since) for group in done if all(t in group for t in since)]
        expected = [sum(of_groups) / len(of_groups), min(of_groups), max(of_groups)]
        assert found == pytest.approx(expected, abs=1e-4)


def nothing_is_poisoned(run: Recorded) -> None:
    for rank in run.ranks:
        for key in ("anchor", "momentum"):
            assert all(buffer.isfinite().all() for iteration in rank[key].values() for buffer in iteration)


def test_group_that_is_not_finite_is_left_out(runs: dict[str, Recorded]) -> None:
    run = runs["not finite"]
    nothing_is_poisoned(run)
    for iteration in (6, 8):
        groups_are_equal(run, iteration)


def outer_step_takes_the_mean_of(run: Recorded, groups: tuple[int, ...], iteration: int, before: int) -> None:
    """Compares one outer step with the formula, in float64, part by part of the model."""
    config = PierConfig(8, groups=2, preset="pier", sync_interval=2, lazy_start_iters=4)
    mu, eta = config.momentum_at(iteration), config.learning_rate_at(iteration)
    for parts in zip(*(run.of_group(group) for group in (0, 1)), strict=True):
        for buffer in range(len(parts[0]["anchor"][before])):
            anchor, momentum = (parts[0][key][before][buffer].double() for key in ("anchor", "momentum"))
            delta = torch.stack([anchor - parts[group]["inner"][iteration][buffer].double() for group in groups]).mean(0)
            momentum = mu * momentum + delta
            expected = anchor - eta * (delta + mu * momentum)
            for part in parts:
                assert_close = torch.testing.assert_close
                assert_close(part["anchor"][iteration][buffer].double(), expected, rtol=1e-5, atol=1e-7)
                assert_close(part["momentum"][iteration][buffer].double(), momentum, rtol=1e-4, atol=1e-6)


def test_outer_step_takes_the_mean_of_the_groups_that_are_finite(runs: dict[str, Recorded]) -> None:
    outer_step_takes_the_mean_of(runs["pier"], (0, 1), iteration=6, before=4)
    outer_step_takes_the_mean_of(runs["pier"], (0, 1), iteration=8, before=6)
    outer_step_takes_the_mean_of(runs["not finite"], (0,), iteration=6, before=4)
    assert fails(outer_step_takes_the_mean_of, runs["pier"], (0,), 6, 4)


def test_groups_end_together_whenever_one_receives_a_signal(runs: dict[str, Recorded]) -> None:
    assert [max(rank["main"]) for rank in runs["signal"].ranks] == [6] * 4
    groups_are_equal(runs["signal"], 6)


# 6. Evaluation sees synchronised parameters.


def validation_is_synchronised(run: Recorded) -> None:
    for one, other in zip(run.of_group(0), run.of_group(1), strict=True):
        assert one["validation"].keys() == other["validation"].keys()
        assert one["validation"]
        assert all(torch.equal(one["validation"][prefix], other["validation"][prefix]) for prefix in one["validation"])


def test_evaluation_sees_synchronised_parameters(runs: dict[str, Recorded]) -> None:
    validation_is_synchronised(runs["pier"])
    validation_is_synchronised(runs["between"])


def evaluation_at_7_sees_the_outer_step_after_6(run: Recorded) -> None:
    for rank in run.ranks:
        assert torch.equal(rank["validation"]["iteration 7"], rank["main"][6])


def test_evaluation_between_outer_steps_sees_the_anchor(runs: dict[str, Recorded]) -> None:
    evaluation_at_7_sees_the_outer_step_after_6(runs["between"])
    # Training continues as if nobody had looked.
    for one, other in zip(runs["between"].ranks, runs["pier"].ranks, strict=True):
        assert all(torch.equal(one["main"][t], other["main"][t]) for t in range(1, 9))


def test_groups_drift_in_between(runs: dict[str, Recorded]) -> None:
    for iteration in (6, 8):
        groups_are_equal(runs["pier"], iteration)
    assert all(fails(groups_are_equal, runs["pier"], iteration) for iteration in (5, 7))


# What a group holds several copies of stays equal; every launch compares all of it in the end.


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a tensor-parallel copy drifts", r"\S+ on tensor-parallel ranks \[0, 1\]"),
        ("a tied copy drifts", r"embedding\.word_embeddings\.weight on pipeline-parallel ranks \[0, 1\]"),
        ("a gather goes wrong", r"\S+ on data-parallel ranks \[0, 1\]"),
    ],
)
def test_copies_that_differ_are_seen(runs: dict[str, Recorded], fault: str, said: str) -> None:
    assert re.match(f"CopiesDifferError: After iteration 3 copies of a parameter differ: {said}", runs[fault].error)
    # At once, not at the outer step after it.
    assert all(max(rank["main"]) <= 3 for rank in runs[fault].ranks)
