"""The ``train.sh`` that ``pier-megatron experts plan`` writes, and ``score``, on what stands in for Python."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pier_megatron.experiments.experts.ensemble import Machines
from pier_megatron.experiments.experts.plan import write_script
from pier_megatron.experiments.experts.planned import Expert, Model, Plan

pytestmark = pytest.mark.slow

EXPERTS = ["MHo-IHo/law", "MHo-IHo/history", "MHo-IHo/physics"]

# Takes its time to end, notes how it was started, and trains to the end unless a file says that it fails or waits.
_PYTHON = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(1)))
words = sys.argv[1:]
save = pathlib.Path(words[words.index("--save") + 1])
gpus, node = (os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "SLURM_NODEID"))
started = {{"words": words, "folder": os.getcwd(), "gpus": gpus, "node": node}}
print(json.dumps(started), flush=True)
if (save.parent / "waits").exists():
    (save.parent / "pid").write_text(str(os.getpid()))
    time.sleep(float((save.parent / "waits").read_text()))
if (save.parent / "fails").exists():
    sys.exit(3)
save.mkdir(exist_ok=True)
(save / "latest_checkpointed_iteration.txt").write_text("4" if (save.parent / "stops").exists() else "8")
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """A plan in a folder with a space in its name."""
    commands = tmp_path / "com mands"
    commands.mkdir()
    (commands / "python").write_text(_PYTHON)
    (commands / "python").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def plan(device: str = "cuda", **machines: int) -> Plan:
        experts = tuple(Expert(name, (name,), "one", 8, 1e9, 1e9, None) for name in EXPERTS)
        models = {"one": Model((), None, 1, 1)}
        found = Plan(tmp_path / "all of it", "/scripts/my pretrain.py", device, 4, "one", {}, (), models, experts)
        for name in EXPERTS:
            (found.folder / name).mkdir(parents=True)
            arguments = ["--tokenizer-model", "a tokenizer's", "--save", str(found.checkpoints(name))]
            (found.folder / name / "arguments.txt").write_text("\n".join(arguments) + "\n")
        with monkeypatch.context() as patch:
            patch.setattr("sys.executable", str(commands / "python"))
            found.write()
            write_script(found, Machines(**{"gpus-per-node": 4, "ranks-per-expert": 2, **machines}))
        return found

    return plan


def run(plan: Plan, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([plan.folder / "train.sh", *words], capture_output=True, text=True, timeout=60)


def started(plan: Plan, name: str) -> list[dict[str, Any]]:
    """How an expert was started, each time."""
    log = plan.folder / name / "log.txt"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_all_are_trained_once_and_a_failure_stops_nobody(planned: Callable[..., Plan]) -> None:
    plan = planned()
    (plan.folder / EXPERTS[0] / "fails").touch()
    first = run(plan)
    assert (first.returncode, first.stderr) == (1, "")
    assert f"{EXPERTS[0]}: ended with status 3 at iteration 0 of 8\n" in first.stdout
    assert [expert.name for expert in plan.untrained()] == [EXPERTS[0]]
    # Two run at once; the third takes the devices of the one that ends first.
    gpus = [started(plan, name)[0]["gpus"] for name in EXPERTS]
    assert gpus[:2] == ["0,1", "2,3"]
    assert gpus[2] in gpus[:2]
    words = started(plan, EXPERTS[1])[0]["words"]
    assert words[:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert words[5:12] == [
        *("-m", "pier_megatron", "--device", "cuda", "/scripts/my pretrain.py"),
        *("--tokenizer-model", "a tokenizer's"),
    ]
    (plan.folder / EXPERTS[0] / "fails").unlink()
    again = run(plan, "0", "1")
    assert (again.returncode, again.stdout.splitlines()[0]) == (0, "1 of 2 experts are trained")
    assert not plan.untrained()
    assert [len(started(plan, name)) for name in EXPERTS] == [2, 1, 1]
    assert run(plan).stdout == "3 of 3 experts are trained\n"


def test_one_that_ends_early_has_not_been_trained(planned: Callable[..., Plan]) -> None:
    plan = planned()
    for name in EXPERTS:
        (plan.folder / name / "stops").touch()
    assert run(plan, "1").returncode == 1
    assert run(plan).stdout.count("ended with status 0 at iteration 4 of 8") == 3
    for number in ("3", "-1", "x", "--help"):
        refused = run(plan, number)
        assert (refused.returncode, refused.stderr) == (2, f"train.sh: {number}: no such expert. There are 0 to 2\n")


def test_a_script_that_runs_is_read_on_though_another_is_written(planned: Callable[..., Plan]) -> None:
    plan = planned("cpu")
    (plan.folder / EXPERTS[0] / "waits").write_text("1")
    with subprocess.Popen([plan.folder / "train.sh"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (plan.folder / EXPERTS[0] / "pid").exists():
            time.sleep(0.05)
        more = dataclasses.replace(plan, experts=plan.experts * 5)
        write_script(more, Machines(**{"gpus-per-node": 4, "ranks-per-expert": 2}))
        assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


def test_an_expert_is_trained_once_at_a_time(planned: Callable[..., Plan]) -> None:
    plan = planned("cpu")
    (plan.folder / EXPERTS[0] / "waits").write_text("2")
    with subprocess.Popen([plan.folder / "train.sh", "0"], stdout=subprocess.PIPE, text=True) as process:
        while not (plan.folder / EXPERTS[0] / "pid").exists():
            time.sleep(0.05)
        second = run(plan, "0")
        assert (second.returncode, f"{EXPERTS[0]}: another train.sh trains it" in second.stderr) == (1, True)
        assert process.wait(60) == 0
    assert len(started(plan, EXPERTS[0])) == 1


def test_it_takes_the_gpus_that_its_caller_shows(planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    refused = run(plan)
    assert (refused.returncode, refused.stderr) == (2, "train.sh: CUDA_VISIBLE_DEVICES shows 1 devices, an expert takes 2\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-6a,7")
    assert run(plan).returncode == 0
    assert {started(plan, name)[0]["gpus"] for name in EXPERTS} == {"5,GPU-6a"}


def test_script_for_slurm_is_an_array(planned: Callable[..., Plan]) -> None:
    """``tests/slurm`` submits it."""
    plan = planned(**{"nodes": 2, "ranks-per-expert": 8})
    assert "Submit it: sbatch" in run(plan).stderr
    head = (plan.folder / "train.sh").read_text().splitlines()
    assert "#SBATCH --job-name experts --array 0-2 --requeue" in head
    assert {"#SBATCH --nodes 2 --ntasks-per-node 1", "#SBATCH --gpus-per-node 4", "#SBATCH --exclusive"} <= {*head}


@pytest.mark.parametrize("is_closed", [False, True])
def test_ctrl_c_or_a_closed_terminal_ends_all_of_it(
    is_closed: bool, planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the CPU it takes what was planned, whatever GPUs are shown.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = planned("cpu")
    for name in EXPERTS:
        (plan.folder / name / "waits").write_text("60")
    # A terminal sends it to what is in the foreground, which need not be the script.
    keyboard, terminal = os.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", plan.folder / "train.sh"], stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        pids = [plan.folder / name / "pid" for name in EXPERTS[:2]]
        deadline = time.monotonic() + 30
        while not all(path.exists() and path.read_text() for path in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.close(terminal)
        if not is_closed:
            os.write(keyboard, b"\x03")
            assert process.wait(30) == 130
        os.close(keyboard)
        assert process.wait(30) == 130
    assert not any(Path("/proc", path.read_text(), "exe").exists() for path in pids)


def test_shellcheck_finds_nothing(planned: Callable[..., Plan]) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, "--severity=warning", planned().folder / "train.sh"], capture_output=True)
    assert (checked.returncode, checked.stdout) == (0, b"")


@pytest.mark.parametrize("is_early", [True, False])
def test_a_signal_ends_what_scores(tmp_path: Path, is_early: bool) -> None:
    expert = Expert("MHo-IHo/law", ("law",), "one", 8, 1e9, 1e9, None)
    plan = Plan(tmp_path, "pretrain.py", "cpu", 1, "one", {"law": "law"}, ("law",), {"one": Model((), None, 1, 1)}, (expert,))
    plan.write()
    plan.checkpoints(expert.name).mkdir(parents=True)
    (plan.checkpoints(expert.name) / "latest_checkpointed_iteration.txt").write_text("8")
    (tmp_path / "python").write_text(f"#!/bin/bash\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    code = (
        f"import argparse, sys; sys.executable = '{tmp_path}/python'; from pier_megatron.experiments.experts import score; "
        f"sys.exit(score.run(argparse.Namespace(folder=__import__('pathlib').Path('{tmp_path}'))))"
    )
    pid, deadline = tmp_path / "pid", time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0 of 1 models are scored on law\n"
        while not is_early and not (pid.exists() and pid.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert "start the same command again" in process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert not pid.exists() or not Path("/proc", pid.read_text().strip(), "exe").exists()
