"""Launch commands as people type them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.errors import PierConfigError


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes 4 --nproc-per-node 8 -m pier_megatron pretrain_gpt.py --lr 1e-3 --optimizer pier",
        "/bin/torchrun --nnodes=4 --nproc_per_node=8 -m pier_megatron --device cuda pretrain_gpt.py --lr 1e-3 --optimizer pier",
        "srun --ntasks 4 python -m torch.distributed.run --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d "
        "pretrain_gpt.py --lr 1e-3 --optimizer pier",
        "torchrun --nnodes 2:4 --nproc-per-node 8 -m pier_megatron --device=cuda pretrain_gpt.py --lr 1e-3 --optimizer pier",
    ],
)
def test_command_is_read(command: str) -> None:
    found = LaunchCommand.parse(shlex.split(command))
    assert (found.nodes, found.ranks_per_node, found.ranks) == (4, 8, 32)
    assert (found.script, found.arguments) == ("pretrain_gpt.py", ("--lr", "1e-3", "--optimizer", "pier"))
    assert found.has_plugin == ("-m pier_megatron" in command)
    assert found.fewest_nodes == (2 if "2:4" in command else None)


@pytest.mark.parametrize(
    ("options", "allocation", "step"),
    [
        ("-N 4 -n 16", {}, (4, 4)),
        ("-N4 -n16 -l --mpi=none", {}, (4, 4)),
        ("--nodes=2-4 --ntasks-per-node 8 --label --partition gpu", {}, (4, 8)),
        ("--ntasks 16 --ntasks-per-node 8", {}, (2, 8)),
        ("-N 4", {}, (4, 1)),
        ("-J test --qos time -N 4", {}, (4, 1)),
        ("-N 4 -n 16 not_installed_here -n 3 -N 2", {}, (4, 4)),
        ("", {"SLURM_NNODES": "4", "SLURM_NTASKS": "16"}, (4, 4)),
        ("", {"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "8"}, (4, 8)),
        ("-N 4 -n 16 -J name nice -n 10 -N 0", {}, (4, 4)),
        # Arguments of srun win over the allocation.
        ("-N 2 --ntasks-per-node 4", {"SLURM_NNODES": "4", "SLURM_NTASKS": "16"}, (2, 4)),
        ("-n 4", {"SLURM_NNODES": "4", "SLURM_NTASKS": "16"}, (4, 1)),
    ],
)
def test_processes_that_srun_starts(
    options: str, allocation: dict[str, str], step: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    command = LaunchCommand.parse(shlex.split(f"srun {options} python -u -X dev -m pier_megatron pretrain_gpt.py --lr 1e-3"))
    assert (command.nodes, command.ranks_per_node) == step
    assert (command.launcher, command.has_plugin, command.script) == ("python", True, "pretrain_gpt.py")
    assert command.arguments == ("--lr", "1e-3")


@pytest.mark.parametrize(
    ("words", "script", "is_module"),
    [("train.py", "train.py", False), ("-m my.train", "my.train", True), ("-m pier_megatron train.py", "train.py", False)],
)
def test_python_alone_starts_one_process(words: str, script: str, is_module: bool) -> None:
    command = LaunchCommand.parse(["python", *words.split()])
    assert (command.nodes, command.ranks_per_node) == (1, 1)
    assert (command.script, command.is_module) == (script, is_module)


_RUN = "python train.py --lr 1e-3"


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["srun", "-N2", "--ntasks-per-node=4", "bash", "-x", "-c", _RUN], ("srun", 2, 4)),
        (["srun", "-N2", "-n8", "bash", "-l", "-euo", "pipefail", "-c", _RUN], ("srun", 2, 4)),
        (
            f"srun -N2 -n8 singularity exec -B /data image.sif ./launch.sh {_RUN.removeprefix('python ')}".split(),
            ("srun", 2, 4),
        ),
        (f"mpirun -np 32 {_RUN}".split(), ("mpirun", 1, 32)),
        (f"mpirun -np 32 --map-by ppr:8:node -x RANK {_RUN}".split(), ("mpirun", 4, 8)),
        (f"mpiexec -n 8 -ppn 4 -genv A 1 {_RUN}".split(), ("mpiexec", 2, 4)),
        (f"mpirun -np 8 -H first:4,second:4 {_RUN}".split(), ("mpirun", 2, 4)),
        (f"mpirun -n 12 --hostfile hosts {_RUN}".split(), ("mpirun", 3, 4)),
        (f"aprun -n 8 -N 4 ./launch.sh {_RUN.removeprefix('python ')}".split(), ("aprun", 2, 4)),
    ],
)
def test_lines_of_clusters(
    words: list[str], step: tuple[str, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.sh").write_text('#!/bin/bash\nexport RANK=$SLURM_PROCID\nexec python3 -u \\\n  "$@"\n')
    (tmp_path / "hosts").write_text("# nodes\na slots=4\nb slots=4\nc slots=4\n")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PBS_"))]:
        monkeypatch.delenv(name)
    command = LaunchCommand.parse(words)
    assert (command.surroundings.starter, command.nodes, command.ranks_per_node) == step
    assert (command.script, command.arguments) == ("train.py", ("--lr", "1e-3"))
    if "./launch.sh" in words:
        assert command.surroundings.provides("RANK", differs=True)


def test_options_in_the_text_of_a_shell_are_not_those_of_srun() -> None:
    text = "ulimit -n 65536; torchrun --nnodes 2 --nproc-per-node 8 -m pier_megatron pretrain_gpt.py"
    command = LaunchCommand.parse(["srun", "-N", "2", "--ntasks-per-node", "1", "bash", "-c", text])
    assert (command.surroundings.nodes, command.surroundings.tasks_per_node, command.ranks) == (2, 1, 16)


def test_what_stands_around_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1")
    around = LaunchCommand.parse(shlex.split("A=1 srun -N 1 --export=ALL,B=2 env C=3 python train.py")).surroundings
    assert all(around.provides(name, differs=False) for name in ("A", "B", "C", "HERE"))
    assert not any(around.provides(name, differs=True) for name in ("A", "B", "C", "HERE"))
    around = LaunchCommand.parse(
        ["srun", "-N", "1", "--export=NONE", "bash", "-c", "D=$SLURM_PROCID python train.py"]
    ).surroundings
    assert around.provides("D", differs=True)
    assert not around.provides("HERE", differs=False)


@pytest.mark.parametrize(
    ("flags", "rendezvous"),
    [
        ("", None),
        ("--master-addr first --node-rank 1", "static"),
        ("--rdzv-backend c10d", None),
        ("--rdzv-backend c10d --rdzv-endpoint first:29500", "c10d"),
    ],
)
def test_how_nodes_find_each_other(flags: str, rendezvous: str | None) -> None:
    command = LaunchCommand.parse(f"torchrun --nnodes 2 --nproc-per-node 8 {flags} pretrain_gpt.py".split())
    assert command.rendezvous == rendezvous


def test_command_on_the_cpu_gets_what_the_launcher_adds() -> None:
    command = "torchrun --nproc-per-node 2 -m pier_megatron --device cpu pretrain_gpt.py --num-workers 2"
    arguments = LaunchCommand.parse(shlex.split(command)).arguments
    assert arguments[:2] == ("--num-workers", "2")
    assert "--distributed-backend" in arguments
    assert arguments.count("--num-workers") == 1


def test_path_with_an_equals_sign_is_one_word() -> None:
    for device in ("", "--device cuda ", "--device=cuda "):
        command = f"torchrun --nproc-per-node 2 -m pier_megatron {device}runs/lr=3/pretrain_gpt.py --lr=3"
        read = LaunchCommand.parse(shlex.split(command))
        assert (read.script, read.arguments) == ("runs/lr=3/pretrain_gpt.py", ("--lr=3",))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mpirun pretrain_gpt.py", "^no torchrun"),
        (
            "srun -n 4 singularity exec x.sif ./launch.sh pretrain_gpt.py",
            "^no torchrun .* no python; ./launch.sh cannot be read",
        ),
        ("mpirun -np 4 --hostfile none python pretrain_gpt.py", "^mpirun: the number of nodes .* --npernode"),
        ("srun --ntasks-per-node 8 python pretrain_gpt.py", "number of nodes or tasks cannot be seen"),
        ("srun -N 4 bash -c 'python \"train.py'", "^No closing quotation, in bash -c"),
        ("python -c pass", "no training script"),
        ("srun --nodes 8 bash -c", "no torchrun in this command, and no python"),
        ("torchrun --nproc-per-node 1 -m pier_megatron -h", "-h asks for help"),
        ("torchrun --nproc-per-node gpu pretrain_gpt.py", "number of GPUs per node"),
        ("torchrun --nproc-per-node 8 -m pier_megatron", "arguments are required: SCRIPT"),
        ("torchrun --nproc-per-node 8 -m pier_megatron --device", "argument --device: expected one argument"),
        ("torchrun --nproc-per-node 8 -m pier_megatron --device=tpu train.py", "--device: invalid choice: 'tpu'"),
    ],
)
def test_what_cannot_be_read_is_refused(command: str, said: str) -> None:
    with pytest.raises(PierConfigError, match=said):
        LaunchCommand.parse(shlex.split(command))


def test_megatron_of_a_checkout_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    job = LaunchCommand(1, 2, str(tmp_path / "pretrain_gpt.py"), ())
    job.find_megatron()
    # Modules in the script's folder are found, as in the job, and shadow nothing here.
    assert sys.path == [*before, str(tmp_path)]
    sys.path.pop()
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").touch()
    job.find_megatron()
    assert sys.path == [str(tmp_path), *before]


def test_bash_hands_doctor_the_launch_lines_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    scripts = [text for text in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "#SBATCH" in text]
    assert len(scripts) >= 2
    said = {"scontrol": 'echo node0; [ "$1" = show ] || touch "$0.called"', "printed": 'printf "%s\\0" "$@"; exit 1'}
    for name, printed in said.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{printed}")
        (tmp_path / name).chmod(0o755)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_NNODES", "8")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CHECK", "printed")
    for text in scripts:
        found = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
        job = LaunchCommand.parse(found.stdout.split("\0")[:-1])
        assert (job.nodes, job.ranks_per_node, job.script) == (8, 4, "pretrain_gpt.py")
        assert "SLURM_NODEID" in job.surroundings.wrapper
        # Whatever doctor says, the job that it was asked in stays as it is.
        assert not (tmp_path / "scontrol.called").exists()
