"""What features say before a run begins; what is refused is in ``end_to_end/test_arguments.py``."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.layered import accumulation, breadth_first, segments
from pier_megatron.experiments.layered import feature as layered
from pier_megatron.experiments.skipping import feature as skipping
from pier_megatron.experiments.skipping.pipeline.schedule import Pipeline
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


@pytest.mark.parametrize(
    ("ranks", "stages", "micro_batches", "group", "held"),
    [(4, 4, 16, 4, 19), (4, 4, 16, 16, 55), (8, 4, 32, 8, 39), (8, 4, 32, 32, 111), (2, 2, 2, 2, 4)],
)
def test_activations_in_flight(ranks: int, stages: int, micro_batches: int, group: int, held: int) -> None:
    given = args(pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=stages)
    assert breadth_first.in_flight(given, micro_batches, group) == held


def test_activations_are_told_for_the_largest_batch() -> None:
    with mock.patch.object(batches, "training_phases", return_value={8: 4, 32: 16}):
        lines = layered.describe(args())
        assert layered.cost(args()).activations == 55 / 19
    assert "4 pipeline ranks of 4 virtual stages: a stage runs all 4-16 micro-batches" in lines[0]
    assert "up to 55 of 64 stage-micro-batches at once; depth-first, of 19 (2.89 x)" in lines[1]


@pytest.mark.parametrize(
    ("changes", "micro_batches", "words"),
    [
        ({}, 16, None),
        ({"overlap_grad_reduce": False}, 16, "buys nothing. Add it"),
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


def without_pipeline(**changes: Any) -> argparse.Namespace:
    given = {
        "pipeline_model_parallel_size": 1,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
    }
    return args(**given | changes)


@pytest.mark.parametrize(("given", "micro_batches", "together"), [(True, 8, 8), (4, 8, 4), (4, 2, 2), (1, 8, 1)])
def test_micro_batches_at_a_time(given: int, micro_batches: int, together: int) -> None:
    given_args = without_pipeline(pier_layered=given)
    assert accumulation.together(given_args, micro_batches) == together
    with mock.patch.object(batches, "training_phases", return_value={8: 1, 32: micro_batches}):
        assert layered.cost(given_args).activations == together
        assert [found for found in layered.warnings(given_args) if "one micro-batch" in found] == [
            "--pier-layered: one micro-batch at a time is Megatron's own order. Use smaller micro-batches, or a larger N."
        ] * (together == 1)


def test_what_expects_another_order_is_refused() -> None:
    for name in accumulation.REFUSED:
        with pytest.raises(PierConfigError, match="cannot be used with --pier-layered and --pipeline-model-parallel-size 1"):
            layered.prepare(without_pipeline(**{name: True}))
        layered.prepare(without_pipeline(**{name: None}))


def test_a_model_of_two_blocks_is_refused() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlock

    model = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    with pytest.raises(PierConfigError, match="this one has 0 blocks"):
        segments.parts_of(model)
    for block in (TransformerBlock.__new__(TransformerBlock) for _ in range(2)):
        torch.nn.Module.__init__(block)
        model.append(block)
    with pytest.raises(PierConfigError, match="this one has 2 blocks"):
        segments.parts_of(model)


class _Layer(torch.nn.Linear):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        _events.append(f"runs{' in a fork' if _forks else ''}")
        return super().forward(hidden_states), None


_events: list[str] = []
_forks: list[None] = []


@contextlib.contextmanager
def _fork() -> Iterator[None]:
    _forks.append(None)
    yield
    _forks.pop()


def _model() -> torch.nn.Module:
    """A block as Megatron's, with sequence parallelism: random numbers are forked once for all layers."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    class Block(TransformerBlock):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            with _fork() if self.config.sequence_parallel else contextlib.nullcontext():
                for layer in self.layers:
                    hidden_states, _ = layer(hidden_states=hidden_states, rotary_pos_emb=None)
                return self.final_layernorm(hidden_states)

    block = Block.__new__(Block)
    torch.nn.Module.__init__(block)
    block.layers, block.final_layernorm = torch.nn.ModuleList([_Layer(4, 4), _Layer(4, 4)]), torch.nn.LayerNorm(4)
    block.config = argparse.Namespace(sequence_parallel=True, recompute_granularity=None, cuda_graph_impl="none")
    return block


def test_no_fork_of_random_numbers_stays_open_while_others_pass() -> None:
    model = _model()
    tracker = mock.Mock(fork=_fork)
    _events.clear()
    with mock.patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", return_value=tracker):
        with segments.cut_before_layers(model) as cuts:
            passing = [segments.MicroBatch(lambda: model(hidden_states=torch.ones(2, 4))) for _ in range(2)]
            for _ in range(cuts):
                for micro_batch in passing:
                    micro_batch.switch()
                    assert not _forks
            outputs = [micro_batch.switch() for micro_batch in passing]
        model(hidden_states=torch.ones(2, 4))
    assert _events == ["runs in a fork"] * 6
    assert [len(micro_batch.cuts) for micro_batch in passing] == [cuts] * 2 == [3] * 2
    assert all(torch.equal(output, model(hidden_states=torch.ones(2, 4))) for output in outputs)


def test_a_second_way_for_gradients_is_refused() -> None:
    layer = _Layer(4, 4)
    layer.register_forward_pre_hook(segments.pause, with_kwargs=True)
    bias = torch.ones(4, requires_grad=True)
    passing = segments.MicroBatch(lambda: layer(hidden_states=torch.ones(2, 4, requires_grad=True), attention_bias=bias))
    with pytest.raises(PierConfigError, match="layers also pass gradients through attention_bias"):
        passing.switch()


def skipping_args(**changes: Any) -> argparse.Namespace:
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
    recomputed = skipping_args(recompute_granularity="full")
    assert (skipping.backward_cost(skipping_args()), skipping.backward_cost(recomputed)) == (2, 3)
    table = skipping.paths(skipping_args(), 16)
    assert skipping.share_of_whole_step(recomputed, table) != skipping.share_of_whole_step(skipping_args(), table)


@pytest.mark.parametrize(
    ("changes", "group"), [({}, 4), ({"microbatch_group_size_per_vp_stage": 8}, 8), ({"pier_layered": True}, 16)]
)
def test_order_is_the_one_that_the_schedule_will_take(changes: dict[str, Any], group: int) -> None:
    assert skipping.pipeline(skipping_args(**changes), 16) == Pipeline(4, 4, 16, group)


def test_only_inner_stages_get_a_way_past_their_layers() -> None:
    class Block:
        def forward(self) -> str:
            return "layers"

    chunks = [SimpleNamespace(decoder=Block()) for _ in range(4)]
    ranks = mock.Mock()
    ranks.get_pipeline_model_parallel_rank.return_value = 3
    given = {"parallel_state": ranks, "TransformerBlock": Block, "unwrap_model": lambda found: found}
    with mock.patch.object(versions, "require", lambda _, name: given.get(name)):
        skipping.make_skippable(chunks, skipping_args())
    assert ["forward" in vars(chunk.decoder) for chunk in chunks] == [True, True, True, False]


@pytest.mark.usefixtures("_of_one_layer")
def test_page_says_what_is_simulated() -> None:
    found = [
        skipping.share_of_whole_step(given, skipping.paths(given, 16))
        for given in (skipping_args(virtual_pipeline_model_parallel_size=None), skipping_args())
    ]
    said = "takes {:.3f} of the time with P = 4, V = 1, M = 16, and {:.3f} with V = 4"
    page = Path(__file__).parents[2] / "docs" / "skipping.md"
    assert said.format(*found) in " ".join(page.read_text().split())
