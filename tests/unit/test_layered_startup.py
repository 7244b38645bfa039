"""What ``--pier-layered`` says before a run begins; what is refused is in ``end_to_end/test_arguments.py``."""

import argparse
from typing import Any
from unittest import mock

import pytest

from pier_megatron.features.layered import feature as layered
from pier_megatron.megatron_api import batches, versions


def args(**changes: Any) -> argparse.Namespace:
    given = {
        "pier_layered": True,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 4,
        "overlap_grad_reduce": True,
        "data_parallel_size": 2,
        "context_parallel_size": 1,
    }
    return argparse.Namespace(**given | changes)


# Simulated on Megatron's own tables, one time unit for a forward pass and two for a backward one.
@pytest.mark.parametrize(
    ("ranks", "stages", "micro_batches", "group", "held"),
    [(4, 4, 16, 4, 19), (4, 4, 16, 16, 55), (8, 4, 32, 8, 39), (8, 4, 32, 32, 111), (2, 2, 2, 2, 4)],
)
def test_activations_in_flight(ranks: int, stages: int, micro_batches: int, group: int, held: int) -> None:
    given = args(pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=stages)
    assert layered.in_flight(given, micro_batches, group) == held


def test_activations_are_told_for_the_largest_batch() -> None:
    with mock.patch.object(batches, "training_phases", return_value={8: 4, 32: 16}):
        lines = layered.describe(args())
        assert layered.cost(args()).activations == 55 / 19
    assert "4 pipeline ranks of 4 virtual stages, each of which takes all 4-16 micro-batches" in lines[0]
    assert "up to 55 of 64 stage-micro-batches at once; depth-first, of 19 (2.89 x)" in lines[1]


@pytest.mark.parametrize(
    ("changes", "micro_batches", "words"),
    [
        ({}, 16, None),
        ({"overlap_grad_reduce": False}, 16, "in vain. Add it"),
        ({}, 4, "a step has 4 micro-batches, as many as --pipeline-model-parallel-size"),
        ({"data_parallel_size": 1}, 16, "with one model replica: no gradients"),
        ({"pier": True, "pier_groups": 2}, 16, "one model replica per group: no gradients are reduced"),
        ({"pier": True, "pier_groups": 1}, 16, None),
    ],
)
def test_where_nothing_is_gained(changes: dict[str, Any], micro_batches: int, words: str | None) -> None:
    with mock.patch.object(batches, "training_phases", return_value={32: micro_batches}):
        found = layered.warnings(args(**changes))
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_without_the_flag_the_schedule_is_megatrons() -> None:
    schedule, off = mock.Mock(), args(pier_layered=None)
    with mock.patch.object(versions, "megatron_args", return_value=off):
        assert layered.get_schedule(lambda: schedule) is schedule
    assert not layered.is_used(off)


def test_the_size_of_groups_is_that_of_the_call() -> None:
    config = mock.Mock(microbatch_group_size_per_vp_stage=16)
    seen = []

    def schedule(**given: Any) -> str:
        seen.append((given["num_microbatches"], config.microbatch_group_size_per_vp_stage))
        return "losses"

    with mock.patch.object(versions, "require", return_value=lambda model: model.config):
        result = layered.breadth_first(schedule, model=[mock.Mock(config=config)], num_microbatches=8, forward_only=True)
    assert result == "losses"
    assert seen == [(8, 8)]
    assert config.microbatch_group_size_per_vp_stage == 16
