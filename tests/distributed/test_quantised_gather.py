"""Parameters that Megatron quantises before it gathers them, with a stand-in for Transformer Engine's tensors."""

from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch
from test_resume import goes_on_exactly

pytestmark = pytest.mark.processes

_MODEL = "--bf16 --global-batch-size 8 --untie-embeddings-and-output-weights --eval-interval 4 --eval-iters 1 "
_PIER = "--train-iters 9 --optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 3 --pier-lazy-start-iters 3 "
_ONE_GROUP = (
    "--train-iters 4 --optimizer pier --pier-preset pier --pier-groups 1 --pier-sync-interval 1 --pier-lazy-start-iters 1 "
    "--pier-outer-lr 1 --pier-outer-momentum 0 "
)
_STOCK = "--train-iters 4 --use-distributed-optimizer "
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather "
_ENDURES_NAN = "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled "
_FP8 = "--fp8-format e4m3 --fp8-param-gather --no-stream-ckpt-dequant --fp8-recipe "
_MXFP8 = f"{_FP8} mxfp8 --reuse-grad-buf-for-mxfp8-param-ag "
_NAN = "nan in group 1 at 8"

# By name: recipe of the stand-in, flags, fault. What has a fault restarts a group; the others are resumed.
_WAYS = {
    "FP8": ("tensorwise", f"{_FP8} tensorwise ", []),
    "FP8, overlapped": ("blockwise", f"{_FP8} blockwise {_OVERLAPPED}{_ENDURES_NAN}", [_NAN]),
    "MXFP8": ("mxfp8", _MXFP8 + _ENDURES_NAN, [_NAN]),
    "MXFP8, overlapped": ("mxfp8", _MXFP8 + _OVERLAPPED, []),
    "FP4": ("nvfp4", "--fp4-format e2m1 --fp4-param-gather --fp4-recipe nvfp4 --pier-preset diloco ", []),
}
_RESUMED = [name for name, (_, _, faults) in _WAYS.items() if not faults]


def _runs() -> list[Run]:
    runs = []
    for name, (recipe, flags, faults) in _WAYS.items():
        argv, stand_in, folder = _MODEL + _PIER + flags, [f"parameters in {recipe}"], f"{{directory}}/{recipe}"
        resumed = name in _RESUMED
        saving = f"--save {folder} --save-interval 9" if resumed else ""
        runs.append(Run(name, f"{argv}{saving}", ["main", "outer"], [*stand_in, *faults], saves=[7] if resumed else []))
        if resumed:
            runs.append(Run(f"{name}, from 7", f"{argv}--load {folder} --ckpt-step 7", ["main", "outer"], stand_in))
    # Gradients and parameters take turns in one buffer.
    stand_in, flags = ["parameters in mxfp8"], _MXFP8 + _OVERLAPPED
    for name, trained in {"stock": _STOCK, "one group": _ONE_GROUP}.items():
        runs.append(Run(name, _MODEL + flags + trained, ["main"], stand_in))
    _, flags, _ = _WAYS["FP8"]
    often = "--pier-sync-interval 1 --pier-lazy-start-iters 1 "
    drifts = "a scale drifts"
    runs.append(Run(drifts, _MODEL + _PIER + flags + often, [], ["parameters in tensorwise", drifts], fails=True))
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    return launch(tmp_path_factory.mktemp("quantised"), corpus, _runs())


def stale(run: Recorded) -> set[tuple[int, bool]]:
    """Forward passes, by iteration and whether they train, in which a model computes with other than its main parameters."""
    return {(iteration, trains) for rank in run.ranks for iteration, trains, number in rank["stale forwards"] if number}


@pytest.mark.parametrize("name", [*_WAYS, *(f"{name}, from 7" for name in _RESUMED)])
def test_every_forward_pass_sees_the_main_parameters(runs: dict[str, Recorded], name: str) -> None:
    assert stale(runs[name]) == set()
    passes = {(iteration, trains) for iteration, trains, _ in runs[name].ranks[0]["stale forwards"]}
    # Between outer steps evaluation is shown the anchor, and training continues from what it had.
    assert {(8, True), (8, False), (9, True), (9, False)} <= passes


def test_one_group_with_unit_outer_steps_is_stock_megatron(runs: dict[str, Recorded]) -> None:
    one, stock = runs["one group"], runs["stock"]
    assert one.losses == stock.losses
    assert one.grad_norms == stock.grad_norms
    for mine, theirs in zip(one.ranks, stock.ranks, strict=True):
        assert all(torch.equal(mine["main"][iteration], theirs["main"][iteration]) for iteration in range(1, 5))


@pytest.mark.parametrize("name", _RESUMED)
def test_resumed_run_is_the_run_that_never_stopped(runs: dict[str, Recorded], name: str) -> None:
    goes_on_exactly(runs[f"{name}, from 7"], runs[name], 7)


def test_excluded_group_is_restarted(runs: dict[str, Recorded]) -> None:
    for name in set(_WAYS) - set(_RESUMED):
        for one, other in zip(runs[name].of_group(0), runs[name].of_group(1), strict=True):
            assert not other["main"][8].isfinite().all()
            assert torch.equal(one["main"][9], other["main"][9])


def test_copies_with_other_scales_are_named(runs: dict[str, Recorded]) -> None:
    for words in ("CopiesDifferError", "linear_", ".weight on data-parallel ranks"):
        assert words in runs["a scale drifts"].error
