"""Micro-batches that go by routes: Megatron's bits where nothing is skipped, and a reference's weights where something is."""

from collections import Counter
from pathlib import Path

import grids
import oracle
import pytest
from launch import Recorded, Run, launch
from test_skipping import equal

from pier_megatron import PierConfig
from pier_megatron.experiments.skipping.pipeline.routes import MicroBatch, Place, Routes

pytestmark = pytest.mark.processes

_STAGES, _REPLICAS, _LAYERS, _MICRO_BATCHES = 4, 2, 8, 4
_PIPELINE = f"--pipeline-model-parallel-size {_STAGES} --num-layers {_LAYERS} "
_BATCH = f"--global-batch-size {2 * _REPLICAS * _MICRO_BATCHES} "
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather "
_STOCK = "--train-iters 4 --use-distributed-optimizer " + _OVERLAPPED + _PIPELINE + _BATCH
_PIER = (
    "--train-iters 6 --optimizer pier --pier-preset pier --pier-sync-interval 2 --pier-lazy-start-iters 2 --pier-groups 1 "
    + _OVERLAPPED
    + _PIPELINE
    + _BATCH
)
_EVALUATING = f"--eval-interval 2 --eval-iters 1 --eval-global-batch-size {2 * _REPLICAS * _MICRO_BATCHES} "
_PROBES = ["weights", "pipeline"]
_AT_THE_ENDS = ["middle stages read nothing"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routes")


@pytest.fixture(scope="module")
def routes(directory: Path) -> dict[str, Routes]:
    found = {
        "whole": grids.whole(_STAGES, _REPLICAS, _MICRO_BATCHES),
        "routed": grids.searched(_STAGES, _REPLICAS, _MICRO_BATCHES, 0.125),
        "alone": grids.searched(_STAGES, 1, _MICRO_BATCHES, 0.25),
        "one": grids.whole(_STAGES, 1, _MICRO_BATCHES),
    }
    for name, each in found.items():
        (directory / f"{name}.json").write_text(each.text())
    return found


@pytest.fixture(scope="module")
def runs(directory: Path, corpus: tuple[Path, Path], routes: dict[str, Routes]) -> dict[str, Recorded]:
    by = "--pier-skip-routes {directory}/"
    alone = _PIER.replace("--pier-groups 1", "--pier-groups 2") + f"{by}alone.json "
    dropping = f"{_PIER} {by}routed.json --hidden-dropout 0.1 --attention-dropout 0.1 "
    # Recomputed and compressed.
    on_two = (
        f"{_STOCK} --tensor-model-parallel-size 2 --global-batch-size {2 * _MICRO_BATCHES} --pier-compress pp=int8 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    )
    trainings = [
        Run("stock", _STOCK + _EVALUATING, _PROBES),
        Run("whole", f"{_STOCK + _EVALUATING} {by}whole.json", _PROBES),
        Run("stock, TP", on_two, _PROBES),
        Run("whole, TP", f"{on_two} {by}one.json", _PROBES),
        Run("routed", f"{_PIER} {by}routed.json", [*_PROBES, "samples"], _AT_THE_ENDS),
        Run("dropping", f"{dropping} --save {{directory}}/saved --save-interval 3", _PROBES, _AT_THE_ENDS),
        Run("resumed", f"{dropping} --load {{directory}}/saved --ckpt-step 3", _PROBES, _AT_THE_ENDS),
        Run("two groups", alone, [*_PROBES, "samples"]),
        Run("many buckets", f"{_STOCK} --ddp-bucket-size 10000 {by}routed.json", _PROBES, _AT_THE_ENDS),
        Run("another file", f"{_STOCK} {by}routed.json", _PROBES, [*_AT_THE_ENDS, "another file of routes"], fails=True),
    ]
    return launch(directory, corpus, trainings, world_size=_STAGES * _REPLICAS)


def test_nothing_is_different_where_nothing_is_skipped(runs: dict[str, Recorded]) -> None:
    for layout in ("", ", TP"):
        assert equal(runs[f"whole{layout}"], runs[f"stock{layout}"])
    assert runs["whole"].ranks[-1]["evaluated"] == runs["stock"].ranks[-1]["evaluated"]


def test_routes_are_what_was_searched(routes: dict[str, Routes]) -> None:
    assert routes["routed"].fraction == 0.125
    assert routes["routed"].swaps > 0
    assert routes["routed"].crossings > 0


def test_who_visits_a_layer_is_as_the_routes_say(runs: dict[str, Recorded], routes: dict[str, Routes]) -> None:
    for rank, recorded in enumerate(runs["routed"].ranks):
        place = Place(*divmod(rank, _REPLICAS))
        numbers = [key.number for key, path in routes["routed"].paths.items() if place in path]
        expected = Counter((layer, number) for number in numbers for layer in layers_of(place.stage))
        assert recorded["visits"][3] == expected


def layers_of(stage: int) -> range:
    return range(2 * stage, 2 * stage + 2)


def visited(routes: Routes) -> list[list[int]]:
    """Layers that each micro-batch passes, in order, replica by replica."""
    keys = [MicroBatch(replica, number) for replica in range(routes.replicas) for number in range(routes.micro_batches)]
    return [[layer for place in routes.paths[key] for layer in layers_of(place.stage)] for key in keys]


def test_equal_to_a_reference_that_passes_the_same_layers_in_the_same_order(
    runs: dict[str, Recorded], routes: dict[str, Routes]
) -> None:
    config = PierConfig(6, groups=1, preset="pier", sync_interval=2, lazy_start_iters=2)
    layers = visited(routes["routed"])
    final = runs["routed"].weights("final")
    assert oracle.largest_error(final, oracle.train(runs["routed"], config, layers=layers)) < 5e-6
    in_order = [sorted(each) for each in layers]
    assert oracle.largest_error(final, oracle.train(runs["routed"], config, layers=in_order)) > 1e-4


def test_groups_go_by_the_same_routes(runs: dict[str, Recorded], routes: dict[str, Routes]) -> None:
    config = PierConfig(6, groups=2, preset="pier", sync_interval=2, lazy_start_iters=2)
    final = runs["two groups"].weights("final")
    assert oracle.largest_error(final, oracle.train(runs["two groups"], config, layers=visited(routes["alone"]))) < 5e-6


def test_gradients_are_reduced_when_all_passes_are_over(runs: dict[str, Recorded]) -> None:
    orders = [[event[0] for event in rank["layers"][2]] for rank in runs["many buckets"].ranks]
    assert max(order.count("R") for order in orders) >= 2
    assert not [order for order in orders if "B" in order[order.index("R") :]]


def test_a_resume_goes_on_exactly(runs: dict[str, Recorded]) -> None:
    assert runs["resumed"].losses.keys() == {4, 5, 6}
    assert equal(runs["resumed"], runs["dropping"])


def test_another_file_on_a_node_is_refused(runs: dict[str, Recorded]) -> None:
    assert "ranks 3 have read another file than rank 0" in runs["another file"].error
