"""Tables of paths, the order of a pipeline's passes, and how long a step takes."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.skipping.pipeline.paths import draw, most, search, wanted
from pier_megatron.experiments.skipping.pipeline.schedule import Pass, Pipeline
from pier_megatron.experiments.skipping.pipeline.simulator import makespan

pytestmark = pytest.mark.slow

# Ranks, virtual stages of each, groups of micro-batches in a step, and how much longer than the ranks each group is.
_SIZES = st.tuples(*(st.integers(*limits) for limits in ((2, 6), (1, 4), (1, 4), (0, 6))))


def spread(counts: list[int]) -> int:
    return max(counts) - min(counts)


@given(st.integers(3, 40), st.integers(2, 40), st.floats(0, 1), st.integers(0, 99))
def test_tables_are_balanced_and_reach_the_fraction(stages: int, micro_batches: int, share: float, seed: int) -> None:
    fraction = share * most(stages, micro_batches) / (stages * micro_batches)
    paths = draw(stages, micro_batches, fraction, random.Random(seed))
    assert len(paths.skipped) == wanted(stages, micro_batches, fraction)
    assert abs(paths.fraction - fraction) <= 0.5 / (stages * micro_batches) + 1e-12
    by_stage, by_micro_batch = (Counter(pair[index] for pair in paths.skipped) for index in (0, 1))
    assert by_stage[0] == by_stage[stages - 1] == by_micro_batch[micro_batches - 1] == 0
    assert spread([by_stage[stage] for stage in range(1, stages - 1)]) <= 1
    assert spread([by_micro_batch[micro_batch] for micro_batch in range(micro_batches - 1)]) <= 1


def test_a_seed_is_a_table() -> None:
    pipeline = Pipeline(2, 3, 8, 2)
    assert most(2, 8) == most(6, 1) == most(1, 1) == 0
    assert draw(6, 1, 0.0, random.Random(0)).skipped == frozenset()
    first, again, other = (search(pipeline, 0.25, seed, (1.0,) * 6) for seed in (1, 1, 2))
    assert first == again != other
    # Whoever searches with another release of the plugin, or of Python, resumes with the same table.
    assert [first.row(stage) for stage in range(1, 5)] == ["#.#.##.#", ".####..#", ".#.##.##", "#..#.###"]


def test_the_search_keeps_the_shortest_step() -> None:
    pipeline, costs = Pipeline(4, 4, 16, 4), (1.0,) * 16
    found = makespan(pipeline, costs, search(pipeline, 0.25, 0, costs).skipped)
    generator = random.Random(5)
    others = [makespan(pipeline, costs, draw(16, 16, 0.25, generator).skipped) for _ in range(20)]
    assert found < sum(others) / len(others)


@settings(max_examples=50)
@given(_SIZES, st.integers(0, 6))
def test_every_pass_once_and_the_bubble_of_the_formula(sizes: tuple[int, int, int, int], rest: int) -> None:
    ranks, chunks, groups, longer = sizes
    group = ranks + longer
    # A last group may be shorter, but not than the pipeline.
    pipeline = Pipeline(ranks, chunks, groups * group + (ranks + rest if ranks + rest < group else 0), group)
    everything = {
        Pass(is_backward, stage, micro_batch)
        for is_backward in (False, True)
        for stage in range(pipeline.stages)
        for micro_batch in range(pipeline.micro_batches)
    }
    passes = [this for rank in range(pipeline.ranks) for this in pipeline.passes(rank)]
    assert len(passes) == len(everything)
    assert set(passes) == everything
    at_best = 3 * pipeline.chunks * pipeline.micro_batches + 3 * (pipeline.ranks - 1)
    assert makespan(pipeline, [1.0] * pipeline.stages) >= at_best
    if pipeline.micro_batches % pipeline.ranks == 0 and pipeline.group in (pipeline.ranks, pipeline.micro_batches):
        assert makespan(pipeline, [1.0] * pipeline.stages) == at_best


@pytest.mark.parametrize(("micro_batches", "group"), [(9, 4), (8, 2), (2, 4)])
def test_an_order_without_an_end_is_refused(micro_batches: int, group: int) -> None:
    with pytest.raises(PierConfigError, match=rf"stage {group} .* 4 pipeline ranks need as many"):
        Pipeline(4, 2, micro_batches, group)
    Pipeline(4, 1, micro_batches, group)


def test_costs() -> None:
    pipeline = Pipeline(2, 1, 1, 2)
    assert makespan(pipeline, [1.0, 10.0]) == 33
    assert makespan(pipeline, [1.0, 10.0], backward=3.0) == 44
    # To the second stage and back.
    assert makespan(pipeline, [1.0, 10.0], link=0.5) == 34
    assert makespan(pipeline, [1.0, 10.0], skipped={(1, 0)}) == 3
