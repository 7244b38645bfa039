"""Inner optimizers other than AdamW: Muon, whole and divided by Megatron's layer-wise optimizer."""

import re
from pathlib import Path

import oracle
import pytest
import torch
from launch import Recorded, Run, launch
from test_resume import goes_on_exactly

from pier_megatron import PierConfig

pytestmark = pytest.mark.processes

_CONFIG = {"preset": "pier", "train_iters": 9, "sync_interval": 3, "lazy_start_iters": 3, "inner_optimizer": "muon"}
_PIER = "--train-iters 9 --optimizer pier --pier-preset pier --pier-sync-interval 3 --pier-lazy-start-iters 3 "
_MUON = _PIER + "--pier-inner-optimizer muon --muon-fp32-matmul-prec high "
_TWO = "--pier-groups 2 "
_STOCK = "--train-iters 3 --optimizer muon --muon-fp32-matmul-prec high "
_TP2 = "--tensor-model-parallel-size 2 --global-batch-size 8 "
_BLOCKS = "--muon-tp-mode blockwise "
_PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8 "
_DP2 = "--global-batch-size 16 "
_WHOLE_MATRICES = "--muon-tp-mode duplicated "
_EP2 = _DP2 + "--expert-model-parallel-size 2 --num-experts 4 --moe-router-load-balancing-type none "
_LAYER_WISE = _DP2 + "--bf16 --use-distributed-optimizer "
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather "
_UNCHECKED = "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled "

# Weights move by 0.2 in these runs; FP32 arithmetic in another order moves them by 3e-6.
_TOLERANCE = 1e-5

# By name: flags, settings that the reference has to know, in how many parts it orthogonalizes a matrix.
_LAYOUTS = {
    "TP 2": (_TP2 + _BLOCKS, {}, 2),
    "TP 2, whole matrices": (_TP2 + _WHOLE_MATRICES, {}, 1),
    "inner DP 2": (_DP2 + "--overlap-grad-reduce --calculate-per-token-loss ", {}, 1),
    "EP 2": (_EP2, {}, 1),
    "pairs": ("--global-batch-size 8 --pier-preset noloco ", {"groups": 4, "preset": "noloco"}, 1),
    "hidden": (_PP2 + "--pier-overlap 2 --pier-fragments 3 --pier-offload ", {"overlap": 2, "fragments": 3}, 1),
}

_HIDDEN = "--pier-overlap 2 --pier-fragments 2 --pier-exchange-dtype int8 --pier-offload "
# By name: settings, and after which iterations it is stopped.
_STOPPED = {
    "bf16": (_DP2 + "--bf16 --log-params-norm --eval-interval 4 --eval-iters 2 ", (8,)),
    "bf16, int4": (_EP2 + "--bf16 --pier-exchange-dtype int4 ", (7,)),
    "fp32": (_PP2, (8,)),
    "bf16, hidden": (_TP2 + "--bf16 " + _HIDDEN, (7,)),
    "layer-wise": (_LAYER_WISE + _OVERLAPPED + "--log-params-norm ", (8,)),
    "layer-wise, hidden": (_LAYER_WISE + _HIDDEN, (7,)),
}
_PROBES = ["main", "outer"]


def _runs() -> list[Run]:
    runs = [
        Run(name, f"{_MUON}--pier-groups {settings.get('groups', 2)} {flags}", ["weights", "samples", "fragments"])
        for name, (flags, settings, _) in _LAYOUTS.items()
    ]
    runs.append(Run("stock", _STOCK + _TP2 + _BLOCKS))
    for name, (flags, stops) in _STOPPED.items():
        argv, folder = _MUON + _TWO + flags, f"{{directory}}/{name.replace(' ', '-')}"
        runs.append(Run(f"{name}, saved", argv + f"--save {folder} --save-interval 9 ", [*_PROBES, "stale"], saves=stops))
        runs += [Run(f"{name}, from {stop}", argv + f"--load {folder} --ckpt-step {stop} ", _PROBES) for stop in stops]
    from_fp32 = "--load {directory}/fp32 --ckpt-step 8 "
    runs += [
        Run("PP 2 at 8", _MUON + _TWO + _PP2 + from_fp32, ["outer weights"]),
        Run(
            "TP 2 at 8",
            _MUON + _TWO + _TP2 + _WHOLE_MATRICES + "--pier-override-checkpoint --make-vocab-size-divisible-by 32 " + from_fp32,
            ["outer weights"],
        ),
        Run("stock goes on", "--train-iters 9 --optimizer muon --muon-fp32-matmul-prec high " + _PP2 + from_fp32),
        Run("another optimizer", _PIER + _TWO + _PP2 + from_fp32 + "--pier-override-checkpoint ", fails=True),
        Run("left out", _MUON + _TWO + _TP2 + _UNCHECKED, ["main", "moments"], ["nan in the moments of group 1 at 6"]),
    ]
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    return launch(tmp_path_factory.mktemp("inner"), corpus, _runs())


