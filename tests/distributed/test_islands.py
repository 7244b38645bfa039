"""Groups that are Megatron worlds of their own, against groups that are instances of the distributed optimizer."""

import shutil
from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch
from test_isolation import crossing
from test_resume import goes_on_exactly

pytestmark = pytest.mark.processes

_PIER = "--train-iters 12 --optimizer pier --pier-preset pier --pier-sync-interval 3 --pier-lazy-start-iters 3 "
_ISLANDS = "--pier-islands "
_TP2 = "--pier-groups 2 --tensor-model-parallel-size 2 --global-batch-size 8 "
_DP2 = "--pier-groups 2 --global-batch-size 16 "
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather "
_EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 "
# The contract's shapes, each with other things that reach over all groups in stock Megatron.
_LAYOUTS = {
    "TP 2": (_TP2 + "--bf16 --eval-interval 4 --eval-iters 2 --exit-signal-handler --exit-duration-in-mins 60 ", []),
    "inner DP 2": (_DP2 + "--bf16 --log-params-norm --log-num-zeros-in-grad " + _OVERLAPPED, []),
    "PP 2": ("--pier-groups 2 --pipeline-model-parallel-size 2 --global-batch-size 8 --fp16 --initial-loss-scale 1024 ", []),
    "EP 2": (_DP2 + _EXPERTS + "--log-interval 2 ", []),
    "4 groups": ("--pier-groups 4 --global-batch-size 8 --pier-preset noloco --pier-subgroup-gamma 0.9 --eval-interval 4 ", []),
    "per token": (_DP2 + "--calculate-per-token-loss --pier-compress dp=int4,outer=int8 --bf16 ", []),
    "left out": (_TP2 + "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled ", ["nan in group 1 at 9"]),
}
_COMPARED = [
    Run(f"{layout}, {kind}", _PIER + flags + extra, ["main", "outer"], faults)
    for layout, (flags, faults) in _LAYOUTS.items()
    for kind, extra in {"instances": "", "islands": _ISLANDS}.items()
]

