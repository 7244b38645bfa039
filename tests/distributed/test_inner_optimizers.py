"""Inner optimizers other than AdamW, on islands: Muon, whole and shared out by Megatron's layer-wise optimizer."""

from pathlib import Path

import oracle
import pytest
from launch import Recorded, Run, launch

from pier_megatron import PierConfig

pytestmark = pytest.mark.processes

_CONFIG = {"train_iters": 12, "sync_interval": 3, "lazy_start_iters": 3, "islands": True, "inner_optimizer": "muon"}
_PIER = "--train-iters 12 --optimizer pier --pier-sync-interval 3 --pier-lazy-start-iters 3 --pier-islands "
_MUON = _PIER + "--pier-inner-optimizer muon --muon-fp32-matmul-prec high "
_TP2 = "--pier-groups 2 --tensor-model-parallel-size 2 --global-batch-size 8 "
_PP2 = "--pier-groups 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
_FOUR = "--pier-groups 4 --global-batch-size 8 "
_DP2 = "--pier-groups 2 --global-batch-size 16 "

# Weights move by 0.1 in these runs. Orthogonalization makes small directions of a gradient large, and their rounding with them.
_TOLERANCE = 5e-5

# Layouts by name, with what the reference has to know of them.
_LAYOUTS = {
    "TP 2": (_TP2, {"groups": 2}, 2),
    "TP 2 duplicated": (_TP2 + "--muon-tp-mode duplicated", {"groups": 2}, 1),
    "TP 2 distributed": (_TP2 + "--muon-tp-mode distributed", {"groups": 2}, 1),
    "PP 2": (_PP2, {"groups": 2}, 1),
    "four": (_FOUR, {"groups": 4}, 1),
    "inner DP 2": (_DP2 + "--overlap-grad-reduce", {"groups": 2}, 1),
    "loss per token": (_DP2 + "--calculate-per-token-loss", {"groups": 2}, 1),
    "mean in collective": (_DP2 + "--ddp-average-in-collective", {"groups": 2}, 1),
    "EP 2": (
        _DP2 + "--expert-model-parallel-size 2 --num-experts 4 --moe-router-load-balancing-type none",
        {"groups": 2},
        1,
    ),
    "pairs": (_FOUR + "--pier-preset noloco", {"groups": 4, "preset": "noloco"}, 1),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    trainings = [Run(name, _MUON + flags, ["weights", "samples"]) for name, (flags, _, _) in _LAYOUTS.items()]
    return launch(tmp_path_factory.mktemp("inner"), corpus, trainings)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_layout_equals_the_reference(runs: dict[str, Recorded], layout: str) -> None:
    _, settings, blocks = _LAYOUTS[layout]
    reference = oracle.train(runs[layout], PierConfig(**_CONFIG | settings), muon_blocks=blocks)
    found = oracle.largest_error(runs[layout].weights("final"), reference)
    print("ERR", layout, found)
    assert found < _TOLERANCE
