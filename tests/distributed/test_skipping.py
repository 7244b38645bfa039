"""Micro-batches that skip pipeline stages: who visits what, and that nothing else is different."""

import re
from collections.abc import Sequence
from pathlib import Path

import gpt_reference
import oracle
import pytest
import torch
from launch import Recorded, Run, launch

from pier_megatron import PierConfig
from pier_megatron.experiments.skipping.pipeline.schedule import Pipeline

pytestmark = pytest.mark.processes

_SKIPPING = " --pier-skip-fraction 0.25"
_STOCK = "--train-iters 3 --use-distributed-optimizer "
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather "
_PIER = "--train-iters 6 --optimizer pier --pier-preset pier --pier-sync-interval 2 --pier-lazy-start-iters 2 --pier-groups "
# 8 micro-batches of 2 samples: four stages of two layers on four ranks; six of one layer on two ranks, in two replicas.
_1F1B = "--pipeline-model-parallel-size 4 --num-layers 8 --global-batch-size 16 "
_VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers 6 --num-virtual-stages-per-pipeline-rank 3 "
_INTERLEAVED = _VIRTUAL + "--global-batch-size 32 "
# Two steps of 2 micro-batches, two of 8; each rank begins its reductions when its own gradients are there.
_RAMP_UP = (
    "--train-samples 80 --step-batch-size-schedule 0:8,512:32 --eval-global-batch-size 32 --use-distributed-optimizer "
    + _VIRTUAL
    + _OVERLAPPED
    + "--no-align-grad-reduce"
    + _SKIPPING
)
_SAVING = "--save {directory}/skipped --save-interval 3 "
_EVALUATING = "--eval-interval 3 --eval-iters 1 --eval-global-batch-size 8 "
_EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-load-balancing-type none "
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_PROBES = ["weights", "pipeline"]

