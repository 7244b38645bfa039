"""Launch commands in batch scripts."""

import os
import re
from pathlib import Path

import pytest

from pier_megatron import cli
from pier_megatron.commands import batch_script
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.errors import PierConfigError

_SCRIPT = """#!/bin/bash
#SBATCH --nodes=4            # four nodes
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=${SLURM_GPUS_ON_NODE:-8}
MODEL_ARGS=(
    --num-layers 12 --title "two words"  # small
    --seq-length ${LENGTH:-1024}
)
TRAIN="--micro-batch-size 4 \\
   --lr 6e-4"
TRAIN+=" --bf16"
echo "starting torchrun on $(hostname)"
srun --kill-on-bad-exit=0 torchrun --nnodes $SLURM_NNODES --nproc-per-node "$GPUS" \\
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:29500" \\
    -m pier_megatron pretrain_gpt.py "${MODEL_ARGS[@]}" $TRAIN --save "$FOLDER" "$@" 2>&1 | tee log.txt
"""


def read(words: list[str]) -> tuple[LaunchCommand, list[str]]:
    with batch_script.opened(words) as (launch, notes):
        return LaunchCommand.parse(launch), notes


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("SLURM_") or name in ("FOLDER", "LENGTH", "MASTER_ADDR")]:
        monkeypatch.delenv(name)
    (tmp_path / "job.sh").write_text(_SCRIPT)
    return tmp_path / "job.sh"


@pytest.mark.parametrize("words", [["FILE"], ["sbatch", "FILE"], ["bash", "FILE"]])
def test_launch_command_of_a_script(words: list[str], script: Path) -> None:
    before = dict(os.environ)
    job, notes = read([str(script) if word == "FILE" else word for word in words])
    assert (job.nodes, job.ranks_per_node, job.rendezvous, job.has_plugin) == (4, 4, "c10d", True)
    assert job.script == "pretrain_gpt.py"
    assert list(job.arguments) == [
        "--num-layers", "12", "--title", "two words", "--seq-length", "1024", "--micro-batch-size", "4", "--lr", "6e-4",
        "--bf16", "--save", "$FOLDER",
    ]  # fmt: skip
    assert (job.surroundings.step.nodes, job.surroundings.step.tasks_per_node) == (4, 1)  # type: ignore[union-attr]
    assert notes == [
        f"{script}: read as srun --kill-on-bad-exit=0 torchrun ...; known only to the running job: $MASTER_ADDR, $FOLDER"
    ]
    assert dict(os.environ) == before


def test_options_and_arguments_on_the_command_line(script: Path) -> None:
    job, _ = read(["sbatch", "--nodes", "2", "--parsable", str(script), "--pier-groups", "2"])
    assert (job.nodes, job.arguments[-2:]) == (2, ("--pier-groups", "2"))


def test_commands_of_a_script_find_what_it_exports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with batch_script.opened([str(script)]):
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert os.environ["SLURM_NNODES"] == "4"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


def test_the_word_that_cannot_be_seen_is_named(script: Path) -> None:
    script.write_text(_SCRIPT.replace("$SLURM_NNODES", "$NODES_OF_SITE"))
    with pytest.raises(PierConfigError, match=r"--nnodes \$NODES_OF_SITE: give the number of nodes"):
        read([str(script)])
    script.write_text("echo nothing\n./train.sh small\n")
    with pytest.raises(PierConfigError, match=r"job.sh: no torchrun in this script, and no python"):
        read([str(script)])


def test_a_script_that_does_not_say_on_how_many_nodes_it_runs(script: Path) -> None:
    said = "on how many nodes it runs. Give it as to sbatch: pier-megatron doctor sbatch --nodes 8"
    for nodes in ("$SLURM_NNODES", "${SLURM_JOB_NUM_NODES}"):
        script.write_text(_SCRIPT.replace("#SBATCH --nodes=4", "").replace("$SLURM_NNODES", nodes))
        with pytest.raises(PierConfigError, match=said):
            read([str(script)])
        assert read(["sbatch", "--nodes", "2", str(script)])[0].nodes == 2
    script.write_text("srun -N 2 bash -c 'torchrun --nnodes $SLURM_NNODES --nproc-per-node 1 train.py'")
    with pytest.raises(PierConfigError, match=said):
        read([str(script)])


@pytest.mark.parametrize(
    "text",
    [
        "cat > note <<EOF\nDon't panic, here's \"one\nEOF\n",
        "cat <<-'END' | tee note\nDon't panic\n\tEND\n",
        "echo don't\n",
        "[[ $A =~ ^\\' ]]\nB=( 1 2\n",
        "grep x <<< word\n",
    ],
)
def test_what_nothing_ends_does_not_swallow_the_script(text: str, script: Path) -> None:
    script.write_text(_SCRIPT.replace("set -euo pipefail\n", text))
    job, _ = read([str(script)])
    assert (job.nodes, job.script, job.arguments[:2]) == (4, "pretrain_gpt.py", ("--num-layers", "12"))


@pytest.mark.parametrize(
    ("gres", "ranks"), [("gpu:8,nvme:1", 8), ("nvme:1,gpu:h100:2", 2), ("gpu:a100:4(S:0-1),nvme:1", 4), ("gpu:4", 4)]
)
def test_gpus_among_other_resources(gres: str, ranks: int, script: Path) -> None:
    script.write_text(_SCRIPT.replace("gpu:a100:4", gres))
    assert read([str(script)])[0].ranks_per_node == ranks


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cd FOLDER/below\n", ""),
        ("cd FOLDER\ncd below && ", ""),
        ("#SBATCH --chdir=FOLDER/below\n", ""),
        ("#SBATCH -D FOLDER\ncd below\n", "cd /\n"),
    ],
)
def test_folder_of_the_launch_command(before: str, after: str, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script.parent / "below").mkdir()
    line = "torchrun --nproc-per-node 1 train.py\n"
    script.write_text(before.replace("FOLDER", str(script.parent)) + line + after)
    here = Path.cwd()
    with batch_script.opened([str(script)]) as (words, _):
        assert Path.cwd() == script.parent / "below"
        assert words[-1] == "train.py"
    assert Path.cwd() == here
    # One that cannot be seen changes nothing.
    script.write_text("cd $NOWHERE\ncd /no/such/folder\n" + line)
    with batch_script.opened([str(script)]):
        assert Path.cwd() == here


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("doctor FILE --start", "--start"),
        ("plan --cluster perlmutter FILE --json", "--json"),
        ("plan --cluster perlmutter sbatch -N 2 FILE --tflops=120", "--tflops"),
    ],
)
def test_flags_behind_a_script_go_to_the_script(
    command: str, flag: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.replace("FILE", str(script)).split()) > 0
    told = capsys.readouterr()
    assert f"ERROR: {flag} after job.sh goes to the script. Put it before job.sh." in told.out + told.err


@pytest.mark.parametrize("flag", ["--nodes", "--ranks-per-node"])
def test_flags_of_recipes_need_one(flag: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", flag, "8", str(script)]) == 2
    assert f"{flag} 8 is for --recipe. " in capsys.readouterr().err


def test_scripts_of_the_page(script: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    scripts = [text for text in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "#SBATCH" in text]
    assert len(scripts) >= 2
    for text in scripts:
        script.write_text(text)
        job, _ = read(["sbatch", "--nodes", "8", str(script)])
        assert (job.nodes, job.ranks_per_node, job.script) == (8, 4, "pretrain_gpt.py")
        assert "SLURM_NODEID" in job.surroundings.wrapper
