"""Saved, stopped and resumed runs against the run that never stopped, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Recorded, Run, launch
from megatron.core import dist_checkpointing

pytestmark = pytest.mark.processes

_PIER = "--train-iters 8 --optimizer pier --pier-preset pier --pier-groups 2 --pier-sync-interval 2 --pier-lazy-start-iters 4 "
# Exchanges are always in flight, and residuals hold most of the pseudo-gradients.
_HIDDEN = "--pier-overlap 2 --pier-exchange-dtype int1 --pier-offload "
_FP16 = "--fp16 --initial-loss-scale 1024 "
_PROBES = ["main", "outer"]

# One micro-batch for each replica.
_LAYOUTS = {
    "TP 2": "--tensor-model-parallel-size 2 --global-batch-size 4 ",
    "PP 2": "--pipeline-model-parallel-size 2 --global-batch-size 4 ",
    "inner DP 2": "--global-batch-size 8 --overlap-grad-reduce --overlap-param-gather ",
    "EP 2": "--num-experts 4 --expert-model-parallel-size 2 --moe-router-load-balancing-type none --global-batch-size 8 "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.05 ",
}

# Kinds of run: what is trained, and with which fault.
_KINDS = {
    "bf16": ("--bf16 ", []),
    "hidden exchange": ("--bf16 --pier-outer-rule muon " + _HIDDEN, []),
    "fp16": (_FP16, ["overflow in group 1 at 5 and 6"]),
}
# Each kind and each layout, with the iterations after which it is stopped: in the lazy start, at the switch, between outer
# steps, after one; where an exchange begins and in flight; after a skip. Hidden exchanges on "inner DP 2" are in _BACKGROUND.
_STOPS = {
    ("TP 2", "bf16"): (3, 4, 5, 6),
    ("PP 2", "hidden exchange"): (6, 7),
    ("inner DP 2", "fp16"): (6,),
    ("EP 2", "bf16"): (5,),
}


def base(layout: str, kind: str) -> str:
    return f"{layout}, {kind}".replace(" ", "-")


def resumed(layout: str, kind: str, stop: int) -> str:
    return f"{base(layout, kind)}-from-{stop}"


def _runs() -> list[Run]:
    runs = []
    for (layout, kind), stops in _STOPS.items():
        flags, faults = _KINDS[kind]
        argv = _LAYOUTS[layout] + flags + _PIER
        folder = f"{{directory}}/checkpoints-{base(layout, kind)}"
        # The controls need a finished run, too.
        saves = [*stops, *([8] if (layout, kind) == ("TP 2", "bf16") else [])]
        probes = [*_PROBES, *(["samples"] if layout == "TP 2" else [])]
        runs.append(Run(base(layout, kind), argv + f"--save {folder} --save-interval 8", probes, faults, saves=saves))
        for stop in stops:
            load = f"--load {folder} --ckpt-step {stop} --exit-on-missing-checkpoint"
            runs.append(Run(resumed(layout, kind, stop), argv + load, _PROBES, faults))
    return runs


_FINISHED = f"--load {{directory}}/checkpoints-{base('TP 2', 'bf16')} --exit-on-missing-checkpoint --save-interval 3 "
_BF16 = _LAYOUTS["TP 2"] + "--bf16 " + _PIER
_CONVERTING = "--ckpt-step 5 --ckpt-convert-format torch_dist --ckpt-convert-save {directory}/converted"
_FIRST = "--save-interval 6 --exit-interval 6 --pier-save-inner-state first"
_CONTROLS = [
    Run("finished, again", _BF16 + _FINISHED + "--ckpt-step 8 --save {directory}/again"),
    Run("converted", _BF16 + _FINISHED + _CONVERTING),
    Run("converted, resumed", _BF16 + "--load {directory}/converted/torch_dist --exit-on-missing-checkpoint", _PROBES),
    Run("one group for all", _BF16 + "--save {directory}/first " + _FIRST),
    Run("one group for all, resumed", _BF16 + "--load {directory}/first --ckpt-step 6", _PROBES),
]

_ALONE = _LAYOUTS["TP 2"] + _PIER.replace("groups 2", "groups 1").replace("iters 4", "iters 2")
_ENDS = ["ends for a rerun at 4"]
_RERUN = [
    Run("alone, rerun", _ALONE + "--save {directory}/alone --save-interval 100", [], _ENDS),
    Run("alone, rerun, resumed", _ALONE + "--load {directory}/alone --exit-interval 5"),
    Run("rerun", _BF16 + "--save {directory}/rerun --save-interval 100", [], _ENDS),
    Run("rerun, resumed", _BF16 + "--load {directory}/rerun", _PROBES),
]

# What is saved when no group has taken a step yet, and without the optimizers.
_UNSTEPPED = (
    _LAYOUTS["inner DP 2"]
    + "--fp16 --initial-loss-scale 4294967296 "
    + _PIER.replace("lazy-start-iters 4", "lazy-start-iters 0 --pier-preset diloco")
)
_EMPTY = [
    Run("unstepped", _UNSTEPPED + "--save {directory}/unstepped --save-interval 8", _PROBES, saves=[2]),
    Run("unstepped-from-2", _UNSTEPPED + "--load {directory}/unstepped --ckpt-step 2", _PROBES),
    Run("weights", _UNSTEPPED + "--train-iters 2 --no-save-optim --save {directory}/weights --save-interval 2"),
]

# Iterations that pass: a batch size that grows, chunks of the model that read each for itself.
_PASSING = "--iterations-to-skip 3 5 7 "
_TP2_PASSING = _LAYOUTS["TP 2"] + _PIER + _PASSING
# The batch grows after 1024 tokens, in the fifth of eight iterations.
_VIRTUAL = (
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
    "--micro-batch-size 2 --step-batch-size-schedule 0:8,1024:16 --eval-global-batch-size 8 "
    + _PIER.replace("--train-iters 8", "--train-samples 96")
)
_PASSED = [
    Run("TP 2, passing", _TP2_PASSING, ["samples"]),
    Run("virtual stages", _VIRTUAL, ["samples"]),
    Run("virtual stages, passing", _VIRTUAL + _PASSING, ["samples"]),
]
# By run that passes: the one that reads all.
_READING = {"TP 2, passing": base("TP 2", "bf16"), "virtual stages, passing": "virtual stages"}

# Saves that go on behind training, of exchanges under way in offloaded fragments.
_IN_FRAGMENTS = "--train-iters 9 --pier-sync-interval 3 --pier-lazy-start-iters 3 --pier-overlap 3 --pier-fragments 3 "
_BEHIND = _LAYOUTS["inner DP 2"] + "--bf16 " + _PIER + _HIDDEN + _IN_FRAGMENTS
_ASYNCHRONOUS = "--async-save --use-persistent-ckpt-worker --async-strategy mcore --save-interval 8 "
_SLOWLY = "slow writers that share host memory"
_BACKGROUND = [
    Run("nothing behind", _BEHIND, _PROBES),
    Run("behind", _BEHIND + _ASYNCHRONOUS + "--save {directory}/behind-checkpoints", _PROBES, [_SLOWLY], saves=[7]),
    Run("behind-from-7", _BEHIND + "--load {directory}/behind-checkpoints --ckpt-step 7", _PROBES),
]

_SITES = f"{_LAYOUTS['inner DP 2']} --bf16 {_PIER} {_HIDDEN} --pier-groups 4 --pier-sites 2 --pier-site-interval 1 "
_OF_SITES = [
    Run("sites", _SITES + "--save {directory}/sites-checkpoints --save-interval 8", _PROBES, saves=[7]),
    Run("sites-from-7", _SITES + "--load {directory}/sites-checkpoints --ckpt-step 7", _PROBES),
]

# A rule with a second buffer of its own, over FP32 training.
_RULED = "--pier-outer-rule own_rules:Aside "
_FP32 = _LAYOUTS["inner DP 2"] + _PIER + "--pier-overlap 2 --pier-exchange-dtype int8 --pier-offload "
_RULES = [
    Run("rule", _FP32 + _RULED + "--save {directory}/rule --save-interval 8", _PROBES, saves=[7]),
    Run("rule-from-7", _FP32 + _RULED + "--load {directory}/rule --ckpt-step 7", _PROBES),
    Run("rule dropped", _FP32 + "--pier-override-checkpoint --load {directory}/rule --ckpt-step 7", _PROBES),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def runs(directory: Path, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    everything = _runs() + _CONTROLS + _RERUN + _EMPTY + _PASSED + _BACKGROUND + _OF_SITES + _RULES
    return launch(directory, corpus, everything)


def goes_on_exactly(run: Recorded, reference: Recorded, stop: int) -> None:
    """Compares everything that the rest of a run hangs on, at its end and on the way there."""
    for mine, theirs in zip(run.ranks, reference.ranks, strict=True):
        assert mine["main"].keys() == {iteration for iteration in theirs["main"] if iteration > stop} != set()
        for iteration, parameters in mine["main"].items():
            assert torch.equal(parameters, theirs["main"][iteration])
        for key in ("anchor", "momentum"):
            last = max(theirs[key])
            assert all(torch.equal(*pair) for pair in zip(mine[key][last], theirs[key][last], strict=True))
    assert run.losses == {iteration: loss for iteration, loss in reference.losses.items() if iteration > stop}


@pytest.mark.parametrize(("layout", "kind", "stop"), [(*run, stop) for run, stops in _STOPS.items() for stop in stops])
def test_resumed_run_is_the_run_that_never_stopped(runs: dict[str, Recorded], layout: str, kind: str, stop: int) -> None:
    goes_on_exactly(runs[resumed(layout, kind, stop)], runs[base(layout, kind)], stop)


def reads_the_same(run: Recorded, reference: Recorded) -> None:
    """Compares the samples of each iteration that a run has trained, on every rank."""
    for mine, theirs in zip(run.ranks, reference.ranks, strict=True):
        assert mine["samples"]
        for iteration, samples in mine["samples"].items():
            for one, other in zip(samples, theirs["samples"][iteration], strict=True):
                assert all(torch.equal(*tensors) for tensors in zip(one, other, strict=True))


@pytest.mark.parametrize("passing", _READING)
def test_skipped_iterations_pass_the_samples_of_every_rank(runs: dict[str, Recorded], passing: str) -> None:
    assert not {3, 5, 7} & runs[passing].ranks[0]["samples"].keys()
    reads_the_same(runs[passing], runs[_READING[passing]])


def described(folder: Path, iteration: int) -> dict[str, Any]:
    """What a checkpoint says about itself."""
    metadata: dict[str, Any] = dist_checkpointing.load_content_metadata(str(folder / f"iter_{iteration:07d}"))["pier"]
    return metadata


def test_finished_run_started_again_saves_what_it_was(directory: Path, runs: dict[str, Recorded]) -> None:
    saved = described(directory / f"checkpoints-{base('TP 2', 'bf16')}", 8)
    again = described(directory / "again", 8)
    assert (again["iteration"], again["is_local"], again["own_inner_state"]) == (8, True, (1,))
    assert again == saved


def test_converted_checkpoint_goes_on_exactly(directory: Path, runs: dict[str, Recorded]) -> None:
    assert described(directory / "converted" / "torch_dist", 5)["iteration"] == 5
    goes_on_exactly(runs["converted, resumed"], runs[base("TP 2", "bf16")], 5)


def test_a_run_that_ends_for_a_rerun_goes_on_exactly(runs: dict[str, Recorded]) -> None:
    assert "Pier resumes exactly from iteration 3" in runs["rerun, resumed"].printed
    goes_on_exactly(runs["rerun, resumed"], runs[base("TP 2", "bf16")], 3)
    # In the local phase, of one group.
    assert "Pier resumes exactly from iteration 3" in runs["alone, rerun, resumed"].printed
    assert set(runs["alone, rerun, resumed"].losses) == {4, 5}


def test_a_run_that_has_not_stepped_goes_on_exactly(runs: dict[str, Recorded]) -> None:
    goes_on_exactly(runs["unstepped-from-2"], runs["unstepped"], 2)


def test_weights_alone_are_no_state_of_a_run(directory: Path, runs: dict[str, Recorded]) -> None:
    assert "pier" not in dist_checkpointing.load_content_metadata(str(directory / "weights" / "iter_0000002"))
    assert "outer state 0" not in runs["weights"].printed
    assert "outer state 0" in runs["unstepped"].printed


def test_inner_state_of_one_group_is_not_that_of_all(runs: dict[str, Recorded]) -> None:
    with pytest.raises(AssertionError):
        goes_on_exactly(runs["one group for all, resumed"], runs[base("TP 2", "bf16")], 6)
    ends = [runs["one group for all, resumed"].of_group(group)[0]["main"][8] for group in (0, 1)]
    assert torch.equal(*ends)


def test_training_goes_on_while_a_checkpoint_is_written(runs: dict[str, Recorded]) -> None:
    reference = runs["nothing behind"]
    goes_on_exactly(runs["behind"], reference, 0)
    goes_on_exactly(runs["behind-from-7"], reference, 7)


def test_sites_resume_in_flight(runs: dict[str, Recorded]) -> None:
    goes_on_exactly(runs["sites-from-7"], runs["sites"], 7)


def test_rule_of_ones_own_resumes_with_its_memory(directory: Path, runs: dict[str, Recorded]) -> None:
    goes_on_exactly(runs["rule-from-7"], runs["rule"], 7)
    saved = described(directory / "rule", 7)
    assert saved["rule"] == "own_rules:Aside"
    assert saved["checksums"].keys() == {"anchor", "momentum", "aside"}
    # Without the rule the memory is forgotten, and the last outer step goes another way.
    dropped = runs["rule dropped"]
    assert "outer rule own_rules:Aside is now nesterov" in dropped.printed
    assert "without the outer momentum, which another rule has summed" in dropped.printed
    assert not torch.equal(dropped.ranks[0]["anchor"][8][0], runs["rule"].ranks[0]["anchor"][8][0])
