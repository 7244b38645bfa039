"""Distributed trainings against ``pier_megatron.reference``: one process, float64, the same samples.

The reference shares no code with the distributed implementation below the schedules: its GPT, its gradients, their averaging
and the outer step are written out in plain PyTorch.
"""

import math
from pathlib import Path

import muon_reference
import oracle
import pytest
from launch import Recorded, Run, launch

from pier_megatron import PierConfig

pytestmark = pytest.mark.processes

_CONFIG = {"preset": "pier", "train_iters": 9, "groups": 2, "sync_interval": 3, "lazy_start_iters": 3}
_PIER = "--train-iters 12 --optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 3 --pier-lazy-start-iters 3 "
_SHORTER = _PIER.replace("--train-iters 12", "--train-iters 9")
_PROBES = ["weights", "samples"]

# Weights move by 0.07 in these runs; FP32 arithmetic in another order moves them by 1e-6.
_TOLERANCE = 5e-6

_LAYOUTS = {
    "TP 2": "--tensor-model-parallel-size 2 --global-batch-size 8",
    "PP 2": "--pipeline-model-parallel-size 2 --global-batch-size 8 --overlap-grad-reduce --overlap-param-gather",
    "EP 2": "--expert-model-parallel-size 2 --num-experts 4 --moe-router-load-balancing-type none --global-batch-size 16",
    "inner DP 2": "--global-batch-size 16 --overlap-grad-reduce --overlap-param-gather",
    "PP 2 interleaved overlapped": "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 8 "
    "--num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce --overlap-param-gather "
    "--overlap-param-gather-with-optimizer-step --ckpt-format torch",
    "loss per token": "--global-batch-size 16 --calculate-per-token-loss",
    "two instances in a group": "--global-batch-size 16 --num-distributed-optimizer-instances 2 --overlap-grad-reduce",
    "mean in collective": "--global-batch-size 16 --ddp-average-in-collective",
}

# Layouts whose losses every supported release reproduces: test_releases.py.
_GOLDEN = {"TP 2": "tp2", "PP 2": "pp2", "EP 2": "ep2"}

# Megatron's step for iterations that are skipped looks for a mask that the data set here does not make.
_SKIPPING = "--pier-preset diloco --iterations-to-skip 3 6 9 --no-create-attention-mask-in-dataloader"

# Exchanges that are hidden or spread over the interval, as far as Megatron has a part in it (tests/loop has all crossings); 11
# iterations, so that the last interval is cut short.
_EXCHANGES = {
    "overlapped by 2": {"overlap": 2, "train_iters": 11},
    "offloaded, 2 fragments overlapped by 1": {"offload": True, "fragments": 2, "overlap": 1},
}
# With orthogonal steps: settings, and the layout.
_ORTHOGONAL = {
    "TP 2": ({}, _LAYOUTS["TP 2"]),
    "tied, 2 fragments overlapped by 2": ({"fragments": 2, "overlap": 2, "offload": True}, _LAYOUTS["PP 2"]),
    "EP 2": ({}, _LAYOUTS["EP 2"]),
    "inner DP 2": ({}, _LAYOUTS["inner DP 2"]),
}
# What tensor-parallel ranks divide.
_DIVIDED = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
_SITES = {"groups": 4, "sites": 2, "site_interval": 1, "overlap": 1, "train_iters": 11}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    trainings = [Run(name, f"{_PIER if name in _GOLDEN else _SHORTER} {layout}", _PROBES) for name, layout in _LAYOUTS.items()]
    trainings.append(Run("diloco", f"{_SHORTER} --pier-preset diloco {_LAYOUTS['TP 2']}", _PROBES))
    trainings += [
        Run(name, f"{_flags(settings)} {_LAYOUTS['TP 2']}", [*_PROBES, "fragments"]) for name, settings in _EXCHANGES.items()
    ]
    trainings += [
        Run(f"orthogonal, {name}", f"{_flags({'outer_rule': 'muon'} | settings)} {layout}", [*_PROBES, "fragments", "matrices"])
        for name, (settings, layout) in _ORTHOGONAL.items()
    ]
    trainings.append(Run("sites", f"{_flags(_SITES)} {_LAYOUTS['inner DP 2']}", _PROBES))
    # Both copies of the tied embedding must take their outer step at the same time.
    trainings.append(Run("tied", f"{_flags(_TIED)} {_LAYOUTS['PP 2']}", [*_PROBES, "fragments"]))
    trainings.append(Run("skipped", f"{_SHORTER} {_SKIPPING} {_LAYOUTS['inner DP 2']}", _PROBES))
    return launch(tmp_path_factory.mktemp("oracle"), corpus, trainings)


