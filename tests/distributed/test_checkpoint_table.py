"""Every kind of run loads the checkpoint of every other: exactly, from the same states, from their mean, or not at all."""

import re
from pathlib import Path

import pytest
import torch
from launch import REPOSITORY, Recorded, Run, launch

pytestmark = pytest.mark.processes

_COMMON = "--train-iters 4 --optimizer pier --pier-preset pier --pier-sync-interval 2 --pier-lazy-start-iters 0 --num-layers 1 "
# Saved between two outer steps, where everything differs that may.
_AT = 3
_KINDS = {"AdamW": "", "Muon": "--pier-inner-optimizer muon --muon-fp32-matmul-prec high "}
_MEETING = {"all meet": "", "pairs": "--pier-preset noloco "}
_BITS = {"FP32": "", "int4": "--pier-exchange-dtype int4 "}
_WORLD = 4
_FEWER = 2

# A kind of run, apart from the number of groups: inner optimizer, participants, bits.
Shape = tuple[str, str, str]
# Bits of the run that saves, by its inner optimizer; pairs exchange FP32 alone.
_SAVED_IN = {"AdamW": "int4", "Muon": "FP32"}
_SHAPES: list[Shape] = [(kind, meeting, _SAVED_IN[kind]) for kind in _KINDS for meeting in _MEETING]


def _argv(shape: Shape, groups: int) -> str:
    kind, meeting, bits = shape
    flags = _KINDS[kind] + (_MEETING[meeting] or _BITS[bits])
    # A group has one rank, whatever their number.
    return f"{_COMMON}{flags}--pier-groups {groups} --global-batch-size {4 * groups} --micro-batch-size 2 "


def _folder(shape: Shape) -> str:
    return "-".join(shape).replace(" ", "_")


def _saved(shape: Shape) -> Run:
    save = f"--save {{directory}}/{_folder(shape)} --save-interval 100"
    return Run(_folder(shape), _argv(shape, _WORLD) + save, ["main", "moments", "outer"], saves=[_AT])


def _loaded(source: Shape, target: Shape, groups: int) -> Run:
    load = f"--load {{directory}}/{_folder(source)} --ckpt-step {_AT} --override-opt_param-scheduler --exit-interval 1 "
    accepted = "" if (source, groups) == (target, _WORLD) else "--pier-override-checkpoint "
    name = f"{_folder(source)} to {groups} {_folder(target)}"
    return Run(name, _argv(target, groups) + load + accepted, ["main", "start", "start anchor", "start momentum"])


def _targets(source: Shape, meeting: str) -> list[Shape]:
    """What loads a run: the same inner optimizer, since another is refused, in the same bits and in others."""
    kind, before, bits = source
    others = [other for other in _BITS if other != bits and (before, meeting) == ("all meet", "all meet")]
    return [(kind, meeting, loaded) for loaded in (bits, *others)]


_CELLS = [(source, target) for source in _SHAPES for meeting in _MEETING for target in _targets(source, meeting)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    directory, found = tmp_path_factory.mktemp("table"), {}
    for groups in (_WORLD, _FEWER):
        saved = [_saved(shape) for shape in _SHAPES] if groups == _WORLD else []
        found |= launch(directory, corpus, [*saved, *(_loaded(*cell, groups) for cell in _CELLS)], groups)
    return found


def _is_of(loaded: torch.Tensor, parents: list[torch.Tensor]) -> bool:
    mean = torch.stack(parents).mean(0)
    return torch.equal(loaded, parents[0]) if len(parents) == 1 else torch.allclose(loaded, mean, rtol=1e-5, atol=1e-8)


def _of_whom(loaded: list[torch.Tensor], saved: list[torch.Tensor]) -> str:
    """Name of the state that the groups have: that of their own number, or a mean of the saved ones."""
    groups = range(len(loaded))
    if all(_is_of(loaded[group], [saved[group]]) for group in groups):
        return "own"
    share = len(saved) // len(loaded)
    if share > 1 and all(_is_of(loaded[group], saved[share * group :][:share]) for group in groups):
        return f"mean of {share}"
    if all(_is_of(loaded[group], saved) for group in groups):
        return f"mean of {len(saved)}"
    raise AssertionError("a state of nobody")


def _outcome(runs: dict[str, Recorded], source: Shape, target: Shape, groups: int) -> str:
    saved, loaded = runs[_folder(source)], runs[_loaded(source, target, groups).name]
    inner = {
        _of_whom([rank["start"][name] for rank in loaded.ranks], [rank[name][_AT] for rank in saved.ranks])
        for name in ("main", "moments")
    }
    assert len(inner) == 1
    [inner_of] = inner
    outer_of = _of_whom([rank["start anchor"][0] for rank in loaded.ranks], [rank["anchor"][_AT][0] for rank in saved.ranks])
    if "Pier resumes exactly" in loaded.printed:
        assert (inner_of, outer_of) == ("own", "own")
        for mine, theirs in zip(loaded.ranks, saved.ranks, strict=True):
            assert torch.equal(mine["main"][_AT + 1], theirs["main"][_AT + 1])
        return "exact"
    momentum = [rank["momentum"][_AT][0] for rank in saved.ranks]
    assert _of_whom([rank["start momentum"][0] for rank in loaded.ranks], momentum) == outer_of
    return inner_of if inner_of == outer_of else f"{inner_of}; outer state: {outer_of}"


def _outcomes(runs: dict[str, Recorded], source: Shape, meeting: str, groups: int) -> str:
    """The outcome of a load in the bits of the save, and of one in others."""
    same, *others = (_outcome(runs, source, target, groups) for target in _targets(source, meeting))
    return "; in other bits: ".join([same, *(other for other in others if other != same)])


def table(runs: dict[str, Recorded]) -> str:
    lines = [f"| saved by {_WORLD} groups | loaded by | {_WORLD} groups | {_FEWER} groups |", "|---|---|---|---|"]
    for source in _SHAPES:
        for meeting in _MEETING:
            outcomes = [_outcomes(runs, source, meeting, groups) for groups in (_WORLD, _FEWER)]
            lines.append(f"| {', '.join(source[:2])} | {source[0]}, {meeting} | {' | '.join(outcomes)} |")
    return "\n".join(lines)


def test_page_shows_what_every_kind_of_run_goes_on_with(runs: dict[str, Recorded]) -> None:
    found = table(runs)
    print(found)
    page = (REPOSITORY / "docs" / "checkpoints.md").read_text()
    shown = re.search(r"\| saved by 4 groups .*?(?=\n\n)", page, re.DOTALL)
    assert shown
    assert shown[0] == found
