"""Saved, stopped and resumed runs against the run that never stopped, bit for bit."""

from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch

pytestmark = pytest.mark.processes

_PIER = "--train-iters 12 --optimizer pier --pier-groups 2 --pier-sync-interval 3 --pier-lazy-start-iters 6 "
_HIDDEN = "--pier-overlap 2 --pier-exchange-dtype int8 "
_FP16 = "--fp16 --initial-loss-scale 1024 "
_PROBES = ["main", "outer"]

# Layout by name, and how many of four ranks make a group's data-parallel size: the global batch follows from it.
_LAYOUTS = {
    "TP 2": "--tensor-model-parallel-size 2 --global-batch-size 8 ",
    "PP 2": "--pipeline-model-parallel-size 2 --global-batch-size 8 ",
    "inner DP 2": "--global-batch-size 16 --overlap-grad-reduce --overlap-param-gather ",
    "EP 2": "--num-experts 4 --expert-model-parallel-size 2 --moe-router-load-balancing-type none --global-batch-size 16 ",
}

# Kinds of run: what is trained, with which fault, and after which iterations it is stopped.
_KINDS = {
    "bf16": ("--bf16 ", [], {"lazy start": 4, "switch": 6, "mid-interval": 8, "outer step": 9}),
    "fp32": ("", [], {"mid-interval": 8}),
    "hidden exchange": ("--bf16 " + _HIDDEN, [], {"in flight": 10, "begun": 9}),
    "fp16": (_FP16, ["overflow in group 1 at 8 and 9"], {"after a skip": 9}),
}
_SKIPPED = {("EP 2", "fp16"), ("EP 2", "hidden exchange"), ("EP 2", "fp32")}
_CASES = [
    (layout, kind, point, stop)
    for layout in _LAYOUTS
    for kind, (_, _, points) in _KINDS.items()
    for point, stop in points.items()
    if (layout, kind) not in _SKIPPED
]


def base(layout: str, kind: str) -> str:
    return f"{layout}, {kind}".replace(" ", "-")


def resumed(layout: str, kind: str, stop: int) -> str:
    return f"{base(layout, kind)}-from-{stop}"


def _runs(layout: str) -> list[Run]:
    runs = []
    for kind, (flags, faults, points) in _KINDS.items():
        if (layout, kind) in _SKIPPED:
            continue
        argv = _LAYOUTS[layout] + flags + _PIER
        folder = f"{{directory}}/checkpoints-{base(layout, kind)}"
        stops = list(points.values())
        runs.append(Run(base(layout, kind), argv + f"--save {folder} --save-interval 12", _PROBES, faults, saves=stops))
        for stop in points.values():
            load = f"--load {folder} --ckpt-step {stop} --exit-on-missing-checkpoint"
            runs.append(Run(resumed(layout, kind, stop), argv + load, _PROBES, faults))
    return runs


_CONTROLS = [
    Run("never saved", _LAYOUTS["TP 2"] + "--bf16 " + _PIER, _PROBES),
    Run(
        "one group for all",
        _LAYOUTS["TP 2"] + "--bf16 " + _PIER + "--save {directory}/first --save-interval 9 --pier-save-inner-state first",
        _PROBES,
    ),
    Run("one group for all, resumed", _LAYOUTS["TP 2"] + "--bf16 " + _PIER + "--load {directory}/first --ckpt-step 9", _PROBES),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    everything = [run for layout in _LAYOUTS for run in _runs(layout)] + _CONTROLS
    return launch(tmp_path_factory.mktemp("resume"), corpus, everything)


def goes_on_exactly(run: Recorded, reference: Recorded, stop: int) -> None:
    """Compares everything that the rest of a run hangs on, at its end and on the way there."""
    for mine, theirs in zip(run.ranks, reference.ranks, strict=True):
        assert set(mine["main"]) == set(range(stop + 1, 13))
        for iteration, parameters in mine["main"].items():
            assert torch.equal(parameters, theirs["main"][iteration])
        for key in ("anchor", "momentum"):
            for buffer, expected in zip(mine[key][12], theirs[key][12], strict=True):
                assert torch.equal(buffer, expected)
    assert run.losses == {iteration: loss for iteration, loss in reference.losses.items() if iteration > stop}


@pytest.mark.parametrize(("layout", "kind", "point", "stop"), _CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_resumed_run_is_the_run_that_never_stopped(
    runs: dict[str, Recorded], layout: str, kind: str, point: str, stop: int
) -> None:
    goes_on_exactly(runs[resumed(layout, kind, stop)], runs[base(layout, kind)], stop)


def test_saving_changes_nothing(runs: dict[str, Recorded]) -> None:
    goes_on_exactly(runs[base("TP 2", "bf16")], runs["never saved"], 0)


def test_inner_state_of_one_group_is_not_that_of_all(runs: dict[str, Recorded]) -> None:
    with pytest.raises(AssertionError):
        goes_on_exactly(runs["one group for all, resumed"], runs["never saved"], 9)
    ends = [runs["one group for all, resumed"].of_group(group)[0]["main"][12] for group in (0, 1)]
    assert torch.equal(*ends)
