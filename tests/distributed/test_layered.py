"""Layered gradient accumulation: other orders than Megatron's, equal to it to the last bit; their memory."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch

pytestmark = pytest.mark.processes

_LAYERED = " --pier-layered"
# Two pipeline ranks of two virtual stages, two replicas; 4 micro-batches of 2 samples.
_PIPELINE = "--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 "
_STEPS = "--train-iters 3 --global-batch-size 16 "
_OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
_PIER = (
    "--optimizer pier --pier-preset pier "
    "--pier-sync-interval 2 --pier-lazy-start-iters 2 --overlap-grad-reduce --overlap-param-gather "
)

# What is trained in both orders.
_BOTH = {
    "pier, 2 groups": _PIPELINE + _STEPS.replace("3", "4") + _PIER + "--pier-groups 2 --bf16",
    "overlapped": _PIPELINE + _STEPS + _OVERLAPPED + "--eval-interval 2 --eval-iters 2 --eval-global-batch-size 8",
    "ramp-up": _PIPELINE + _OVERLAPPED + "--train-samples 48 --step-batch-size-schedule 0:8,512:16 --eval-global-batch-size 16",
}
# Without a pipeline: 4 ranks, 4 micro-batches of 2 samples, a bucket for each layer.
_FIXED = "--train-iters 3 --global-batch-size 32 "
_LAYERS = "--num-layers 3 --untie-embeddings-and-output-weights " + _FIXED
_BY_LAYER = _OVERLAPPED + "--ddp-bucket-size 10000 "
_RECOMPUTED = "--recompute-granularity full --recompute-num-layers"
_DROPOUT = " --hidden-dropout 0.1 --attention-dropout 0.1"
_WITHOUT_PIPELINE = {
    "layers": _LAYERS + _BY_LAYER,
    "layers, TP 2": _LAYERS + _BY_LAYER + f"--tensor-model-parallel-size 2 --bf16 {_RECOMPUTED} 1 "
    "--recompute-method uniform --eval-interval 2 --eval-iters 2",
    "layers, nothing overlapped": _LAYERS + "--calculate-per-token-loss --timing-log-level 2",
    "layers, experts": _LAYERS + _BY_LAYER + "--expert-model-parallel-size 2 --num-experts 4 --moe-aux-loss-coeff 0.1 "
    "--moe-router-load-balancing-type aux_loss",
    "layers, ramp-up": _LAYERS.replace(_FIXED, "") + _BY_LAYER + "--train-samples 80 --step-batch-size-schedule 0:8,512:32",
    "layers, pier, muon": _LAYERS.replace("iters 3", "iters 4")
    + _PIER.replace("--overlap-param-gather", "")
    + "--pier-groups 2 --pier-inner-optimizer muon",
}
_TIED = _WITHOUT_PIPELINE["layers"].replace("--untie-embeddings-and-output-weights ", "")
_PROBES = ["weights", "pipeline"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    trainings = [
        Run(name + order.replace(" --pier-", ", "), argv + order, _PROBES)
        for name, argv in (_BOTH | _WITHOUT_PIPELINE).items()
        for order in ("", _LAYERED)
    ]
    trainings += [
        Run("no multiple of the ranks", f"{_PIPELINE} --train-iters 2 --global-batch-size 20{_LAYERED}", _PROBES),
        *(
            Run(
                f"dropout{order.replace(' --pier-', ', ')}",
                _WITHOUT_PIPELINE["layers"].replace("iters 3", "iters 2") + _DROPOUT + order,
            )
            for order in ("", _LAYERED)
        ),
        Run("two at a time", _WITHOUT_PIPELINE["layers"] + _LAYERED + " 2", _PROBES),
        Run("tied, dropping", _TIED + _DROPOUT + _LAYERED + " --save {directory}/tied --save-interval 100", _PROBES, saves=[2]),
        Run("tied, dropping, resumed", _TIED + _DROPOUT + _LAYERED + " --load {directory}/tied --ckpt-step 2", _PROBES),
        *(Run(f"tied{order.replace(' --pier-', ', ')}", _TIED + order, _PROBES) for order in ("", _LAYERED)),
    ]
    return launch(tmp_path_factory.mktemp("layered"), corpus, trainings)


def trained(run: Recorded, rank: int, iteration: int) -> str:
    """What a rank has done in a training step, without the evaluation that may follow it."""
    return " ".join(event for event in run.ranks[rank]["order"][iteration] if not event.startswith("E"))


@pytest.mark.parametrize("name", [*_BOTH, *_WITHOUT_PIPELINE])
def test_equal_to_the_last_bit(runs: dict[str, Recorded], name: str) -> None:
    depth_first, layered = runs[name], runs[f"{name}, layered"]
    assert depth_first.ranks[0]["layers"] != layered.ranks[0]["layers"]
    assert len(layered.losses) >= 2
    equal(layered, depth_first)


def equal(run: Recorded, expected: Recorded) -> None:
    """Compares two runs to the last bit."""
    assert run.losses == expected.losses
    assert run.grad_norms == expected.grad_norms
    assert run.ranks[-1].get("evaluated") == expected.ranks[-1].get("evaluated")
    assert run.differing_weights(expected) == []


def test_some_micro_batches_at_a_time_are_equal_too(runs: dict[str, Recorded]) -> None:
    equal(runs["two at a time"], runs["layers"])


def test_resumes_with_dropout(runs: dict[str, Recorded]) -> None:
    whole, resumed = runs["tied, dropping"], runs["tied, dropping, resumed"]
    assert resumed.losses == {iteration: loss for iteration, loss in whole.losses.items() if iteration > 2}
    assert resumed.differing_weights(whole) == []


def test_tied_embeddings_are_added_up_in_another_order(runs: dict[str, Recorded]) -> None:
    layered, expected = runs["tied, layered"], runs["tied"]
    assert layered.losses == pytest.approx(expected.losses, rel=1e-6)
    weights, those = layered.weights("final"), expected.weights("final")
    differing = [
        name for name, value in those.items() if isinstance(value, torch.Tensor) and not torch.equal(weights[name], value)
    ]
    assert differing
    for name in differing:
        torch.testing.assert_close(weights[name], those[name], rtol=1e-5, atol=1e-6)


_MEGATRONS = (
    " ".join(f"F0.{i} F1.{i} F2.{i} B2.{i} B1.{i} B0.{i}" for i in range(3)) + " F0.3 F1.3 F2.3 B2.3 R2 B1.3 R1 B0.3 R0"
)
_BY_LAYERS = (
    "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 F2.0 F2.1 F2.2 F2.3 B2.0 B2.1 B2.2 B2.3 R2 B1.0 B1.1 B1.2 B1.3 R1 "
    "B0.0 B0.1 B0.2 B0.3 R0"
)
_TWO_AT_A_TIME = (
    "F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 B2.0 B2.1 B1.0 B1.1 B0.0 B0.1 "
    "F0.2 F0.3 F1.2 F1.3 F2.2 F2.3 B2.2 B2.3 R2 B1.2 B1.3 R1 B0.2 B0.3 R0"
)


@pytest.mark.parametrize(
    ("name", "order"), [("layers", _MEGATRONS), ("layers, layered", _BY_LAYERS), ("two at a time", _TWO_AT_A_TIME)]
)
def test_order_of_layers(runs: dict[str, Recorded], name: str, order: str) -> None:
    for iteration in (2, 3):
        assert " ".join(runs[name].ranks[0]["layers"][iteration]) == order


@pytest.mark.parametrize(("name", "said"), [("layers, layered", 4), ("two at a time", 2), ("layers, ramp-up, layered", 4)])
def test_activations_of_as_many_micro_batches_as_was_said(runs: dict[str, Recorded], name: str, said: int) -> None:
    assert f"  activations of {said} micro-batches at once; Megatron's order keeps those of one." in runs[name].printed
    ways = [event[0] for iteration in runs[name].ranks[0]["layers"].values() for event in iteration if event[1:2] == "0"]
    assert max(itertools.accumulate({"F": 1, "B": -1, "R": 0}[way] for way in ways)) == said


def test_dropout_draws_other_numbers(runs: dict[str, Recorded]) -> None:
    depth_first, layered = runs["dropout"].losses, runs["dropout, layered"].losses
    assert layered != depth_first
    assert layered == pytest.approx(depth_first, rel=2e-2)


# By rank of the pipeline. Reductions are aligned: a rank starts its own as many passes later as there are ranks before it.
_DEPTH_FIRST = [
    "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 R1 B0.2 B0.3 R0",
    "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 R1 B0.3 R0",
]
_BREADTH_FIRST = [
    "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 B1.2 B1.3 R1 B0.0 B0.1 B0.2 B0.3 R0",
    "F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 B0.0 R1 B0.1 B0.2 B0.3 R0",
]


@pytest.mark.parametrize(("name", "order"), [("overlapped", _DEPTH_FIRST), ("overlapped, layered", _BREADTH_FIRST)])
def test_order(runs: dict[str, Recorded], name: str, order: list[str]) -> None:
    for iteration in (2, 3):
        assert [trained(runs[name], rank, iteration) for rank in (0, 2)] == order


@pytest.mark.parametrize(("name", "passes"), [("overlapped", 2), ("overlapped, layered", 4)])
def test_backward_passes_to_hide_the_reduction_of_the_later_stage_behind(
    runs: dict[str, Recorded], name: str, passes: int
) -> None:
    order = runs[name].ranks[0]["order"][2]
    assert sum(event.startswith("B0.") for event in order[order.index("R1") :]) == passes


def test_evaluation_has_groups_of_its_own(runs: dict[str, Recorded]) -> None:
    evaluated = [event for event in runs["overlapped, layered"].ranks[0]["order"][2] if event.startswith("E")]
    assert evaluated == ["E0.0", "E0.1", "E1.0", "E1.1"] * 2
    assert trained(runs["overlapped, layered"], 0, 3) == _BREADTH_FIRST[0]


def test_groups_grow_with_the_batch(runs: dict[str, Recorded]) -> None:
    run = runs["ramp-up, layered"]
    assert trained(run, 0, 2) == "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 R1 B0.0 B0.1 R0"
    assert trained(run, 0, 4) == _BREADTH_FIRST[0]


def test_micro_batches_need_be_no_multiple_of_the_ranks(runs: dict[str, Recorded]) -> None:
    order = runs["no multiple of the ranks"].ranks[0]["order"][2]
    assert order[:7] == ["F0.0", "F0.1", "F0.2", "F0.3", "F0.4", "F1.0", "F1.1"]


@pytest.mark.parametrize("name", _BOTH)
def test_activations_are_as_many_as_was_said(runs: dict[str, Recorded], name: str) -> None:
    printed = runs[f"{name}, layered"].printed
    said = re.search(r"of up to (\d+) of \d+ stage-micro-batches at once; depth-first, of (\d+) ", printed)
    assert said
    held = [max(runs[run].ranks[0]["held"].values()) for run in (f"{name}, layered", name)]
    assert held == [int(count) for count in said.groups()]