def error(run: Recorded, blocks: int = 1, **settings: object) -> float:
    reference = oracle.train(run, PierConfig(**{"groups": 2} | _CONFIG | settings), muon_blocks=blocks)
    return oracle.largest_error(run.weights("final"), reference)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_layout_equals_the_reference(runs: dict[str, Recorded], layout: str) -> None:
    _, settings, blocks = _LAYOUTS[layout]
    assert error(runs[layout], blocks, **settings) < _TOLERANCE


def test_evaluation_sees_the_anchor(runs: dict[str, Recorded]) -> None:
    for rank in runs["bf16, saved"].ranks:
        # In another order.
        seen, anchor = (tensor.sort()[0] for tensor in (rank["validation"]["iteration 8"], torch.cat(rank["anchor"][8])))
        assert torch.equal(seen, anchor)
        assert not torch.equal(seen, rank["main"][8].sort()[0])


def test_lazy_start_is_stock_megatron(runs: dict[str, Recorded]) -> None:
    run, stock = runs["TP 2"], runs["stock"]
    for iteration in (1, 2, 3):
        assert run.losses[iteration] == stock.losses[iteration]
        assert run.grad_norms[iteration] == stock.grad_norms[iteration]


@pytest.mark.parametrize(("name", "stop"), [(name, stop) for name, (_, stops) in _STOPPED.items() for stop in stops])
def test_resumed_run_is_the_run_that_never_stopped(runs: dict[str, Recorded], name: str, stop: int) -> None:
    goes_on_exactly(runs[f"{name}, from {stop}"], runs[f"{name}, saved"], stop)


def test_layer_wise_trains_as_whole_does(runs: dict[str, Recorded]) -> None:
    # AdamW's part is clipped by a norm that is summed in another order.
    whole = runs["bf16, saved"].losses
    assert runs["layer-wise, saved"].losses == pytest.approx(whole, rel=2e-4)
    assert runs["layer-wise, hidden, saved"].losses != pytest.approx(whole, rel=2e-4)


def test_layer_wise_counts_each_parameter_once(runs: dict[str, Recorded]) -> None:
    norms = [
        [float(norm) for norm in re.findall(r"params norm: (\S+)", runs[name].printed)]
        for name in ("layer-wise, saved", "bf16, saved")
    ]
    assert len(norms[0]) == 9
    # With overlapped gathers Megatron looks at parts of other ranks that are of the iteration before.
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_another_layout_goes_on_with_the_same_outer_state(runs: dict[str, Recorded]) -> None:
    for name in ("anchor", "momentum"):
        one, other = (oracle.gpt_reference.trainable(runs[run].weights(name)) for run in ("PP 2 at 8", "TP 2 at 8"))
        for key, tensor in one.items():
            assert torch.equal(tensor, other[key][: len(tensor)])


def test_stock_megatron_goes_on_with_what_all_groups_agree_on(runs: dict[str, Recorded]) -> None:
    assert runs["stock goes on"].losses.keys() == {9}


def test_another_inner_optimizer_is_refused(runs: dict[str, Recorded]) -> None:
    for words in ("--pier-inner-optimizer muon is now adam", "--finetune"):
        assert words in runs["another optimizer"].error


@pytest.mark.parametrize("name", _STOPPED)
def test_model_computes_with_the_main_parameters(runs: dict[str, Recorded], name: str) -> None:
    # In other iterations the gather of the inner step may be hidden behind the next forward.
    for rank in runs[f"{name}, saved"].ranks:
        assert [rank["stale"][iteration] for iteration in (6, 9)] == [0, 0]


def test_group_that_is_not_finite_is_restarted(runs: dict[str, Recorded]) -> None:
    run = runs["left out"]
    for one, other in zip(run.of_group(0), run.of_group(1), strict=True):
        assert torch.equal(one["moments"][6], other["moments"][6])
        assert not torch.equal(one["moments"][5], other["moments"][5])
        assert other["main"][9].isfinite().all()


def test_copies_on_data_parallel_ranks_are_said(runs: dict[str, Recorded]) -> None:
    warning = "each of the 2 data-parallel ranks of a group (4 / --pier-groups 2) steps and keeps all"
    warned = {name for name, run in runs.items() if warning in run.printed}
    assert warned == {"inner DP 2", "EP 2", "bf16, saved", "bf16, from 8", "bf16, int4, saved", "bf16, int4, from 7"}
