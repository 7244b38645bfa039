"""Between outer steps nothing crosses the groups: every collective of whole iterations, recorded."""

from pathlib import Path

import pytest
from launch import Recorded, Run, launch

from pier_megatron.exchange.codecs import BLOCK
from pier_megatron.integration.census import Collective

pytestmark = pytest.mark.processes

# Lazy start to 2, outer steps at 4 and 6, every iteration logged. All others after 2 must be silent.
_PIER = (
    "--train-iters 6 --log-interval 1 --optimizer pier --pier-preset pier "
    "--pier-groups 2 --pier-sync-interval 2 --pier-lazy-start-iters 2 "
)
# Lazy start to 3, outer steps at 6 and 9.
_LONGER = "--train-iters 9 --pier-sync-interval 3 --pier-lazy-start-iters 3 "
_MUON = "--global-batch-size 8 --pier-inner-optimizer muon --muon-fp32-matmul-prec high"
_TIMERS = "--pipeline-model-parallel-size 2 --global-batch-size 8 --timing-log-level 1"
# The census does not see the last iteration.
_SILENT, _SYNC = (3, 5), 4
# One micro-batch for each replica; two where gradients are accumulated before they are reduced.
_LAYOUTS = {
    "EP 2": "--expert-model-parallel-size 2 --num-experts 4 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--global-batch-size 8",
    "biases": "--expert-model-parallel-size 2 --num-experts 4 --moe-token-dispatcher-type alltoall "
    "--moe-router-enable-expert-bias --moe-router-score-function "
    "sigmoid --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2 --global-batch-size 8",
    "overlap": "--global-batch-size 16 --overlap-grad-reduce --overlap-param-gather --bf16",
    "loss per token": "--global-batch-size 8 --calculate-per-token-loss",
    "fp16": "--global-batch-size 8 --fp16 --initial-loss-scale 1024",
    "PP 2, everything that asks": f"{_TIMERS} --log-params-norm --log-num-zeros-in-grad --exit-signal-handler "
    "--exit-duration-in-mins 60 --tensorboard-log-interval 1",
    "overlapped exchange": _LONGER + "--global-batch-size 8 --pier-overlap 1",
    "sites": "--global-batch-size 8 --pier-groups 4 --pier-sites 2 --pier-site-interval 1 --pier-exchange-dtype int8",
    "TP 2, timers of level 2": "--tensor-model-parallel-size 2 --global-batch-size 4 --bf16 "
    "--timing-log-level 2 --timing-log-option all --log-timers-to-tensorboard --tensorboard-dir {directory}/tensorboard "
    "--log-throughput --log-memory-interval 1",
    "Muon, experts": f"{_MUON} --log-params-norm --log-num-zeros-in-grad "
    "--expert-model-parallel-size 2 --num-experts 4 --moe-aux-loss-coeff 1e-2",
    "Muon, layer-wise": f"{_MUON} --bf16 --use-distributed-optimizer --log-params-norm --log-num-zeros-in-grad",
    "losses averaged by the script": "--global-batch-size 16",
    "quantised gather": "--global-batch-size 8 --bf16 --fp8-format e4m3 --fp8-recipe delayed --fp8-param-gather",
    "sparse attention": "--global-batch-size 8 --dsa-indexer-loss-coeff 0.1",
    "one group asleep": _LONGER + "--tensor-model-parallel-size 2 --global-batch-size 4",
}
_SABOTAGE = {
    "quantised gather": ["parameters in tensorwise"],
    "losses averaged by the script": [
        "losses are averaged in every micro-batch",
        "sequences are packed",
        "the script reduces by itself",
    ],
    "sparse attention": ["an indexer has losses"],
    "one group asleep": ["group 1 waits for group 0"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    trainings = [Run(name, _PIER + layout, ["census"], _SABOTAGE.get(name, ())) for name, layout in _LAYOUTS.items()]
    stock = "--train-iters 4 --global-batch-size 8 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
    return launch(tmp_path_factory.mktemp("isolation"), corpus, [*trainings, Run("stock", stock, ["census"])])


def crossing(run: Recorded, iteration: int, groups_in_site: int = 1) -> list[Collective]:
    return [
        found
        for rank in run.ranks
        for found in rank["census"][iteration]
        if len({rank["group_of"][member] // groups_in_site for member in found.ranks}) > 1
    ]


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_nothing_crosses_the_groups_between_outer_steps(runs: dict[str, Recorded], layout: str) -> None:
    run = runs[layout]
    silent = {"overlapped exchange": (4, 5, 8), "one group asleep": (4, 5, 7, 8)}.get(layout, _SILENT)
    for iteration in silent:
        assert crossing(run, iteration, 2 if layout == "sites" else 1) == []
        assert run.ranks[0]["census"][iteration]


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_lazy_start_and_outer_steps_do_cross(runs: dict[str, Recorded], layout: str) -> None:
    for iteration in (2, 6 if _LONGER in _LAYOUTS[layout] else _SYNC):
        assert crossing(runs[layout], iteration)


def test_what_a_script_reduces_by_itself_stays_inside_the_group(runs: dict[str, Recorded]) -> None:
    for rank in runs["losses averaged by the script"].ranks:
        own = tuple(member for member, group in rank["group_of"].items() if group == rank["group"])
        # Over all ranks that it knows and over data-parallel ones, in each of two micro-batches; a thousand FP32 numbers.
        assert sum(found.ranks == own and found.nbytes == 4000 for found in rank["census"][_SILENT[0]]) == 4


def test_maxima_of_fp8_are_those_of_all_groups_in_the_lazy_start_alone(runs: dict[str, Recorded]) -> None:
    for rank in runs["quantised gather"].ranks:
        own = tuple(member for member, group in rank["group_of"].items() if group == rank["group"])
        for iteration, ranks in ((2, (0, 1, 2, 3)), (_SILENT[0], own)):
            assert [found.ranks for found in rank["census"][iteration] if found.nbytes == 2000] == [ranks]


def test_sites_meet_inside_between_outer_steps_and_share_what_they_send(runs: dict[str, Recorded]) -> None:
    run = runs["sites"]
    assert {found.ranks for iteration in _SILENT for found in crossing(run, iteration)} == {(0, 1), (2, 3)}
    for rank in run.ranks:
        sent = sum(found.nbytes for found in rank["census"][_SYNC] if found.ranks in ((0, 2), (1, 3)))
        # A byte for each parameter of its half, and for each of the sums of its quarter, and the scales of the blocks.
        assert 0.75 * rank["parameters"] < sent < 0.8 * rank["parameters"]


def test_ranks_that_step_whole_parameters_send_a_part_each(runs: dict[str, Recorded]) -> None:
    for rank in runs["Muon, experts"].ranks:
        across = (each for each in rank["census"][_SYNC] if len({rank["group_of"][member] for member in each.ranks}) == 2)
        # All of the two experts that it has alone, half of what the other rank of its group has as well.
        assert 0.5 < sum(each.nbytes for each in across) / (4 * rank["parameters"]) < 0.9


def test_a_job_that_saves_nothing_says_so_of_signals(runs: dict[str, Recorded]) -> None:
    said = (
        "--exit-signal-handler: at SIGTERM the job (which saves nothing without --save) ends at the next multiple of 2, in the"
    )
    assert said in runs["PP 2, everything that asks"].printed


def test_stock_megatron_crosses_in_every_iteration(runs: dict[str, Recorded]) -> None:
    names = {found.name for found in crossing(runs["stock"], 3)}
    assert any("allreduce" in name for name in names)
    # The gradient, the loss and the vote of the rerun state machine at the least.
    assert len(crossing(runs["stock"], 3)) >= 3 * len(runs["stock"].ranks)


def test_outer_step_sends_the_parameters_of_the_rank_once(runs: dict[str, Recorded]) -> None:
    for rank in runs["TP 2, timers of level 2"].ranks:
        across = sorted(
            found.nbytes
            for found in rank["census"][_SYNC]
            if len({rank["group_of"][member] for member in found.ranks}) == 2 and found.nbytes > 1000
        )
        # What tensor-parallel ranks hold copies of is summed in group order: in whole blocks to the group that sums them, and
        # the sum of each of the two groups back.
        back, there, split = across
        copied = 4 * rank["parameters"] - split
        assert 0 <= there - copied < 2 * 4 * BLOCK
        assert back == there / 2