# What skips, with the pipeline that it is.
_PIPELINES = {
    "1F1B": Pipeline(4, 1, 8, 8),
    "depth-first": Pipeline(2, 3, 8, 2),
    "breadth-first": Pipeline(2, 3, 8, 8),
    "experts": Pipeline(2, 3, 8, 8),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("skipping")


@pytest.fixture(scope="module")
def runs(directory: Path, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    overlapped = _STOCK + _INTERLEAVED + _OVERLAPPED
    breadth_first = _PIER + "2 " + _INTERLEAVED + _OVERLAPPED + "--pier-layered" + _SKIPPING
    trainings = [
        Run("1F1B", _PIER + "1 " + _1F1B + _OVERLAPPED + _SKIPPING, [*_PROBES, "samples"]),
        Run("depth-first", overlapped + _SKIPPING, _PROBES),
        Run("recomputed, nothing hidden", _STOCK + _INTERLEAVED + _RECOMPUTED + _SKIPPING, _PROBES),
        Run("breadth-first", f"{breadth_first} {_SAVING}", [*_PROBES, "samples"]),
        Run("resumed", f"{breadth_first} --load {{directory}}/skipped --ckpt-step 3", _PROBES),
        Run("experts", _PIER + "1 " + _INTERLEAVED + _EXPERTS + "--pier-layered" + _SKIPPING, [*_PROBES, "samples"]),
        Run("ramp-up", _RAMP_UP, _PROBES),
        Run("evaluated in part", overlapped + _EVALUATING + _SKIPPING + " --pier-eval-skip 1,4", [*_PROBES, "samples"]),
        Run("trained whole, evaluated in part", _STOCK + _1F1B + _EVALUATING + "--pier-eval-skip 2", [*_PROBES, "samples"]),
        Run("off", overlapped + "--pier-skip-fraction 0", _PROBES),
        Run("stock", overlapped, _PROBES),
    ]
    return launch(directory, corpus, trainings)


def printed_table(run: Recorded) -> list[str]:
    return re.findall(r"^  stage +\d+ on rank \d+ ([.#]+)$", run.printed, re.MULTILINE)


def visited_layers(runs: dict[str, Recorded], name: str) -> list[list[int]]:
    """Layers that each micro-batch passes, by what was printed."""
    table = printed_table(runs[name])
    stage_of_layer = [stage for stage in range(len(table)) for _ in range(2 if name == "1F1B" else 1)]
    return [
        [layer for layer, stage in enumerate(stage_of_layer) if table[stage][index] == "#"] for index in range(len(table[0]))
    ]


def equal(first: Recorded, second: Recorded) -> bool:
    """Whether two runs are the same to the last bit where both have trained."""
    weights, expected = first.weights("final"), second.weights("final")
    assert weights.keys() == expected.keys()
    both = first.losses.keys() & second.losses.keys()
    assert len(both) >= 3
    return all(
        first.losses[iteration] == second.losses[iteration] and first.grad_norms[iteration] == second.grad_norms[iteration]
        for iteration in both
    ) and all(torch.equal(weights[key], value) for key, value in expected.items() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("name", _PIPELINES)
def test_who_visits_a_layer_is_as_was_said(runs: dict[str, Recorded], name: str) -> None:
    visited, layers = visited_layers(runs, name), 8 if name == "1F1B" else 6
    expected = [(layer, index) for index, passed in enumerate(visited) for layer in passed]
    pipelines = len(runs[name].ranks) // _PIPELINES[name].ranks
    assert 8 * layers - len(expected) == round(0.25 * 8 * layers)
    for iteration in (1, 3):
        found = [runs[name].ranks[rank]["visits"][iteration] for rank in range(len(runs[name].ranks))]
        assert sum(found, start=type(found[0])()) == dict.fromkeys(expected, pipelines)


@pytest.mark.parametrize("name", _PIPELINES)
def test_order_is_as_simulated(runs: dict[str, Recorded], name: str) -> None:
    pipeline = _PIPELINES[name]
    groups = [runs[name].of_group(group) for group in {rank["group"] for rank in runs[name].ranks}]
    for place, recorded in (item for ranks in groups for item in enumerate(ranks)):
        passes = pipeline.passes(place // (len(groups[0]) // pipeline.ranks))
        expected = [f"{'FB'[each.is_backward]}{each.stage // pipeline.ranks}.{each.micro_batch}" for each in passes]
        assert [event for event in recorded["order"][2] if event[0] in "FB"] == expected


@pytest.mark.parametrize(("name", "groups"), [("1F1B", 1), ("breadth-first", 2), ("experts", 1)])
def test_equal_to_models_without_what_is_skipped(runs: dict[str, Recorded], name: str, groups: int) -> None:
    config = PierConfig(6, groups=groups, preset="pier", sync_interval=2, lazy_start_iters=2)
    final = runs[name].weights("final")
    # Both replicas of the group with experts have the same table.
    replicas = 2 if name == "experts" else 1
    reference = oracle.train(runs[name], config, layers=visited_layers(runs, name) * replicas)
    assert oracle.largest_error(final, reference) < 5e-6
    whole = oracle.train(runs[name], config, layers=[range(8 if name == "1F1B" else 6)] * 8 * replicas)
    assert oracle.largest_error(final, whole) > 1e-4


def test_equal_to_the_last_bit(runs: dict[str, Recorded]) -> None:
    assert equal(runs["recomputed, nothing hidden"], runs["depth-first"])


def test_a_resume_goes_on_exactly(runs: dict[str, Recorded]) -> None:
    assert runs["resumed"].losses.keys() == {4, 5, 6}
    assert equal(runs["resumed"], runs["breadth-first"])


def test_off_is_stock(runs: dict[str, Recorded]) -> None:
    assert equal(runs["off"], runs["stock"])
    assert not equal(runs["depth-first"], runs["stock"])


def test_each_phase_of_a_ramp_up_has_its_table(runs: dict[str, Recorded]) -> None:
    said = re.findall(r"(\d+) of 6 x (\d+) \(stages x micro-batches\) = 25.0% are skipped", runs["ramp-up"].printed)
    assert said == [("3", "2"), ("12", "8")]
    for iteration, (skipped, micro_batches) in zip((1, 4), said, strict=True):
        visits = [sum(rank["visits"][iteration].values()) for rank in runs["ramp-up"].ranks]
        assert sum(visits) == 2 * (6 * int(micro_batches) - int(skipped))


@pytest.mark.parametrize(
    ("name", "visited", "reads"),
    # The last evaluation: 2 micro-batches of a replica through each of 3 virtual stages; 4 micro-batches through one.
    [("evaluated in part", (0, 2, 3, 5), 6), ("trained whole, evaluated in part", (0, 1, 2, 3, 6, 7), 4)],
)
def test_evaluation_leaves_out_what_was_asked_for(
    runs: dict[str, Recorded], name: str, visited: Sequence[int], reads: int
) -> None:
    run = runs[name]
    weights = gpt_reference.trainable(run.weights("final"))
    ranks = {rank["data_parallel_rank"]: rank["evaluation samples"][3][-reads:] for rank in run.ranks}
    # Each virtual stage has read the same.
    samples = {batch[0].sum().item(): batch for of_rank in ranks.values() for batch in of_rank}.values()
    losses = [gpt_reference.loss(weights, *batch, visited) for batch in samples]
    evaluated = run.ranks[-1]["evaluated"][3]["lm loss"]
    assert evaluated == pytest.approx(torch.stack(losses).mean().item(), abs=2e-6)


def test_evaluation_leaves_training_alone(runs: dict[str, Recorded]) -> None:
    assert equal(runs["evaluated in part"], runs["depth-first"])
