"""Inner optimizers other than AdamW, on islands: Muon, whole and shared out by Megatron's layer-wise optimizer."""

from pathlib import Path

import oracle
import pytest
from launch import Recorded, Run, launch
from test_resume import goes_on_exactly

from pier_megatron import PierConfig

pytestmark = pytest.mark.processes

_CONFIG = {"train_iters": 12, "sync_interval": 3, "lazy_start_iters": 3, "islands": True, "inner_optimizer": "muon"}
_PIER = "--train-iters 12 --optimizer pier --pier-sync-interval 3 --pier-lazy-start-iters 3 --pier-islands "
_MUON = _PIER + "--pier-inner-optimizer muon --muon-fp32-matmul-prec high "
_STOCK = "--train-iters 3 --optimizer muon --muon-fp32-matmul-prec high "
_TP2 = "--tensor-model-parallel-size 2 --global-batch-size 8 "
_PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8 "
_FOUR = "--global-batch-size 8 "
_DP2 = "--global-batch-size 16 "
_LAYER_WISE = _DP2 + "--bf16 --use-distributed-optimizer "
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather "

# Weights move by 0.2 in these runs; FP32 arithmetic in another order moves them by 3e-6.
_TOLERANCE = 1e-5

# Layouts by name, the settings that the reference has to know, and in how many parts it orthogonalizes a matrix.
_LAYOUTS = {
    "TP 2": (_TP2, {"groups": 2}, 2),
    "TP 2 duplicated": (_TP2 + "--muon-tp-mode duplicated ", {"groups": 2}, 1),
    "TP 2 distributed": (_TP2 + "--muon-tp-mode distributed ", {"groups": 2}, 1),
    "PP 2": (_PP2, {"groups": 2}, 1),
    "four": (_FOUR, {"groups": 4}, 1),
    "inner DP 2": (_DP2 + "--overlap-grad-reduce ", {"groups": 2}, 1),
    "loss per token": (_DP2 + "--calculate-per-token-loss ", {"groups": 2}, 1),
    "mean in collective": (_DP2 + "--ddp-average-in-collective ", {"groups": 2}, 1),
    "EP 2": (_DP2 + "--expert-model-parallel-size 2 --num-experts 4 --moe-router-load-balancing-type none ", {"groups": 2}, 1),
    "pairs": (_FOUR + "--pier-preset noloco ", {"groups": 4, "preset": "noloco"}, 1),
    "overlapped": (_TP2 + "--pier-overlap 1 ", {"groups": 2, "overlap": 1}, 2),
}

# What trains synchronously in the lazy start, against stock Megatron.
_STOCKS = {"TP 2": _TP2, "PP 2": _PP2, "four": _FOUR, "inner DP 2": _DP2, "layer-wise": _LAYER_WISE}

_HIDDEN = "--pier-overlap 2 --pier-fragments 2 --pier-exchange-dtype int8 --pier-offload "
# By name: settings, and after which iterations it is stopped.
_STOPPED = {
    "TP 2 bf16": (_TP2 + "--bf16 ", (2, 8, 9)),
    "PP 2 fp32": (_PP2, (2, 8)),
    "hidden": (_TP2 + "--bf16 " + _HIDDEN, (4, 7)),
    "copies": (_DP2 + "--bf16 ", (8,)),
    "layer-wise": (_LAYER_WISE + _OVERLAPPED, (2, 8, 9)),
    "layer-wise, hidden": (_LAYER_WISE + _HIDDEN, (7,)),
}
_PROBES = ["main", "outer"]


def _stopped_runs() -> list[Run]:
    runs = []
    for name, (flags, stops) in _STOPPED.items():
        argv, folder = _MUON + "--pier-groups 2 " + flags, f"{{directory}}/{name.replace(' ', '-')}"
        probes = [*_PROBES, "stale"] if name == "layer-wise" else _PROBES
        runs.append(Run(f"{name}, saved", argv + f"--save {folder} --save-interval 12 ", probes, saves=stops))
        runs += [Run(f"{name}, from {stop}", argv + f"--load {folder} --ckpt-step {stop} ", _PROBES) for stop in stops]
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    trainings = [
        Run(name, f"{_MUON}--pier-groups {settings['groups']} {flags}", ["weights", "samples"])
        for name, (flags, settings, _) in _LAYOUTS.items()
    ]
    trainings += [Run(f"{name}, stock", _STOCK + flags) for name, flags in _STOCKS.items()]
    trainings += _stopped_runs()
    trainings += [
        Run(
            "layer-wise",
            _MUON + "--pier-groups 2 " + _LAYER_WISE,
        )
    ]
    return launch(tmp_path_factory.mktemp("inner"), corpus, trainings)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_layout_equals_the_reference(runs: dict[str, Recorded], layout: str) -> None:
    _, settings, blocks = _LAYOUTS[layout]
    reference = oracle.train(runs[layout], PierConfig(**_CONFIG | settings), muon_blocks=blocks)
    assert oracle.largest_error(runs[layout].weights("final"), reference) < _TOLERANCE


@pytest.mark.parametrize("layout", _STOCKS)
def test_lazy_start_is_stock_megatron(runs: dict[str, Recorded], layout: str) -> None:
    for iteration in (1, 2, 3):
        assert runs[layout].losses[iteration] == runs[f"{layout}, stock"].losses[iteration]
        assert runs[layout].grad_norms[iteration] == runs[f"{layout}, stock"].grad_norms[iteration]


@pytest.mark.parametrize(("name", "stop"), [(name, stop) for name, (_, stops) in _STOPPED.items() for stop in stops])
def test_resumed_run_is_the_run_that_never_stopped(runs: dict[str, Recorded], name: str, stop: int) -> None:
    goes_on_exactly(runs[f"{name}, from {stop}"], runs[f"{name}, saved"], stop)