_TIED = {"fragments": 3, "overlap": 2}


def _flags(settings: dict[str, object]) -> str:
    """The flags for settings of an exchange."""
    flags = {
        name: f"--train-iters {value}" if name == "train_iters" else f"--pier-{name.replace('_', '-')} {value}"
        for name, value in settings.items()
    }
    return " ".join([_SHORTER, *flags.values()]).replace("--pier-offload True", "--pier-offload")


def error(run: Recorded, **settings: object) -> float:
    reference = oracle.train(run, PierConfig(**(_CONFIG | settings)))
    return oracle.largest_error(run.weights("final"), reference)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_layout_equals_the_reference(runs: dict[str, Recorded], layout: str) -> None:
    assert error(runs[layout], train_iters=12 if layout in _GOLDEN else 9) < _TOLERANCE


@pytest.mark.parametrize("layout", _GOLDEN)
def test_golden_trajectory(runs: dict[str, Recorded], layout: str) -> None:
    oracle.check_golden(_GOLDEN[layout], runs[layout], _PIER + _LAYOUTS[layout])


def test_another_preset_equals_the_reference(runs: dict[str, Recorded]) -> None:
    assert error(runs["diloco"], preset="diloco") < _TOLERANCE


@pytest.mark.parametrize("exchange", _EXCHANGES)
def test_exchange_equals_the_reference(runs: dict[str, Recorded], exchange: str) -> None:
    assert error(runs[exchange], **_EXCHANGES[exchange]) < _TOLERANCE


@pytest.mark.parametrize("name", _ORTHOGONAL)
def test_orthogonal_steps_equal_the_reference(runs: dict[str, Recorded], name: str) -> None:
    settings, _ = _ORTHOGONAL[name]
    # Newton-Schulz iterations magnify what is small.
    assert error(runs[f"orthogonal, {name}"], outer_rule="muon", **settings) < 2 * _TOLERANCE


@pytest.mark.parametrize("name", _ORTHOGONAL)
def test_matrices_are_whole_but_for_what_ranks_divide(runs: dict[str, Recorded], name: str) -> None:
    run = runs[f"orthogonal, {name}"]
    numbers, found = oracle.gpt_reference.trainable(run.weights("matrices")), oracle.blocks_of(run)
    assert not found["embedding.word_embeddings.weight"]
    for parameter, blocks in found.items():
        if not muon_reference.is_matrix(parameter, numbers[parameter]):
            continue
        *stack, _, columns = numbers[parameter].shape
        matrices = math.prod(stack)
        if name == "inner DP 2":
            # Megatron divides its buffer in the middle, somewhere in a row.
            assert {block.shape[1] for block in blocks} <= {columns}
            assert matrices <= len(blocks) <= matrices + 1
            assert (numbers[parameter] < 0).sum() in (0, columns)
        elif "position" not in parameter:
            assert len(blocks) == matrices * (2 if name == "TP 2" and parameter.endswith(_DIVIDED) else 1)
            assert (numbers[parameter] >= 0).all()


def test_sites_equal_the_reference(runs: dict[str, Recorded]) -> None:
    assert error(runs["sites"], **_SITES) < _TOLERANCE


def test_tied_embeddings_across_pipeline_stages_equal_the_reference(runs: dict[str, Recorded]) -> None:
    assert error(runs["tied"], **_TIED) < _TOLERANCE


def test_transfers_between_pipeline_stages_do_not_wait_for_an_exchange(runs: dict[str, Recorded]) -> None:
    waits = {name: {rank["P2P waits for the device"] for rank in runs[name].ranks} for name in ("tied", "PP 2")}
    assert waits == {"tied": {False}, "PP 2": {True}}


def test_iterations_that_megatron_skips_equal_the_reference(runs: dict[str, Recorded]) -> None:
    # The last one of the lazy start, one with an outer step, and the last of all.
    config = PierConfig(**_CONFIG | {"preset": "diloco"})
    found = oracle.train(runs["skipped"], config, {3, 6, 9})
    assert oracle.largest_error(runs["skipped"].weights("final"), found) < _TOLERANCE


def test_groups_train_on_different_samples(runs: dict[str, Recorded]) -> None:
    first, second = (runs["TP 2"].of_group(group)[0]["samples"][5][0][0] for group in (0, 1))
    assert (first != second).any()
