"""What ``--pier-skip-fraction`` says before a run begins; what is refused is in ``end_to_end/test_arguments.py``."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pier_megatron.experiments.skipping import feature as skipping
from pier_megatron.experiments.skipping.pipeline.schedule import Pipeline
from pier_megatron.megatron_api import versions


def args(**changes: Any) -> argparse.Namespace:
    given = {
        "pier_skip_fraction": 0.25,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 4,
        "microbatch_group_size_per_vp_stage": None,
    }
    return argparse.Namespace(**given | changes)


@pytest.fixture
def _of_one_layer() -> Any:
    """Every stage has one layer."""
    with mock.patch.object(skipping, "layers_of_stages", lambda given: (1.0,) * skipping.number_of_stages(given)):
        yield


@pytest.mark.usefixtures("_of_one_layer")
def test_recomputation_makes_backward_passes_longer() -> None:
    recomputed = args(recompute_granularity="full")
    assert (skipping.backward_cost(args()), skipping.backward_cost(recomputed)) == (2, 3)
    table = skipping.paths(args(), 16)
    assert skipping.share_of_whole_step(recomputed, table) != skipping.share_of_whole_step(args(), table)


@pytest.mark.parametrize(
    ("changes", "group"), [({}, 4), ({"microbatch_group_size_per_vp_stage": 8}, 8), ({"pier_layered": True}, 16)]
)
def test_order_is_the_one_that_the_schedule_will_take(changes: dict[str, Any], group: int) -> None:
    assert skipping.pipeline(args(**changes), 16) == Pipeline(4, 4, 16, group)


def test_only_inner_stages_get_a_way_past_their_layers() -> None:
    class Block:
        def forward(self) -> str:
            return "layers"

    chunks = [SimpleNamespace(decoder=Block()) for _ in range(4)]
    ranks = mock.Mock()
    ranks.get_pipeline_model_parallel_rank.return_value = 3
    given = {"parallel_state": ranks, "TransformerBlock": Block, "unwrap_model": lambda found: found}
    with mock.patch.object(versions, "require", lambda _, name: given.get(name)):
        skipping.make_skippable(chunks, args())
    assert ["forward" in vars(chunk.decoder) for chunk in chunks] == [True, True, True, False]


@pytest.mark.usefixtures("_of_one_layer")
def test_page_says_what_is_simulated() -> None:
    found = [
        skipping.share_of_whole_step(given, skipping.paths(given, 16))
        for given in (args(virtual_pipeline_model_parallel_size=None), args())
    ]
    said = "takes {:.3f} of the time with P = 4, V = 1, M = 16, and {:.3f} with V = 4"
    page = Path(__file__).parents[2] / "docs" / "skipping.md"
    assert said.format(*found) in " ".join(page.read_text().split())
