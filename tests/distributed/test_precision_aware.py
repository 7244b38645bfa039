"""The precision-aware optimizer, on a stand-in of Transformer Engine's FusedAdam, trains as FP32 main parameters do.

A BF16 parameter and the lower half that FusedAdam keeps are an FP32 number, so that nothing may differ by a bit.
"""

import re
from pathlib import Path

import pytest
import torch
from launch import Recorded, Run, launch

pytestmark = pytest.mark.processes

_TE, _OLD = "Transformer Engine 2.13", "Transformer Engine 2.0"
_FP32 = [_TE, "halves rounded up"]
_PROBES = ["inner", "outer", "start anchor"]

_JOB = "--train-iters 12 --bf16 --global-batch-size 16 --weight-decay 0.1 --eval-interval 5 --eval-iters 1 "
_PIER = (
    _JOB
    + "--exit-interval 9 --optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 3 --pier-lazy-start-iters 3 "
)
_AWARE = "--use-precision-aware-optimizer "
_BF16 = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
_MAINS = "--main-params-dtype fp16 "
_FP8 = "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 "
_FP16 = "--exp-avg-dtype fp16 --exp-avg-sq-dtype fp16 "
_TP = _PIER + "--tensor-model-parallel-size 2 --pier-overlap 2 --pier-fragments 3 --pier-exchange-dtype int8 --pier-offload "
_PAIRS = _PIER + "--pier-preset noloco --pier-groups 4 --pier-subgroup-size 2 "
_ENDURES_NAN = "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled "
_BAD = _PIER + _ENDURES_NAN + "--exit-interval 10 "
_NAN = "nan in group 1 at 8"
_LOAD = "--load {directory}/%s --ckpt-step 7 "

# Saved between outer steps, and resumed from there.
_FEWER = {"bf16 moments": _BF16, "fp8 moments": _FP8, "fp16 mains": _MAINS + _FP16}


def _saved_and_resumed(name: str, argv: str) -> tuple[Run, Run]:
    folder = name.replace(" ", "-")
    saving = f"{argv}--save {{directory}}/{folder} --save-interval 12"
    return (
        Run(name, saving, [*_PROBES, "moments", "outer main"], [_TE, _NAN], saves=[7]),
        Run(f"{name}, resumed", argv + _LOAD % folder, _PROBES, [_TE, _NAN]),
    )


