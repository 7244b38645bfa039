"""Compression inside a group: the way that encoded bytes take, what is on the wire, and what it does to losses."""

import re
from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch

from pier_megatron.integration.census import CollectiveCensus

pytestmark = pytest.mark.processes

_STEPS = "--train-iters 3 --global-batch-size 16 "
_LONGER = "--train-iters 6 --global-batch-size 16 "
_TENSOR = "--tensor-model-parallel-size 2 "
_PIPELINE = "--pipeline-model-parallel-size 2 "
_VIRTUAL = _PIPELINE + "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2 "
_SHARDED = "--use-distributed-optimizer "
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather "
_HIDDEN = _SHARDED + _OVERLAPPED
_PIER = "--optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 2 --pier-lazy-start-iters 2 "

# What is trained with and without, and the dimensions that are compressed in it.
_ROUTES = {
    "1F1B, overlapped": (_PIPELINE + _STEPS + _HIDDEN + "--bf16", "dp pp gather"),
    "interleaved": (_VIRTUAL + _STEPS + _HIDDEN, "dp pp"),
    "breadth-first, some skipped": (
        _VIRTUAL + _STEPS + _HIDDEN + "--bf16 --pier-layered --pier-skip-fraction 0.2",
        "dp pp gather",
    ),
    # Its stages also tell each other the shape of what they send.
    "whole optimizer on each rank": (_PIPELINE + _STEPS + "--overlap-grad-reduce", "dp pp"),
    "mean in the collective": (_TENSOR + _STEPS + _HIDDEN + "--ddp-average-in-collective", "dp tp"),
    "bf16 gradients": (_STEPS + _HIDDEN + _TENSOR + "--bf16 --grad-reduce-in-bf16", "dp tp gather"),
    "experts": (_PIPELINE + _STEPS + _HIDDEN + "--num-experts 2 --expert-model-parallel-size 2", "dp pp"),
    "pier": (_LONGER + _PIER + _OVERLAPPED + "--bf16", "dp gather"),
}
_UNHIDDEN = _PIPELINE + _STEPS + _SHARDED
_EXACT = " --pier-compress naive,outer=off"
_AGGRESSIVE = _LONGER + _PIER + _OVERLAPPED + "--bf16 --pier-compress aggressive,gather=int8 --save-interval 100 "
# In one buffer, tensor-parallel ranks hold copies of some parameters and their own part of others.
_COPIES = _LONGER + "--bf16 " + _TENSOR
_COPIED = {
    "sharded": _COPIES + _HIDDEN + "--pier-compress aggressive,gather=int8",
    "groups": _COPIES
    + "--optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 2 --pier-lazy-start-iters 4 "
    + "--pier-compress aggressive,outer=int4",
}
_CENSUS = ["census"]
# One all-reduce, over all groups in the lazy start and over the own one after it, of gradients that are scaled alike.
_SWITCHING = (
    _LONGER + "--optimizer pier --pier-preset pier "
    "--pier-groups 2 --pier-sync-interval 2 --pier-lazy-start-iters 2 "
    "--pier-inner-optimizer muon --muon-fp32-matmul-prec high --bf16 --calculate-per-token-loss --pier-compress dp=int4 "
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compression")


@pytest.fixture(scope="module")
def runs(directory: Path, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    trainings = []
    for name, (argv, _) in _ROUTES.items():
        shapes = ["lengths that vary"] if name == "whole optimizer on each rank" else []
        trainings.append(Run(name, argv, ["weights"], shapes))
        trainings.append(Run(f"{name}, exact", argv + _EXACT, ["weights"], ["lossless codecs", *shapes]))
    overlapped, pier = _ROUTES["1F1B, overlapped"][0], _ROUTES["pier"][0]
    trainings += [
        Run("hybrid", _UNHIDDEN + " --pier-compress hybrid", ["census"]),
        Run("1F1B", _UNHIDDEN),
        Run("naive", f"{overlapped} --pier-compress naive"),
        Run("naive pier", f"{pier} --pier-compress naive", ["census"]),
        Run("aggressive", _AGGRESSIVE + "--save {directory}/aggressive", ["main"], ["small pieces"], saves=[3, 5]),
        Run("resumed at 5", _AGGRESSIVE + "--load {directory}/aggressive --ckpt-step 5", ["main"], ["small pieces"]),
        *(Run(f"copied, {name}", argv) for name, argv in _COPIED.items()),
        Run("switching", _SWITCHING, ["main"]),
        Run("switching, saved", _SWITCHING + "--save {directory}/switching --save-interval 100", ["main"], saves=[2]),
        Run("halves", f"{_STEPS}--overlap-grad-reduce --ddp-bucket-size 2000 --pier-compress dp=int8", _CENSUS),
    ]
    return launch(directory, corpus, trainings)


@pytest.mark.parametrize("name", _ROUTES)
def test_the_way_alone_changes_nothing(runs: dict[str, Recorded], name: str) -> None:
    plain, exact = runs[name], runs[f"{name}, exact"]
    assert len(plain.losses) >= 3
    assert exact.losses == plain.losses
    assert exact.grad_norms == plain.grad_norms
    assert exact.differing_weights(plain) == []


def said(run: Recorded) -> list[dict[str, tuple[float, str, float]]]:
    """What the last rank said that it has sent, by iteration and dimension: megabytes, codec, and megabytes without."""
    lines: list[dict[str, tuple[float, str, float]]] = []
    for line in run.ranks[-1]["said"]:
        found = re.fullmatch(r" sent by this rank per iteration, (\w+) \(.*\): (\S+) MB in (\w+), (\S+) MB without", line)
        if found:
            dimension, sent, codec, uncompressed = found.groups()
            if not lines or dimension in lines[-1]:
                lines.append({})
            lines[-1][dimension] = (float(sent), codec, float(uncompressed))
    return lines


@pytest.mark.parametrize("name", _ROUTES)
def test_says_what_is_compressed(runs: dict[str, Recorded], name: str) -> None:
    lines = said(runs[f"{name}, exact"])
    assert set().union(*lines) == set(_ROUTES[name][1].split())
    assert {codec for line in lines for _, codec, _ in line.values()} == {"int8"}


def test_bytes_on_the_wire_are_what_is_said(runs: dict[str, Recorded]) -> None:
    # Nobody looks on at the last iteration.
    census = runs["hybrid"].ranks[-1]["census"].values()
    for collectives, line in zip(census, said(runs["hybrid"])[:2], strict=True):
        sent = {name: sum(c.nbytes for c in collectives if c.name == name) for name in ("send", "alltoall_base_")}
        activations, codec, uncompressed = line["pp"]
        assert (activations, codec) == (pytest.approx(sent["send"] / 1e6, abs=1e-3), "bf16")
        assert activations == pytest.approx(uncompressed / 2, abs=1e-3)
        gradients, codec, uncompressed = line["dp"]
        # One of two parts stays here.
        assert (gradients, codec) == (pytest.approx(sent["alltoall_base_"] / 2 / 1e6, abs=1e-3), "int8")
        # The parameters of this model are hardly longer than a block, which each of them fills up.
        assert gradients < 0.3 * uncompressed


@pytest.mark.parametrize(
    ("name", "plain"), [("hybrid", "1F1B"), ("naive", "1F1B, overlapped"), ("naive pier", "pier"), ("aggressive", "pier")]
)
def test_losses_are_nearly_those_without(runs: dict[str, Recorded], name: str, plain: str) -> None:
    losses, expected = runs[name].losses, runs[plain].losses
    assert losses.keys() == expected.keys()
    assert losses != expected
    assert losses == pytest.approx(expected, rel=1e-2)


def test_both_halves_of_an_all_reduce_are_hidden(runs: dict[str, Recorded]) -> None:
    # In the first iteration Megatron does not know yet when gradients are complete, and nobody looks on at the last.
    names = [found.name for found in runs["halves"].ranks[0]["census"][2]]
    halves = "".join({"alltoall_base_": "1", "_allgather_base_": "2"}.get(name, "") for name in names)
    # The second half of a bucket begins after the first half of the next one has begun.
    assert re.fullmatch("1(12){3,}2", halves)


def test_what_was_dropped_in_the_lazy_start_stays_there(runs: dict[str, Recorded]) -> None:
    # A save has the same effect.
    switching, saved = runs["switching"], runs["switching, saved"]
    assert switching.losses == saved.losses
    for rank, expected in zip(switching.ranks, saved.ranks, strict=True):
        assert torch.equal(rank["main"][6], expected["main"][6])


@pytest.mark.parametrize("name", _COPIED)
def test_copies_stay_equal(runs: dict[str, Recorded], name: str) -> None:
    # The launch compares them in the end, as in all other runs.
    assert len(runs[f"copied, {name}"].losses) == 6


def test_nothing_crosses_between_outer_steps(runs: dict[str, Recorded]) -> None:
    run = runs["naive pier"]
    census, counter = run.ranks[0]["census"], CollectiveCensus()
    crossing = {}
    for iteration, collectives in census.items():
        counter.collectives = [found for found in collectives if found.nbytes > 4096]
        crossing[iteration] = sum(found.nbytes for found in counter.crossing(run.ranks[0]["group_of"]))
    assert crossing[3] == crossing[5] == 0
    parameters = run.ranks[0]["parameters"]
    for iteration in (1, 2, 4):
        assert 0 < crossing[iteration] < 0.6 * 4 * parameters


def test_resumes_bit_for_bit(runs: dict[str, Recorded]) -> None:
    whole, resumed = runs["aggressive"], runs["resumed at 5"]
    assert "Pier resumes exactly from iteration 5" in resumed.printed
    assert resumed.losses == {6: whole.losses[6]}
    for rank, expected in zip(resumed.ranks, whole.ranks, strict=True):
        assert torch.equal(rank["main"][6], expected["main"][6])
