"""Routers that balance by biases: inside each group between outer steps, which take the mean."""

import re
import sys
from pathlib import Path

import pytest
import torch
from launch import MODEL, Recorded, Run, as_a_fork, execute, launch, torchrun, user_job

pytestmark = pytest.mark.processes

_RATE = 0.004
_STOCK = (
    "--train-iters 9 --num-experts 8 --expert-model-parallel-size 2 --moe-router-load-balancing-type none --bf16 "
    "--disable-bias-linear "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    f"--moe-router-bias-update-rate {_RATE} --global-batch-size 16 "
)
_PIER = _STOCK + "--optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 3 --pier-lazy-start-iters 3 "
_ENDURES_NAN = "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled "
_PROBES = ["inner", "outer"]
_OUTER_STEPS = (6, 9)

_RUNS = [
    Run("stock", _STOCK + "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --exit-interval 3"),
    Run("plain", _PIER, _PROBES),
    Run("in fragments", _PIER + "--pier-fragments 3 --pier-exchange-dtype int8", _PROBES),
    Run("a group diverges", _PIER + _ENDURES_NAN, _PROBES, ["nan in group 1 at 5 and 8"]),
    Run(
        "four",
        _PIER + "--pier-groups 4 --expert-model-parallel-size 1 --save {directory}/four --save-interval 100 --exit-interval 7",
    ),
    Run(
        "four to two",
        _PIER + "--expert-model-parallel-size 1 --pier-override-checkpoint --load {directory}/four "
        "--ckpt-step 7 --exit-interval 8",
        ["start anchor"],
    ),
    Run(
        "stock goes on",
        _STOCK + "--expert-model-parallel-size 1 --use-distributed-optimizer --load {directory}/four --ckpt-step 7",
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    return launch(tmp_path_factory.mktemp("biases"), corpus, _RUNS)


def biases(run: Recorded, kind: str, iteration: int) -> list[torch.Tensor]:
    """Biases of each group; asserts that all ranks of a group hold the same."""
    found = []
    for group in (0, 1):
        first, *others = (rank[kind][iteration][-1] for rank in run.of_group(group))
        assert all(torch.equal(first, other) for other in others)
        found.append(first)
    return found


def test_lazy_start_is_stock(runs: dict[str, Recorded]) -> None:
    assert [runs["plain"].losses[t] for t in (1, 2, 3)] == [runs["stock"].losses[t] for t in (1, 2, 3)]
    assert torch.equal(*biases(runs["plain"], "inner", 3))


def test_each_group_counts_its_own_tokens(runs: dict[str, Recorded]) -> None:
    moved = [
        [after - before for before, after in zip(*(biases(runs["plain"], "inner", t) for t in (t, t + 1)), strict=True)]
        for t in (4, 5, 7, 8)
    ]
    for of_groups in moved:
        for difference in of_groups:
            assert difference.any()
            steps = difference / _RATE
            assert torch.allclose(steps, steps.round(), rtol=0, atol=5e-3)
            assert steps.abs().max() < 1.5
    assert any(not torch.equal(*of_groups) for of_groups in moved)


@pytest.mark.parametrize("name", ["plain", "in fragments"])
def test_outer_steps_take_the_mean(runs: dict[str, Recorded], name: str) -> None:
    for iteration in _OUTER_STEPS:
        mean = torch.stack(biases(runs[name], "inner", iteration)).mean(0)
        assert all(torch.allclose(anchor, mean, rtol=0, atol=1e-6) for anchor in biases(runs[name], "anchor", iteration))


def test_excluded_group_takes_over_the_biases_of_the_others(runs: dict[str, Recorded]) -> None:
    run = runs["a group diverges"]
    before = [biases(run, "inner", iteration) for iteration in (6, 9)]
    # In either of the steps, whatever the processor rounds.
    assert any(not torch.equal(own, others) for own, others in before)
    for iteration, (own, _) in zip((6, 9), before, strict=True):
        for anchor in biases(run, "anchor", iteration):
            assert torch.allclose(anchor, own, rtol=0, atol=1e-6)
    assert len(run.losses) == 9


def test_other_numbers_of_groups_and_stock_megatron_continue(runs: dict[str, Recorded]) -> None:
    assert runs["stock goes on"].losses.keys() == {8, 9}
    [anchor] = {tuple(rank["start anchor"][-1].tolist()) for rank in runs["four to two"].ranks}
    assert any(anchor)


def test_doctor_counts_experts_as_start_up_does(runs: dict[str, Recorded], tmp_path: Path) -> None:
    examined = user_job(torchrun(4), *MODEL, "--mock-data", *_PIER.split())
    said = execute([sys.executable, "-m", "pier_megatron.cli", "doctor", *examined], tmp_path / "doctor.txt", **as_a_fork())

    def sizes(printed: str) -> list[float]:
        # Parameters; megabytes sent, of the outer state, and of chunks on their way.
        found = re.search(
            r"per rank: (\S+) FP32 .*? sends (\S+) MB .*?outer state per rank: (\S+) MB .*? up to (\S+) MB", printed, re.DOTALL
        )
        assert found is not None
        return [float(number.replace(",", "")) for number in found.groups()]

    assert sizes(said) == pytest.approx(sizes(runs["plain"].printed), rel=0.01)
