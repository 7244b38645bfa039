"""Runs that load the checkpoint of another run: other numbers of groups, other layouts, stock Megatron."""

from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch

pytestmark = pytest.mark.processes

# FP32, so that what is shown through the model's weights is exact.
_PIER = (
    "--train-iters 9 --optimizer pier --pier-preset pier "
    "--pier-sync-interval 3 --pier-lazy-start-iters 3 --global-batch-size 8 "
)
_CHANGED = "--pier-override-checkpoint "
_FROM_FOUR = "--load {directory}/four --ckpt-step "
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable "
_BY_ONE_RANK = "--distrib-optim-fully-reshardable-mem-efficient "
# Several, each with padding.
_BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 5000 "
_TP2, _PP2 = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
_AT_THE_END = " --save-interval 9"
_FROM_TP2 = "--load {directory}/tp --ckpt-step 5"
# Padding of two tensor-parallel ranks: the padded vocabulary takes part in the loss.
_PADDED = "--make-vocab-size-divisible-by 32 "
# The first stage has no experts, so its ranks have one optimizer, those of the second have two.
_MOE = (
    _PIER + "--pier-groups 2 --num-layers 4 --num-experts 2 --moe-layer-freq ([0]*2+[1]*2) "
    "--moe-router-load-balancing-type none --disable-bias-linear "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.05 "
)
_FROM_MOE = "--load {directory}/moe --ckpt-step 6"
_STOCK = "--train-iters 9 --use-distributed-optimizer --global-batch-size 8 "
_OUTER = ["outer weights"]
_LAYER_WISE = _PIER + "--pier-inner-optimizer muon --muon-fp32-matmul-prec high --bf16 --use-distributed-optimizer "

_NAN = "nan in group 1 at 5"
_BAD = _PIER + "--pier-groups 4 --no-check-for-nan-in-loss-and-grad --rerun-mode disabled "
_TO_THREE = f"--pier-groups 3 --override-opt_param-scheduler {_CHANGED} --load {{directory}}/bad --ckpt-step 5"

# After one more iteration than that of the checkpoint.
_SOON, _SOON_AFTER_6 = "--exit-interval 6 ", "--exit-interval 7 "

