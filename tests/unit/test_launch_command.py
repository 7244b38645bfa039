"""Launch commands as people type them."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from pier_megatron.commands.findings import Findings
from pier_megatron.commands.job_script import launch_line
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.srun import through_script
from pier_megatron.errors import PierConfigError

_REPOSITORY = Path(__file__).parents[2]


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


def test_script_that_starts_what_follows_it(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text('exec python3 -u "$@"\n')
    words = ["srun", str(script), "train.py", "--lr", "1e-3"]
    assert through_script(words) == ([*words[:2], "exec", "python3", "-u", *words[2:]], [])


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
    around = LaunchCommand.parse(shlex.split("mpirun -np 2 -x E=5 -x F python train.py")).surroundings
    assert all(around.provides(name, differs=False) for name in ("E", "F"))
    assert not around.provides("5", differs=False)


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


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the job scripts of the page, where no Slurm is; scripts export into ``os.environ``."""
    page = (_REPOSITORY / "docs" / "deploy.md").read_text()
    texts = [text for text in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "#SBATCH" in text]
    # The log of a job that has run.
    (tmp_path / "log").write_text("iteration 1\n")
    for name, text in zip(("pier.sbatch", "islands.sbatch"), texts, strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "again.sh").symlink_to(_REPOSITORY / "examples" / "again.sh")
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            del os.environ[name]
        yield


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("words", "island"), [("sbatch -N 8 --output log pier.sbatch", ()), ("sbatch --array=2-3 --nodes 8 islands.sbatch", ("2",))]
)
def test_job_scripts_of_the_page_are_read(words: str, island: tuple[str, ...]) -> None:
    findings = Findings()
    job = LaunchCommand.parse(launch_line(words.split(), findings))
    assert (job.nodes, job.ranks_per_node, job.script) == (8, 4, "pretrain_gpt.py")
    assert (job.surroundings.nodes, job.surroundings.tasks_per_node) == (8, 1)
    assert "SLURM_NODEID" in job.surroundings.wrapper
    # What the shell does once torchrun has ended is not the training's.
    assert job.arguments[-1] == "--exit-signal-handler"
    place = job.arguments.index("--pier-island") + 1 if island else 0
    assert job.arguments[place : place + len(island)] == island
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "1140"
    assert os.environ["MASTER_ADDR"] == "node0"
    assert not findings.errors


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("time", "seconds"),
    [("20", 1200), ("21:00", 1260), ("00:20:30", 1230), ("21:01", None), ("1-0", None), ("0-0:21", 1260), ("UNLIMITED", None)],
)
def test_time_below_the_grace_period_is_reported(time: str, seconds: int | None) -> None:
    findings = Findings()
    launch_line(["sbatch", "--time", time, "pier.sbatch"], findings)
    said = f"--time {time}: the job has {seconds} s, and the signal comes up to 1200 s + 60 s before their end"
    assert [said in error for error in findings.errors] == [True] * (seconds is not None)


@pytest.mark.usefixtures("scripts")
def test_job_script_that_hands_over_nothing() -> None:
    Path("plain.sh").write_text("#!/bin/bash\ntorchrun train.py\n")
    Path("ends.sh").write_text("#!/bin/bash\necho no data >&2; exit 3; ${CHECK:-} torchrun train.py\n")
    with pytest.raises(PierConfigError, match=r"plain.sh: its launch line cannot be seen from here. Write \$\{CHECK:-\}"):
        launch_line(["bash", "plain.sh"], Findings())
    with pytest.raises(PierConfigError, match=r"ends.sh: it has ended with status 3 before its launch line: no data"):
        launch_line(["./ends.sh"], Findings())
    assert launch_line(["torchrun", "train.py"], Findings()) == ["torchrun", "train.py"]