_RUNS = [
    Run("fp32", _PIER, _PROBES, _FP32),
    Run("halves", _PIER + _AWARE + "--save {directory}/halves --save-interval 12", _PROBES, [_TE], saves=[7]),
    Run("resumed", _PIER + _AWARE + _LOAD % "halves", _PROBES, [_TE]),
    Run("fp32, TP 2", _TP, _PROBES, _FP32),
    Run("halves, TP 2", _TP + _AWARE, _PROBES, [_TE]),
    Run("fp32, pairs", _PAIRS, _PROBES, _FP32),
    Run("halves, pairs", _PAIRS + _AWARE, _PROBES, [_TE]),
    Run("fp32, bad", _BAD, _PROBES, [*_FP32, _NAN]),
    Run("halves, bad", _BAD + _AWARE, _PROBES, [_TE, _NAN]),
    Run("even", _PIER, _PROBES, [_TE]),
    Run("masters", _PIER + _AWARE, _PROBES, [_OLD]),
    Run("fp16 moments", _BAD + _AWARE + _FP16, [*_PROBES, "moments"], [_TE, _NAN]),
    *(run for name, flags in _FEWER.items() for run in _saved_and_resumed(name, _BAD + _AWARE + flags)),
    Run("fp16 mains, TP 2", _TP + _AWARE + _MAINS, _PROBES, [_TE]),
    Run("another optimizer", _PIER + _LOAD % "halves" + "--pier-override-checkpoint", [], _FP32, fails=True),
    Run(
        "stock",
        _JOB + "--exit-interval 9 --use-distributed-optimizer " + _AWARE + _MAINS + _FP16 + _LOAD % "fp16-mains",
        [],
        [_TE],
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    return launch(tmp_path_factory.mktemp("precision"), corpus, _RUNS)


def differences(run: Recorded, other: Recorded, since: int = 1) -> list[str]:
    """What two runs did not do alike, to the last bit, from an iteration on."""

    def differ(one: torch.Tensor, two: torch.Tensor) -> bool:
        return not torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)

    assert run.losses.keys() == {t for t in other.losses if t >= since}
    found = [f"loss of {t}" for t in run.losses if repr(run.losses[t]) != repr(other.losses[t])]
    for rank, (mine, those) in enumerate(zip(run.ranks, other.ranks, strict=True)):
        for kind in ("inner", "anchor", "momentum"):
            for t in run.losses:
                pairs = zip(mine[kind][t], those[kind][t], strict=True)
                found += [f"{kind} of rank {rank} after {t}" for one, two in pairs if differ(one, two)]
    return found


@pytest.mark.parametrize("kind", ["", ", TP 2", ", pairs"])
def test_halves_train_as_fp32_main_parameters(runs: dict[str, Recorded], kind: str) -> None:
    assert differences(runs[f"halves{kind}"], runs[f"fp32{kind}"]) == []


def test_bad_group_is_restarted_as_with_fp32_main_parameters(runs: dict[str, Recorded]) -> None:
    # A half that is made NaN is in the model at once, an FP32 main parameter with the next step.
    before = {"loss of 9", "inner of rank 2 after 9", "inner of rank 3 after 9"}
    assert {*differences(runs["halves, bad"], runs["fp32, bad"])} <= before


def test_masters_of_older_releases_train_as_fp32_main_parameters(runs: dict[str, Recorded]) -> None:
    assert differences(runs["masters"], runs["even"]) == []


@pytest.mark.parametrize(("resumed", "run"), [("resumed", "halves"), ("bf16 moments, resumed", "bf16 moments")])
def test_resumes_exactly(runs: dict[str, Recorded], resumed: str, run: str) -> None:
    assert "Pier resumes exactly" in runs[resumed].printed
    assert differences(runs[resumed], runs[run], since=8) == []


@pytest.mark.parametrize("run", ["bf16 moments", "fp16 moments", "fp8 moments", "fp16 mains"])
def test_excluded_group_takes_over_moments(runs: dict[str, Recorded], run: str) -> None:
    def equal_after(iteration: int) -> list[bool]:
        moments = [[rank["moments"][iteration] for rank in runs[run].of_group(group)] for group in (0, 1)]
        assert all(moment.isfinite().all() for of_group in moments for moment in of_group)
        return [torch.equal(*of_place) for of_place in zip(*moments, strict=True)]

    assert all(equal_after(9))
    assert not any(equal_after(10))


def test_stock_megatron_begins_from_the_anchor(runs: dict[str, Recorded]) -> None:
    assert runs["stock"].losses.keys() == {8, 9}


@pytest.mark.parametrize(
    ("run", "like", "until"),
    [
        ("fp8 moments", "fp16 moments", 11),
        ("fp16 mains", "fp16 moments", 11),
        # Fragments are cut between tensors: the next iteration has another fragment.
        ("fp16 mains, TP 2", "halves, TP 2", 8),
    ],
)
def test_what_is_scaled_trains_close_to_more_bits(runs: dict[str, Recorded], run: str, like: str, until: int) -> None:
    fewer, full = runs[run].losses, runs[like].losses
    assert fewer != full
    assert all(fewer[t] == pytest.approx(full[t], abs=0.01, nan_ok=True) for t in range(1, until))
    assert abs(fewer[max(fewer)] - full[max(full)]) < 0.1


def test_outer_step_writes_scaled_main_parameters_whole(runs: dict[str, Recorded]) -> None:
    run = runs["fp16 mains"]
    for t in (6, 9):
        for rank, other in zip(run.of_group(0), run.of_group(1), strict=True):
            for mine, its, anchor in zip(rank["outer main"][t], other["outer main"][t], rank["anchor"][t], strict=True):
                assert torch.equal(mine, its)
                # FP16 has 11 bits; what is small next to the largest of its tensor has fewer.
                assert torch.allclose(mine, anchor, rtol=2**-11, atol=2**-24 * float(anchor.abs().max()))
                assert not torch.equal(mine, anchor)


@pytest.mark.parametrize("kind", ["fp16 mains", "fp8 moments"])
def test_what_is_scaled_resumes_closely(runs: dict[str, Recorded], kind: str) -> None:
    resumed, run = runs[f"{kind}, resumed"], runs[kind]
    flag = {"fp16 mains": "--main-params-dtype fp16", "fp8 moments": "--exp-avg-dtype fp8"}[kind]
    said = re.search(r"resumes from iteration 7; with numbers that are scaled again \((.*)\); with the whole", resumed.printed)
    assert said is not None
    assert flag in said[1]
    assert all(resumed.losses[t] == pytest.approx(run.losses[t], abs=1e-4, nan_ok=True) for t in (8, 9, 10))


def test_main_parameters_in_another_form_are_refused(runs: dict[str, Recorded]) -> None:
    assert "--use-precision-aware-optimizer 16 is now off" in runs["another optimizer"].error
