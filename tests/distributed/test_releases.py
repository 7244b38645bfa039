"""Each way of training once on the older megatron-core releases, and golden trajectories that all of them must reproduce."""

import sys
from pathlib import Path

import grids
import oracle
import pytest
from launch import Recorded, Run, launch
from test_isolation import crossing
from test_resume import goes_on_exactly

from pier_megatron import PierConfig

pytestmark = pytest.mark.processes

# Where `make test` puts them. All other tests train on the installed one.
_RELEASES = {
    "0.17": Path(sys.prefix) / "megatron-0.17.1",
    "0.18": Path(sys.prefix) / "megatron-0.18.2",
}

_STOCK = "--train-iters 3 --use-distributed-optimizer --num-distributed-optimizer-instances 2 "
_PIER = "--train-iters 12 --optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 3 --pier-lazy-start-iters 3 "
_SHORTER = _PIER.replace("--train-iters 12", "--train-iters 9")
_MUON = (
    _SHORTER + "--pier-inner-optimizer muon --muon-fp32-matmul-prec high --tensor-model-parallel-size 2 "
    "--muon-tp-mode blockwise --global-batch-size 8 "
)
_SHARDED = _SHORTER + "--bf16 --global-batch-size 8 --overlap-grad-reduce --overlap-param-gather "
_RUNS = [
    Run("stock", _STOCK + "--tensor-model-parallel-size 2 --global-batch-size 8"),
    Run("tp2", _PIER + "--tensor-model-parallel-size 2 --global-batch-size 8", ["weights", "samples", "stale"]),
    Run(
        "pp2",
        _PIER + "--pipeline-model-parallel-size 2 --global-batch-size 8 --overlap-grad-reduce --overlap-param-gather",
        ["weights", "samples"],
    ),
    Run(
        "pairs",
        _SHORTER.replace("--pier-groups 2", "--pier-groups 4") + "--pier-preset noloco --global-batch-size 8 --eval-interval 4",
        ["weights", "samples"],
    ),
    Run("muon", _MUON + "--save {directory}/muon --save-interval 9", ["weights", "samples", "main", "outer"], saves=[8]),
    Run("muon from 8", _MUON + "--load {directory}/muon --ckpt-step 8", ["main", "outer"]),
    Run(
        "experts",
        _PIER + "--expert-model-parallel-size 2 --num-experts 4 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
        "--global-batch-size 16 --exit-interval 7",
        ["census"],
    ),
    Run("sharded", _SHARDED + "--save {directory}/sharded --save-interval 9", ["main", "outer"], saves=[8]),
    Run("sharded from 8", _SHARDED + "--load {directory}/sharded --ckpt-step 8", ["main", "outer"]),
]

# With overlapped transfers megatron-core 0.17 frees what gloo is still sending.
_PIPELINE = (
    "--train-iters 2 --optimizer adam --use-distributed-optimizer --overlap-grad-reduce --global-batch-size 16 --num-layers 8 "
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication"
)
_RUNS += [
    Run(name, _PIPELINE + flag, ["pipeline"])
    for name, flag in {
        "depth-first": "",
        "breadth-first": " --pier-layered",
        "skipping": " --pier-skip-fraction 0.25 --pier-eval-skip 2,5 --eval-interval 2",
    }.items()
]

_LAYERS = (
    "--train-iters 2 --optimizer adam --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --num-layers 3 "
    "--global-batch-size 24 --untie-embeddings-and-output-weights --ddp-bucket-size 10000 --recompute-granularity full "
    "--recompute-method block --recompute-num-layers 1"
)
_RUNS += [Run(name, _LAYERS + flag, ["pipeline"]) for name, flag in {"in order": "", "by layers": " --pier-layered"}.items()]

_STAGES = (
    "--train-iters 2 --optimizer adam --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --num-layers 4 "
    "--global-batch-size 8 --pipeline-model-parallel-size 4"
)
_RUNS += [
    Run(name, _STAGES + flag, ["pipeline"])
    for name, flag in {"one stage after the other": "", "by routes": " --pier-skip-routes {directory}/whole.json"}.items()
]

# Everything that is compressed inside a group goes its way, in FP32.
_SENT = "--train-iters 2 --optimizer adam --global-batch-size 8 --pipeline-model-parallel-size 2 "
_COMPRESSED = {
    "replicas and stages": _SENT + "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 ",
    "layers and stages": _SENT + "--tensor-model-parallel-size 2 ",
}
_RUNS += [
    Run(f"{name}{exact and ', exact'}", argv + exact, [], ["lossless codecs"] if exact else [])
    for name, argv in _COMPRESSED.items()
    for exact in ("", "--pier-compress naive,outer=off")
]


@pytest.fixture(scope="module", params=_RELEASES)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]
) -> dict[str, Recorded]:
    folder = _RELEASES[request.param]
    if not folder.exists():
        pytest.skip(f"megatron-core {request.param} is not at {folder}: `make test` installs it")
    directory = tmp_path_factory.mktemp("release")
    (directory / "whole.json").write_text(grids.whole(4, 1, 4).text())
    return launch(directory, corpus, _RUNS, megatron=folder)


