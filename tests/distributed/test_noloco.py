"""Gossip pairs through Megatron: against the reference, their participants, stopped, resumed and in another layout."""

import re
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from launch import Recorded, Run, launch
from test_isolation import crossing
from test_resume import goes_on_exactly, reads_the_same

from pier_megatron import PierConfig
from pier_megatron.exchange.pairs import draw_subgroups

pytestmark = pytest.mark.processes

_LAZY = {"train_iters": 9, "preset": "noloco", "sync_interval": 3, "lazy_start_iters": 3}
_PP2 = "--pipeline-model-parallel-size 2 "

# Not in pairs, but these runs need as many ranks.
_SITES = {"groups": 4, "preset": "pier", "sites": 2, "site_interval": 1}

# By name: ranks, settings, layout. Odd numbers of groups, so that one sits out.
_TRAININGS: dict[str, tuple[int, dict[str, Any], str]] = {
    "3 groups, PP 2": (6, {"groups": 3, "fragments": 2, "overlap": 1}, _PP2),
    "6 groups in threes": (6, {"groups": 6, "subgroup_size": 3, "subgroup_seed": 1}, ""),
    "4 groups in sites, PP 2": (8, _SITES | {"overlap": 2}, _PP2),
}

# The weights move by 0.07.
_TOLERANCE = 5e-6


def _argv(settings: dict[str, Any], layout: str, world: int) -> str:
    flags = " ".join(
        f"--{name.replace('_', '-')} {value}" if name == "train_iters" else f"--pier-{name.replace('_', '-')} {value}"
        for name, value in settings.items()
    ).replace("--pier-offload True", "--pier-offload")
    replicas = world // 2 if layout else world
    return f"--optimizer pier {flags} {layout}--global-batch-size {2 * replicas} "


_IN_PAIRS = _argv(_LAZY | {"groups": 6}, "", 6)
_HIDDEN = "--bf16 --pier-overlap 2 --pier-fragments 2 --pier-offload "
_SAVED = "--load {directory}/pairs --ckpt-step 8 "
_PROBES = ["main", "outer"]

_PP3 = _argv(_LAZY | {"groups": 2}, "", 2) + "--pipeline-model-parallel-size 3 --num-layers 3 "

_IN_SIX = [
    Run("silent", _IN_PAIRS + "--train-iters 12", ["census"], ["a group sleeps while two others meet"]),
    Run("pairs", _IN_PAIRS + "--save {directory}/pairs --save-interval 9", _PROBES, saves=[8]),
    Run("pairs again, in other chunks", _IN_PAIRS + _SAVED + "--pier-chunk-mib 9", _PROBES),
    Run("hidden", _IN_PAIRS + _HIDDEN + "--save {directory}/hidden --save-interval 9", _PROBES, saves=[7]),
    Run("hidden from 7", _IN_PAIRS + _HIDDEN + "--load {directory}/hidden --ckpt-step 7", _PROBES),
    Run("stock goes on", "--train-iters 9 --use-distributed-optimizer --global-batch-size 12 " + _SAVED, ["weights"]),
    Run("means", _IN_PAIRS + "--pier-evaluate-mean --eval-interval 8", ["main"]),
    Run("each", _IN_PAIRS + "--eval-interval 8", ["main"]),
    *(
        Run(f"PP 3{name}", _PP3 + flags, ["samples"], ["middle stages read nothing"])
        for name, flags in {"": "", ", passing": "--iterations-to-skip 5 8"}.items()
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    directory, recorded = tmp_path_factory.mktemp("noloco"), {}
    for world, others in ((8, []), (6, _IN_SIX)):
        trainings = [
            Run(name, _argv(_LAZY | settings, layout, world), ["weights", "samples", "fragments"])
            for name, (ranks, settings, layout) in _TRAININGS.items()
            if ranks == world
        ]
        recorded |= launch(directory, corpus, [*trainings, *others], world)
    return recorded


@pytest.mark.parametrize("name", _TRAININGS)
def test_run_equals_the_reference(runs: dict[str, Recorded], name: str) -> None:
    config = PierConfig(**(_LAZY | _TRAININGS[name][1]))
    assert oracle.largest_error(runs[name].weights("final"), oracle.train(runs[name], config)) < _TOLERANCE


def test_only_pairs_meet(runs: dict[str, Recorded]) -> None:
    for iteration in (4, 5, 7, 8, 10, 11):
        assert crossing(runs["silent"], iteration) == []
    for iteration in (6, 9):
        pairs = draw_subgroups(6, 2, 0, iteration)
        found = crossing(runs["silent"], iteration)
        assert {each.ranks for each in found} == set(pairs)
        sent = sum(each.nbytes for each in found if each.nbytes > 1000)
        assert sent == 4 * sum(rank["parameters"] for rank in runs["silent"].ranks)


def test_sleeping_group_delays_its_partners_only(runs: dict[str, Recorded]) -> None:
    # The launch would have failed: two groups meet while a third has not come to its own meeting of that iteration.
    assert runs["silent"].losses.keys() == set(range(1, 13))


def test_resumed_runs_go_on_exactly(runs: dict[str, Recorded]) -> None:
    goes_on_exactly(runs["pairs again, in other chunks"], runs["pairs"], 8)
    goes_on_exactly(runs["hidden from 7"], runs["hidden"], 7)


def test_stock_reads_the_mean(runs: dict[str, Recorded]) -> None:
    mean = torch.stack([rank["anchor"][8][0] for rank in runs["pairs"].ranks]).mean(0)
    weights = oracle.gpt_reference.trainable(runs["stock goes on"].weights("initial"))
    initial = torch.cat([weight.flatten() for weight in weights.values()])
    torch.testing.assert_close(initial.float().sort().values, mean.sort().values, rtol=1e-5, atol=1e-6)


def test_evaluation_sees_the_mean_or_each(runs: dict[str, Recorded]) -> None:
    def seen(name: str) -> list[torch.Tensor]:
        return [rank["validation"]["iteration 8"] for rank in runs[name].ranks]

    first, *others = seen("means")
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(*seen("each")[:2])
    torch.testing.assert_close(torch.stack(seen("each")).mean(0), first)


def test_stages_without_samples_pass_iterations(runs: dict[str, Recorded]) -> None:
    reads_the_same(runs["PP 3, passing"], runs["PP 3"])


def test_losses_of_each_group_are_said_and_averaged(runs: dict[str, Recorded]) -> None:
    means, each = runs["means"].printed, runs["each"].printed
    said = re.search(
        r"lm loss from (\S+) to (\S+); what follows is the mean\n.*?at iteration 8 \| lm loss value: (\S+)", each, re.DOTALL
    )
    assert said
    low, high, mean = map(float, said.groups())
    assert low < mean < high
    assert "what follows is the mean" not in means
