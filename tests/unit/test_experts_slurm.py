"""``pier-megatron experts train --submit``: the job scripts, really run, on what stands in for Slurm."""

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts import train
from pier_megatron.experiments.experts.plan import write_scripts
from pier_megatron.experiments.experts.planned import Expert, Model, Plan

pytestmark = pytest.mark.slow

_NAMES = ["law", "history"]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where jobs are noted and, at the end of each, its status."""
    commands, found = tmp_path / "com mands", tmp_path / "queue"
    for folder in (commands, found):
        folder.mkdir()
    for name in ("sbatch", "job", "scontrol", "srun", "torchrun"):
        (commands / name).write_text(f"#!{sys.executable}\n{Path(__file__).with_name('slurm.py').read_text()}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("QUEUE", str(found))
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    return found


@pytest.fixture
def plan(tmp_path: Path, queue: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    folder = tmp_path / "all of it" / "runs"
    experts = tuple(Expert(f"MHo-IHo/{name}", (name,), "one", 8, 1e9, (0, 1, 2, 3), (0, 1), 1e9, None) for name in _NAMES)
    model = Model(("--seq-length", "32", "--tokenizer-model", "a tokenizer's"), None, 1, 1)
    made = Plan(folder, "/scripts/my pretrain.py", "cpu", 4, "one", {}, tuple(_NAMES), {"one": model}, experts)
    monkeypatch.setattr("sys.executable", str(tmp_path / "com mands" / "torchrun"))
    for expert in experts:
        checkpoints = str(made.checkpoints(expert.name))
        write_scripts(made, expert, ["--train-iters", "8", "--save", checkpoints, "--load", checkpoints])
    made.write()
    return made


def submit(plan: Plan) -> int:
    return train.run(argparse.Namespace(folder=plan.folder, submit=True))


def statuses(queue: Path) -> list[int]:
    """Exit statuses of all jobs, when all have ended."""
    deadline = time.monotonic() + 60
    while len(found := list(queue.glob("*.status"))) < len(list(queue.glob("*.job"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(path.read_text()) for path in found]


def test_every_node_starts_what_is_planned(plan: Plan, queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(plan) == 0
    assert statuses(queue) == [0, 0]
    said = capsys.readouterr().out
    assert said.startswith("0 of 2 experts are trained\nMHo-IHo/law: Submitted batch job 0\n")
    jobs = [json.loads((queue / f"{number}.job").read_text()) for number in range(2)]
    for number, (expert, job) in enumerate(zip(plan.experts, jobs, strict=True)):
        assert (job["nodes"], job["ntasks_per_node"], job["exclusive"]) == (2, "1", True)
        lines = [json.loads(line) for line in (plan.folder / expert.name / "log.txt").read_text().splitlines()]
        assert [line[:2] for line in lines] == [[str(number), "node0"]] * 2
        words = [line[2] for line in lines]
        assert sorted(each[each.index("--node-rank") + 1] for each in words) == ["0", "1"]
        assert len({each[each.index("--master-port") + 1] for each in words}) == 1
        for each in words:
            launch = LaunchCommand.parse(["torchrun", *each[each.index("-m") + 2 :]])
            assert (launch.nodes, launch.ranks_per_node, launch.script) == (2, 4, "/scripts/my pretrain.py")
            told = (plan.folder / expert.name / "arguments.txt").read_text().splitlines()
            assert list(launch.arguments[: len(told)]) == told
            assert "a tokenizer's" in told
    assert submit(plan) == 0
    assert capsys.readouterr().out == "2 of 2 experts are trained\n"


def test_no_two_jobs_write_into_one_folder(plan: Plan, queue: Path) -> None:
    (queue / "hold").touch()
    assert [submit(plan) for _ in range(3)] == [0, 0, 0]
    (queue / "hold").unlink()
    assert statuses(queue) == [0] * 6
    # Other experts do not wait.
    assert len({json.loads(path.read_text())["job_name"] for path in queue.glob("*.job")}) == 2


def test_what_failed_or_was_refused_is_submitted_again(plan: Plan, queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (queue / "fail-law").touch()
    (queue / "refuse-history").touch()
    assert submit(plan) == 1
    assert "MHo-IHo/history: sbatch: error: Batch job submission failed: Invalid account" in capsys.readouterr().out
    assert len(statuses(queue)) == 1
    (queue / "refuse-history").unlink()
    assert submit(plan) == 0
    assert capsys.readouterr().out.startswith("0 of 2 experts are trained\n")
    assert len(statuses(queue)) == 3
    assert not train.untrained(plan)


def test_without_slurm_it_says_so(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PierConfigError, match="--submit: no sbatch on the PATH"):
        submit(plan)