def assert_alike(one: Recorded, other: Recorded) -> None:
    assert one.losses == other.losses
    assert one.grad_norms == other.grad_norms


def test_lazy_start_is_stock_megatron(runs: dict[str, Recorded]) -> None:
    for iteration in (1, 2, 3):
        assert runs["tp2"].losses[iteration] == runs["stock"].losses[iteration]
        assert runs["tp2"].grad_norms[iteration] == runs["stock"].grad_norms[iteration]


def test_what_experts_log_stays_in_the_group(runs: dict[str, Recorded]) -> None:
    assert [t for t in (4, 5) if crossing(runs["experts"], t)] == []
    assert crossing(runs["experts"], 6)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_layout_equals_the_reference(runs: dict[str, Recorded], layout: str) -> None:
    reference = oracle.train(runs[layout], PierConfig(12, groups=2, preset="pier", sync_interval=3, lazy_start_iters=3))
    assert oracle.largest_error(runs[layout].weights("final"), reference) < 5e-6


def test_groups_in_pairs_equal_the_reference(runs: dict[str, Recorded]) -> None:
    config = PierConfig(9, groups=4, preset="noloco", sync_interval=3, lazy_start_iters=3)
    assert oracle.largest_error(runs["pairs"].weights("final"), oracle.train(runs["pairs"], config)) < 5e-6


def test_muon_equals_the_reference(runs: dict[str, Recorded]) -> None:
    config = PierConfig(9, groups=2, preset="pier", sync_interval=3, lazy_start_iters=3, inner_optimizer="muon")
    assert oracle.largest_error(runs["muon"].weights("final"), oracle.train(runs["muon"], config, muon_blocks=2)) < 1e-5


@pytest.mark.parametrize("name", ["muon", "sharded"])
def test_resumes_exactly(runs: dict[str, Recorded], name: str) -> None:
    goes_on_exactly(runs[f"{name} from 8"], runs[name], 8)


def test_model_computes_with_the_new_parameters(runs: dict[str, Recorded]) -> None:
    assert not any(count for rank in runs["tp2"].ranks for count in rank["stale"].values())


def test_breadth_first_equals_depth_first(runs: dict[str, Recorded]) -> None:
    depth_first, breadth_first = runs["depth-first"], runs["breadth-first"]
    # After as many micro-batches as there are ranks, depth-first turns to the next stage.
    assert [run.ranks[0]["order"][2][4] for run in (depth_first, breadth_first)] == ["F1.0", "F0.4"]
    assert len(breadth_first.losses) == 2
    assert_alike(breadth_first, depth_first)


def test_layers_equal_the_order_of_micro_batches(runs: dict[str, Recorded]) -> None:
    in_order, by_layers = runs["in order"], runs["by layers"]
    # The first layer is recomputed: its own passes have no graph.
    assert [run.ranks[0]["layers"][2][1] for run in (in_order, by_layers)] == ["F2.0", "F1.1"]
    assert len(by_layers.losses) == 2
    assert_alike(by_layers, in_order)


def test_routes_of_all_stages_equal_the_order_of_stages(runs: dict[str, Recorded]) -> None:
    in_order, by_routes = runs["one stage after the other"], runs["by routes"]
    # The second stage waits with its third forward pass for a backward one, unless it follows a list of its own.
    assert [run.ranks[1]["order"][2][2:4] for run in (in_order, by_routes)] == [["F0.2", "B0.0"], ["F0.2", "F0.3"]]
    assert len(by_routes.losses) == 2
    assert_alike(by_routes, in_order)


@pytest.mark.parametrize(("name", "dimensions"), [("replicas and stages", "dp pp gather"), ("layers and stages", "pp tp")])
def test_what_is_compressed_goes_its_way(runs: dict[str, Recorded], name: str, dimensions: str) -> None:
    plain, exact = runs[name], runs[f"{name}, exact"]
    said = " ".join(exact.ranks[-1]["said"])
    assert all(f"sent by this rank per iteration, {dimension} " in said for dimension in dimensions.split())
    assert_alike(exact, plain)


def test_stages_are_skipped(runs: dict[str, Recorded]) -> None:
    whole, skipping = runs["depth-first"], runs["skipping"]
    for rank, expected in zip(skipping.ranks, whole.ranks, strict=True):
        assert [e for e in rank["order"][2] if e[0] in "FB"] == [e for e in expected["order"][2] if e[0] in "FB"]
    # A quarter of 8 layers x 8 micro-batches.
    assert [sum(rank["visits"][2].total() for rank in run.ranks) for run in (whole, skipping)] == [64, 48]
    assert len(skipping.losses) == 2
    assert skipping.losses != whole.losses
    assert skipping.ranks[-1]["evaluated"][2]["lm loss"] > 0


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_golden_trajectory(runs: dict[str, Recorded], layout: str) -> None:
    [argv] = [run.argv for run in _RUNS if run.name == layout]
    oracle.check_golden(layout, runs[layout], argv)
