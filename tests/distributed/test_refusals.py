"""What must not go on in silence: foreign, damaged and incomplete checkpoints, groups that are not what they should be."""

from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch

pytestmark = pytest.mark.processes

_BASE = (
    "--bf16 --tensor-model-parallel-size 2 --global-batch-size 4 --train-iters 12 --optimizer pier --pier-preset pier "
    "--pier-groups 2 "
)
_PIER = _BASE + "--pier-sync-interval 3 --pier-lazy-start-iters 6 "
_LOAD = "--load {directory}/saved --ckpt-step 9 "
_DAMAGED = "--load {directory}/damaged "

# What is refused, by name: command line, planted faults, what the message must say.
_REFUSED = {
    "another preset": (
        _PIER + _LOAD + "--pier-preset diloco",
        [],
        ["--pier-preset pier is now diloco", "--pier-override-checkpoint", "iteration 9"],
    ),
    "another interval": (
        _BASE + _LOAD + "--pier-sync-interval 2 --pier-lazy-start-iters 6",
        [],
        ["--pier-sync-interval 3 is now 2", "--pier-override-checkpoint"],
    ),
    "another number of groups": (
        _PIER + _LOAD + "--pier-groups 1",
        [],
        ["--pier-groups 2 is now 1", "ranks in a group 2 is now 4"],
    ),
    "longer run, accepted": (
        _PIER + _LOAD + "--train-iters 15 --pier-override-checkpoint",
        [],
        ["Megatron refuses: OptimizerParamScheduler: ", "total number of iterations", "Add --override-opt_param-scheduler"],
    ),
    "no such iteration": (
        _PIER + "--load {directory}/saved --ckpt-step 4",
        [],
        ["saved: there is no iter_0000004. Choose another iteration with --ckpt-step; whole ones there: 9"],
    ),
    "no folder": (_PIER + "--save /dev/null/runs --save-interval 9", [], ["--save /dev/null/runs: /dev/null is no folder"]),
    "longer run": (_PIER + _LOAD + "--train-iters 15", [], ["--train-iters 12 is now 15"]),
    "newer plugin": (_PIER + "--load {directory}/future", [], ["format 99", "pier_megatron 9.0", "Upgrade pier_megatron"]),
    "flipped bit": (
        _PIER + _DAMAGED + "--ckpt-step 3",
        ["a bit of the momentum is flipped"],
        ["momentum of iteration 3", "checksums differ", "--ckpt-step"],
    ),
    "missing file": (
        _PIER + _DAMAGED + "--ckpt-step 6",
        ["a file is missing"],
        [".distcp is missing", "--ckpt-step", "whole ones there: 3, 9, 12"],
    ),
    "truncated file": (_PIER + _DAMAGED + "--ckpt-step 9", ["a file is truncated"], [" bytes.", "whole ones there: 3, 12"]),
    "other weights": (
        _PIER,
        ["other weights in group 1"],
        ["Group 1 does not start from the same weights as group 0", "--seed"],
    ),
    "no room": (
        _PIER + "--pier-offload",
        ["a node without memory"],
        ["--pier-offload: the outer state of the 4 ranks on this node takes", "GB are available", "fewer ranks per node"],
    ),
    "train_step imported by name": (
        _PIER,
        ["train_step is imported by name"],
        ["BypassedError: Pier was left out of train_step", "no outer step", "Call it as megatron.training.training.train_step"],
    ),
    "save_checkpoint imported by name": (
        _PIER + "--save {directory}/bypassed --save-interval 1",
        ["save_checkpoint is imported by name"],
        ["BypassedError: Pier was left out of save_checkpoint", "the checkpoint would lack the groups' own state"],
    ),
    "same data after a resume": (_PIER + _LOAD, ["all groups read the same"], ["Groups 0 and 1 read identical data"]),
    # Megatron would end with exit status 0.
    "empty tracker": (
        _PIER + _DAMAGED,
        ["the tracker is empty"],
        ["damaged: latest_checkpointed_iteration.txt is empty. Write one into it; whole ones there: 3, 12."],
    ),
    "same data": (_PIER, ["all groups read the same"], ["Groups 0 and 1 read identical data", "get_data_parallel_rank"]),
}

_RUNS = [
    Run("saved", _PIER + "--save {directory}/saved --save-interval 9 --exit-interval 9"),
    Run("damaged", _PIER + "--save {directory}/damaged --save-interval 3"),
    Run("future", _PIER + "--save {directory}/future --save-interval 1 --exit-interval 1", sabotage=["a newer plugin"]),
    *(Run(name, argv, sabotage=faults, fails=True) for name, (argv, faults, _) in _REFUSED.items()),
    Run(
        "all groups bad",
        _PIER + "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled",
        sabotage=["nan in group 0 at 9", "nan in group 1 at 9"],
        fails=True,
    ),
    Run(
        "longer",
        _PIER + _LOAD + "--train-iters 15 --pier-lazy-start-iters 6 --pier-override-checkpoint --override-opt_param-scheduler",
    ),
    # The bit is flipped back.
    Run(
        "newest whole",
        _PIER + _DAMAGED + "--pier-load-newest-whole",
        sabotage=["a bit of the momentum is flipped", "a group is missing, and the tracker is empty"],
    ),
    Run("accepted", _BASE + _LOAD + "--pier-sync-interval 2 --pier-lazy-start-iters 6 --pier-override-checkpoint"),
    Run(
        "not finite",
        _PIER + "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled",
        ["main", "moments"],
        ["nan in the moments of group 1 at 9"],
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    return launch(tmp_path_factory.mktemp("refusals"), corpus, _RUNS)


@pytest.mark.parametrize("name", _REFUSED)
def test_refused(runs: dict[str, Recorded], name: str) -> None:
    for part in _REFUSED[name][2]:
        assert part in runs[name].error


def test_all_groups_bad_is_a_clear_stop(runs: dict[str, Recorded]) -> None:
    reason = "no group has a pseudo-gradient that can be used (group 0 not finite, group 1 not finite)"
    assert f"After iteration 9 {reason}" in runs["all groups bad"].error


def test_changes_can_be_accepted(runs: dict[str, Recorded]) -> None:
    assert set(runs["accepted"].losses) == {10, 11, 12}
    assert set(runs["longer"].losses) == {*range(10, 16)}


def test_newest_whole_checkpoint_is_loaded_by_all_groups(runs: dict[str, Recorded]) -> None:
    run = runs["newest whole"]
    assert set(run.losses) == {*range(4, 13)}
    assert "latest_checkpointed_iteration.txt is empty. --pier-load-newest-whole takes iteration 3, the newest" in run.printed
    assert "Pier resumes exactly from iteration 3" in run.printed


def test_moments_of_a_group_that_is_not_finite_are_replaced(runs: dict[str, Recorded]) -> None:
    for one, other in zip(runs["not finite"].of_group(0), runs["not finite"].of_group(1), strict=True):
        assert torch.equal(one["moments"][9], other["moments"][9])
        assert not torch.equal(one["moments"][8], other["moments"][8])
        assert other["main"][12].isfinite().all()