# In this order: what a launch leaves on disk, the next ones load.
_LAUNCHES = (
    (
        4,
        [
            Run("four", _PIER + "--pier-groups 4 --save {directory}/four" + _AT_THE_END, ["main", "moments"], saves=[5, 6]),
            Run("four again", _PIER + _SOON + "--pier-groups 4 " + _FROM_FOUR + "5", _OUTER),
            Run("inner DP", _PIER + _SOON + "--pier-groups 2 " + _CHANGED + _FROM_FOUR + "5", _OUTER),
            Run(
                "two by TP",
                _PIER + _TP2 + _RESHARDABLE + _BUCKETS + "--pier-groups 2 --save {directory}/tp" + _AT_THE_END,
                ["main", "moments"],
                saves=[5],
            ),
            Run("TP 2 at 5", _PIER + _TP2 + "--pier-groups 2 " + _FROM_TP2, ["main", "moments", *_OUTER]),
            Run("TP 2 to PP 2 at 5", _PIER + _SOON + _PP2 + _PADDED + "--pier-groups 2 " + _CHANGED + _FROM_TP2, _OUTER),
            Run(
                "inner DP 2",
                _PIER + _RESHARDABLE + _BY_ONE_RANK + "--pier-groups 2 --save {directory}/dp" + _AT_THE_END,
                ["main", "moments"],
                saves=[5],
            ),
            Run("inner DP 2 at 5", _PIER + "--pier-groups 2 --load {directory}/dp --ckpt-step 5", ["main", "moments"]),
            Run(
                "other buckets at 5",
                _PIER + _SOON + _BUCKETS + "--pier-groups 2 --no-load-rng --load {directory}/dp --ckpt-step 5",
                [],
            ),
            Run("MoE", _MOE + _PP2 + _RESHARDABLE + "--save {directory}/moe" + _AT_THE_END, saves=[6]),
            Run("MoE at 6", _MOE + _PP2 + _FROM_MOE, _OUTER),
            Run("MoE, PP 2 to 1 at 6", _MOE + _SOON_AFTER_6 + _CHANGED + _FROM_MOE, _OUTER),
            Run("layer-wise", _LAYER_WISE + "--pier-groups 2 --save {directory}/layer-wise" + _AT_THE_END, saves=[5]),
            Run(
                "layer-wise again", _LAYER_WISE + _SOON + "--pier-groups 2 --load {directory}/layer-wise --ckpt-step 5", _OUTER
            ),
            Run(
                "layer-wise to four",
                _LAYER_WISE + _SOON + "--pier-groups 4 --load {directory}/layer-wise --ckpt-step 5 " + _CHANGED,
                _OUTER,
            ),
            Run("a group bad", _BAD + "--save {directory}/bad" + _AT_THE_END, ["main", "moments"], [_NAN], saves=[5]),
            Run("stock goes on", _STOCK + _FROM_FOUR + "6", []),
            Run("stock goes on, drifted", _STOCK + _SOON + _FROM_FOUR + "5", ["weights"]),
            Run("stock", _STOCK + "--exit-interval 6 --save {directory}/stock --save-interval 3"),
            Run("from stock", _PIER + "--exit-interval 4 --pier-groups 4 --load {directory}/stock --ckpt-step 3", _OUTER),
            Run(
                "from stock, lazy",
                _PIER + "--pier-groups 4 --load {directory}/stock --ckpt-step 3 --pier-lazy-start-iters 6 --exit-interval 6",
                [],
            ),
        ],
    ),
    (
        2,
        [
            Run("four to two", _PIER + "--pier-groups 2 " + _CHANGED + _FROM_FOUR + "5", ["start"]),
            Run(
                "four to two, first",
                _PIER + _SOON + "--pier-groups 2 --pier-load-inner-state first " + _CHANGED + _FROM_FOUR + "5",
                ["start"],
            ),
            Run(
                "two", _PIER + "--pier-groups 2 --save {directory}/two --save-interval 5 --exit-interval 5", ["main", "moments"]
            ),
        ],
    ),
    (3, [Run("bad to three", _BAD.replace("size 8", "size 12") + _SOON + _TO_THREE, ["start"])]),
    (
        4,
        [Run("two to four", _PIER + _SOON + "--pier-groups 4 " + _CHANGED + "--load {directory}/two --ckpt-step 5", ["start"])],
    ),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    directory, found = tmp_path_factory.mktemp("reshape"), {}
    for world_size, planned in _LAUNCHES:
        found |= launch(directory, corpus, planned, world_size)
    return found


def start(run: Recorded, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    record = run.of_group(group)[0]["start"]
    return record["main"], record["moments"]


def end_of(run: Recorded, group: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
    record = run.of_group(group)[0]
    return record["main"][iteration], record["moments"][iteration]


def models_are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items() if isinstance(tensor, torch.Tensor))


# Other numbers of groups.


def test_merged_groups_go_on_with_the_mean_of_their_parents(runs: dict[str, Recorded]) -> None:
    for group in (0, 1):
        parents = [end_of(runs["four"], parent, 5) for parent in (2 * group, 2 * group + 1)]
        assert not torch.equal(parents[0][0], parents[1][0])
        for loaded, own, other in zip(start(runs["four to two"], group), *parents, strict=True):
            torch.testing.assert_close(loaded, (own + other) / 2, rtol=1e-6, atol=1e-12)


def test_groups_that_overlap_take_the_mean_of_those_that_are_finite(runs: dict[str, Recorded]) -> None:
    # Three of four: of 0 and 1, of 1 and 2, of 2 and 3.
    saved = [end_of(runs["a group bad"], group, 5) for group in range(4)]
    assert not saved[1][0].isfinite().all()
    for group, parents in enumerate([saved[:1], saved[2:3], saved[2:]]):
        for loaded, of_parents in zip(start(runs["bad to three"], group), zip(*parents, strict=True), strict=True):
            torch.testing.assert_close(loaded, torch.stack(of_parents).mean(0), rtol=1e-6, atol=1e-12)
    for group in (0, 1):
        assert f"Pier: group {group} takes the mean without saved group 1, not finite" in runs["bad to three"].printed


def test_merged_groups_go_on_with_the_first_on_demand(runs: dict[str, Recorded]) -> None:
    for group in (0, 1):
        for loaded, first in zip(start(runs["four to two, first"], group), end_of(runs["four"], 0, 5), strict=True):
            assert torch.equal(loaded, first)


def test_split_groups_go_on_with_their_parent(runs: dict[str, Recorded]) -> None:
    for group in range(4):
        for loaded, parent in zip(start(runs["two to four"], group), end_of(runs["two"], group // 2, 5), strict=True):
            assert torch.equal(loaded, parent)


@pytest.mark.parametrize(("name", "source"), [("inner DP", "four again"), ("layer-wise to four", "layer-wise again")])
@pytest.mark.parametrize("buffer", ["anchor", "momentum"])
def test_outer_state_carries_over_to_other_groups(runs: dict[str, Recorded], name: str, source: str, buffer: str) -> None:
    expected, found = runs[source].weights(buffer), runs[name].weights(buffer)
    models_are_equal(expected, found)
    assert any(tensor.abs().max() > 0 for tensor in expected.values() if isinstance(tensor, torch.Tensor))


# Other layouts.


@pytest.mark.parametrize(
    ("name", "reference", "stop"), [("TP 2 to PP 2 at 5", "TP 2 at 5", 5), ("MoE, PP 2 to 1 at 6", "MoE at 6", 6)]
)
def test_run_goes_on_in_another_layout(runs: dict[str, Recorded], name: str, reference: str, stop: int) -> None:
    for buffer in ("anchor", "momentum"):
        models_are_equal(runs[reference].weights(buffer), runs[name].weights(buffer))
    # The groups' own parameters too: they train on the same samples between outer steps, and on all of them after one.
    assert runs[name].losses[stop + 1] == pytest.approx(runs[reference].losses[stop + 1], rel=1e-6)
    assert runs[reference].losses[stop + 1] != pytest.approx(runs[reference].losses[stop + 2], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "whole"), [("TP 2 at 5", "two by TP"), ("inner DP 2 at 5", "inner DP 2"), ("other buckets at 5", "inner DP 2")]
)
def test_a_checkpoint_that_can_be_resharded_holds_every_parameter(runs: dict[str, Recorded], name: str, whole: str) -> None:
    """Whatever the gradient buckets are, and whoever gathers what they hold."""
    resumed = runs[name]
    assert resumed.losses[6] == pytest.approx(runs[whole].losses[6], rel=1e-6)
    is_exact = name != "other buckets at 5"
    assert ("resumes exactly" in resumed.printed) == is_exact
    assert ("flat buffers that are cut elsewhere" in resumed.printed) != is_exact
    assert ("random states of its own" in resumed.printed) != is_exact
    if is_exact:
        for group in (0, 1):
            both = zip(end_of(resumed, group, 9), end_of(runs[whole], group, 9), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in both)


# Stock Megatron.


def test_stock_goes_on_from_a_pier_checkpoint(runs: dict[str, Recorded]) -> None:
    assert runs["stock goes on"].losses[7] == pytest.approx(runs["four"].losses[7], rel=1e-6)
    assert set(runs["stock goes on"].losses) == {7, 8, 9}


def test_weights_in_a_checkpoint_are_the_anchor_while_groups_differ(runs: dict[str, Recorded]) -> None:
    weights, anchor = runs["stock goes on, drifted"].weights("initial"), runs["four again"].weights("anchor")
    models_are_equal(anchor, weights)


def test_pier_begins_from_a_stock_checkpoint(runs: dict[str, Recorded]) -> None:
    run = runs["from stock"]
    assert run.losses[4] == pytest.approx(runs["stock"].losses[4], rel=1e-6)
    assert all(tensor.abs().max() == 0 for tensor in run.weights("momentum").values() if isinstance(tensor, torch.Tensor))
    lazy = runs["from stock, lazy"].losses
    assert [lazy[t] for t in (4, 5, 6)] == pytest.approx([runs["stock"].losses[t] for t in (4, 5, 6)], rel=1e-6)