_HIDDEN = "--pier-overlap 2 --pier-fragments 2 --pier-exchange-dtype int8 --pier-offload --bf16 "
_PAIRS = "--pier-groups 4 --global-batch-size 8 --pier-preset noloco --pier-subgroup-gamma 0.9 --pier-overlap 1 "
# By name: settings, and after which iterations it is stopped.
_STOPPED = {
    "plain": (_TP2 + "--bf16 ", (2, 3, 8, 9)),
    "hidden": (_DP2 + _OVERLAPPED + _HIDDEN, (4, 7)),
    "pairs": (_PAIRS, (7,)),
}
_PROBES = ["main", "outer"]
_TRACKER = "latest_checkpointed_iteration.txt"
_RESUMED = [
    run
    for name, (flags, stops) in _STOPPED.items()
    for run in (
        Run(name, _PIER + _ISLANDS + flags + f"--save {{directory}}/{name} --save-interval 12", _PROBES, saves=stops),
        *(
            Run(f"{name}-from-{stop}", _PIER + _ISLANDS + flags + f"--load {{directory}}/{name} --ckpt-step {stop}", _PROBES)
            for stop in stops
        ),
    )
]
_SILENT = Run("silent", _PIER + _ISLANDS + _TP2, ["census"])
_APART = Run("apart", _PIER + _ISLANDS + _DP2, ["main"], ["never synchronous"], fails=True)
_ALONE = Run("alike", _PIER + _ISLANDS + _DP2, [], ["all groups read the same"], fails=True)
_AT_7 = "--load {directory}/hidden --ckpt-step 7 --global-batch-size 16 "
_AT_8 = "--load {directory}/plain --ckpt-step 8 --pier-override-checkpoint --bf16 "
_OTHERS = [
    Run(
        "instances",
        _PIER + _TP2 + "--bf16 --save {directory}/instances --save-interval 12 --exit-duration-in-mins 60",
        _PROBES,
        saves=[8, 9],
    ),
    Run("from instances", _PIER + _ISLANDS + _TP2 + _AT_8.replace("plain", "instances"), ["start", "start anchor"]),
    Run("to instances", _PIER + _TP2 + _AT_8, ["start", "start anchor"]),
    Run("four islands", _PIER + _ISLANDS + "--pier-groups 4 " + _AT_7 + _HIDDEN + "--pier-override-checkpoint"),
    Run("stock", "--train-iters 12 --use-distributed-optimizer --bf16 " + _AT_7),
    Run("time is up", _PIER + _ISLANDS + _TP2 + "--exit-duration-in-mins=-1 --save {directory}/ended --save-interval 12"),
    Run(
        "signal",
        _PIER + _ISLANDS + _TP2 + "--exit-signal-handler --save {directory}/told --save-interval 12",
        (),
        ["signal in group 1 at 7"],
    ),
    Run("folder of another", _PIER + _ISLANDS + _TP2 + "--bf16 --load {directory}/plain/islands/1", fails=True),
    Run("changed", _PIER + _TP2 + "--bf16 --load {directory}/plain --ckpt-step 8", fails=True),
]
# After something has gone wrong: island 1 had not finished its last save, and has lost its folder.
_PLAIN = _PIER + _ISLANDS + _STOPPED["plain"][0]
_DAMAGED = [
    Run("behind", _PLAIN + "--load {directory}/behind", _PROBES),
    Run("lost", _PLAIN + "--load {directory}/lost --ckpt-step 8", fails=True),
    Run("replaced", _PLAIN + "--load {directory}/lost --ckpt-step 8 --pier-override-checkpoint", ["start", "start anchor"]),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The name of a folder says nothing of what it holds.
    folder = tmp_path_factory.mktemp("launch") / "islands"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def runs(directory: Path, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    recorded = launch(directory, corpus, [*_COMPARED, *_RESUMED, _SILENT, _APART, _ALONE, *_OTHERS])
    for name in ("behind", "lost"):
        shutil.copytree(directory / "plain", directory / name)
    (directory / "behind" / "islands" / "1" / "iter_0000009" / ".metadata").unlink()
    # Of another run, which had four islands.
    shutil.copytree(directory / "behind" / "islands" / "1" / "iter_0000002", directory / "behind/islands/3/iter_0000002")
    shutil.rmtree(directory / "lost" / "islands" / "1")
    return recorded | launch(directory, corpus, _DAMAGED)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_islands_train_as_instances_do(runs: dict[str, Recorded], layout: str) -> None:
    instances, islands = runs[f"{layout}, instances"], runs[f"{layout}, islands"]
    assert islands.losses == instances.losses
    assert islands.grad_norms == instances.grad_norms
    for group in range(2):
        for one, other in zip(islands.of_group(group), instances.of_group(group), strict=True):
            for iteration in range(1, 13):
                assert torch.equal(one["main"][iteration], other["main"][iteration])


@pytest.mark.parametrize(("name", "stop"), [(name, stop) for name, (_, stops) in _STOPPED.items() for stop in stops])
def test_resumed_islands_are_those_that_never_stopped(runs: dict[str, Recorded], name: str, stop: int) -> None:
    goes_on_exactly(runs[f"{name}-from-{stop}"], runs[name], stop)


def test_instances_leave_the_clock_to_megatron(directory: Path, runs: dict[str, Recorded]) -> None:
    from megatron.core import dist_checkpointing

    stored = dist_checkpointing.load_common_state_dict(str(directory / "instances" / "iter_0000009"))["args"]
    assert stored.exit_duration_in_mins == 60


def test_nothing_crosses_islands_between_outer_steps(runs: dict[str, Recorded]) -> None:
    for iteration in (4, 5, 7, 8, 10, 11):
        assert crossing(runs["silent"], iteration) == []
        assert runs["silent"].ranks[0]["census"][iteration]
    for iteration in (2, 6, 9):
        assert crossing(runs["silent"], iteration)


def test_what_islands_have_in_common_is_stored_once(directory: Path, runs: dict[str, Recorded]) -> None:
    first, second = (directory / "plain" / part / "iter_0000008" for part in ("", "islands/1"))
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (first, second)]
    assert sizes[1] < 0.8 * sizes[0]


def test_lazy_start_that_is_none_is_seen(runs: dict[str, Recorded]) -> None:
    assert "AnchorsDifferError: After the outer step" in runs["apart"].error


def test_islands_that_read_the_same_are_refused(runs: dict[str, Recorded]) -> None:
    assert "Groups 0 and 1 read identical data" in runs["alike"].error


def test_islands_and_instances_go_on_from_each_other(runs: dict[str, Recorded]) -> None:
    for source, target in (("plain", "to instances"), ("instances", "from instances")):
        for saved, loaded in zip(runs[source].ranks, runs[target].ranks, strict=True):
            assert torch.equal(loaded["start"]["main"], saved["main"][8])
            for buffer, expected in zip(loaded["start anchor"], saved["anchor"][8], strict=True):
                assert torch.equal(buffer, expected)
    assert set(runs["stock"].losses) == set(runs["four islands"].losses) == set(range(8, 13))


def test_all_islands_end_together(directory: Path, runs: dict[str, Recorded]) -> None:
    for name, folder, last in (("time is up", "ended", 1), ("signal", "told", 9)):
        assert max(runs[name].losses) == last
        for part in ("", "islands/1"):
            assert (directory / folder / part / _TRACKER).read_text() == str(last)


def test_foreign_folders_are_refused(runs: dict[str, Recorded]) -> None:
    assert "holds one island's part of a checkpoint. Pass the --save folder" in runs["folder of another"].error
    assert "--pier-islands True is now False" in runs["changed"].error


def test_islands_go_on_from_what_all_have_saved(runs: dict[str, Recorded]) -> None:
    goes_on_exactly(runs["behind"], runs["plain"], 8)


def test_island_without_a_checkpoint_of_its_own(runs: dict[str, Recorded]) -> None:
    for part in (
        "no checkpoint of iteration 8 of island 1, which takes the inner state of island 0",
        "--pier-override-checkpoint",
    ):
        assert all(part in rank["error"] for rank in runs["lost"].ranks)
    assert "resumes exactly" not in runs["replaced"].printed
    assert "of island 1, which takes the inner state of island 0" in runs["replaced"].printed
    for group in range(2):
        for first, loaded in zip(runs["plain"].of_group(0), runs["replaced"].of_group(group), strict=True):
            assert torch.equal(loaded["start"]["main"], first["main"][8])
            assert torch.equal(loaded["start anchor"][0], first["anchor"][8][0])
