"""Groups that are Megatron worlds of their own, against groups that are instances of the distributed optimizer."""

from pathlib import Path

import pytest
from launch import Recorded, Run, launch

pytestmark = pytest.mark.processes

_PIER = "--train-iters 12 --optimizer pier --pier-groups {groups} --pier-sync-interval 3 --pier-lazy-start-iters 3 "
_LAYOUTS = {
    "tp2": "--pier-groups 2 --tensor-model-parallel-size 2 --global-batch-size 8 --bf16 ",
    "dp2": "--pier-groups 2 --global-batch-size 16 --bf16 --overlap-grad-reduce --overlap-param-gather ",
    "pp2": "--pier-groups 2 --pipeline-model-parallel-size 2 --global-batch-size 8 ",
    "ep2": "--pier-groups 2 --expert-model-parallel-size 2 --num-experts 4 --global-batch-size 16 ",
    "four": "--pier-groups 4 --global-batch-size 8 ",
}
_COMMON = (
    "--train-iters 12 --optimizer pier --pier-sync-interval 3 --pier-lazy-start-iters 3 --eval-interval 4 --log-interval 1 "
)
_RUNS = [
    Run(f"{layout} {kind}", _COMMON + flags + extra, ["main"])
    for layout, flags in _LAYOUTS.items()
    for kind, extra in {"instances": "", "islands": "--pier-islands"}.items()
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    return launch(tmp_path_factory.mktemp("islands"), corpus, _RUNS)


@pytest.mark.parametrize("layout", list(_LAYOUTS))
def test_islands_train_as_instances_do(runs: dict[str, Recorded], layout: str) -> None:
    instances, islands = runs[f"{layout} instances"], runs[f"{layout} islands"]
    print(layout)
    for t in range(1,13):
        print(t, instances.losses[t]-islands.losses[t], instances.grad_norms[t]-islands.grad_norms[t])
    for one, other in zip(instances.ranks, islands.ranks, strict=True):
        print({t: float((one["main"][t]-other["main"][t]).abs().max()) if one["main"][t].shape==other["main"][t].shape else "shape" for t in (1,3,6,12)}, one["group"], other["group"])
