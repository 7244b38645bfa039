"""``pier-megatron doctor``: what it says of a job before the job is queued, and what it sees when it starts it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPOSITORY, execute, torchrun

pytestmark = pytest.mark.processes

_DOCTOR = [sys.executable, "-m", "pier_megatron.commands.cli", "doctor"]
_JOB = (
    "torchrun --nnodes 4 --nproc-per-node 4 -m pier_megatron pretrain_gpt.py --num-layers 12 --hidden-size 768 "
    "--num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 512 "
    "--train-iters 100000 --lr 6e-4 --bf16 --tensor-model-parallel-size 2 --vocab-size 50257 --mock-data --optimizer pier "
)


# Examines many jobs in one process: a start of Megatron takes longer than an examination.
_SCRIPT = """
import contextlib, io, json, shlex, sys
from pier_megatron.commands import cli

said = []
for command in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["doctor", *shlex.split(command)])
    said.append([status, out.getvalue(), err.getvalue()])
print("SAID", json.dumps(said))
"""

_HEALTHY = _JOB
_DOUBTFUL = (
    _JOB.replace("torchrun ", "torchrun --max-restarts 3 ") + "--pipeline-model-parallel-size 2 --misspelt 3 --pier-offload"
)
_REFUSED = {
    _JOB + "--tensor-model-parallel-size 8": "does not divide the data-parallel size 2",
    _JOB.replace("--nproc-per-node 4", "--nproc-per-node 1") + "--pier-groups 2": "a tensor-parallel group crosses nodes",
    _JOB + "--eval-interval 75": "75 = 1 x 50 + 25",
    _JOB.replace("--optimizer pier", "--optimizer adam"): "does not use Pier",
    _JOB.replace("--micro-batch-size 4", ""): "Megatron refuses the arguments",
    "python pretrain_gpt.py": "no torchrun in this command",
}


@pytest.fixture(scope="module")
def examined() -> dict[str, tuple[int, str, str]]:
    """Exit status, findings and error of each job."""
    commands = [_HEALTHY, _DOUBTFUL, *_REFUSED]
    process = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        cwd=REPOSITORY,
        env=os.environ | {"NCCL_IB_DISABLE": "1"},
        input=json.dumps(commands),
        capture_output=True,
        text=True,
    )
    said = process.stdout[process.stdout.index("SAID ") + 5 :]
    return dict(zip(commands, map(tuple, json.loads(said)), strict=True))


def test_healthy_job(examined: dict[str, tuple[int, str, str]]) -> None:
    status, said, _ = examined[_HEALTHY]
    assert status == 0
    assert "4 nodes of 4 ranks" in said
    assert "group 3: ranks 12-15 on node 3" in said
    assert re.search(r"8 bytes x [\d,]+ parameters / 2 ranks = 0\.\d+ GB per rank of device memory", said)
    assert "NCCL_SOCKET_IFNAME unset" in said
    assert "WARNING: NCCL_IB_DISABLE=1" in said
    assert "WARNING: not Megatron's" not in said


def test_what_deserves_a_warning(examined: dict[str, tuple[int, str, str]]) -> None:
    status, said, _ = examined[_DOUBTFUL]
    assert status == 0
    assert "WARNING: not Megatron's: --misspelt 3" in said
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said
    assert "not contiguous over nodes (ranks 0-1, 8-9)" in said
    assert "GB of host memory per node" in said


@pytest.mark.parametrize("command", _REFUSED)
def test_job_that_would_fail(examined: dict[str, tuple[int, str, str]], command: str) -> None:
    status, _, said = examined[command]
    assert status == 2
    assert _REFUSED[command] in said.splitlines()[-1]


def test_plan(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pier_megatron.commands.cli", "plan", "--cluster", "perlmutter"]
    picture = tmp_path / "pictures" / "scaling.png"
    process = subprocess.run(
        [*command, "--plot", str(picture), "--json", *shlex.split(_JOB)], cwd=REPOSITORY, capture_output=True, text=True
    )
    plan = json.loads(process.stdout)
    assert plan["groups"] == 4
    assert plan["modes"]["Pier, H = 50, blocking"] < plan["modes"]["synchronous"]
    assert plan["modes"]["Pier, H = 50, overlapped by H / 2"] < plan["modes"]["Pier, H = 50, blocking"]
    assert plan["bytes between groups per outer step and rank"] == pytest.approx(8 * 3 / 4 * plan["parameters per rank"] / 2)
    owned = plan["parameters per rank"] / 2
    assert plan["memory"]["outer state, --pier-offload to move it"] == pytest.approx(8 * owned)
    # Of 16 MiB each: four on the wire, one in hand, one staged ahead; the pseudo-gradient and its mean.
    assert plan["memory"]["chunks of an outer step on their way"] == pytest.approx(2 * 6 * 16 * 2**20)
    sizes = list(map(int, plan["scaling"]))
    assert sizes == [plan["gpus"] // 4 * 2**power for power in range(len(sizes))]
    assert plan["scaling"][str(plan["gpus"])]["synchronous"] == plan["modes"]["synchronous"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert plan["verdict"].startswith(("Use it", "Do not use it"))
    text = execute([*command, *shlex.split(_JOB)], tmp_path / "plan.txt")
    assert "GPU-hours" in text
    assert re.search(r"GB together, of 40 GB$", text, re.MULTILINE)
    text = execute([*command, *shlex.split(_JOB), "--hidden-size", "6144", "--num-layers", "96"], tmp_path / "large.txt")
    assert re.search(r"GB together, of 40 GB: does not fit", text)


def test_started_job_shows_what_crosses_the_groups(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    train, validation = corpus
    training = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 2 --global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 257 --lr 2e-3 --bf16 "
        f"--train-data-path {train} --valid-data-path {validation} --test-data-path {validation} --log-interval 1 "
        "--eval-interval 1000 --eval-iters 1 --train-iters 100 --tensor-model-parallel-size 2 --optimizer pier --pier-groups 2 "
        "--pier-sync-interval 2 --pier-lazy-start-iters 2"
    )
    script = REPOSITORY / "pier_megatron" / "commands" / "demo" / "pretrain_bytes.py"
    job = [*torchrun(4), "-m", "pier_megatron", "--device", "cpu", str(script), *training.split()]
    log = execute([*_DOCTOR, "--start", *job], tmp_path / "log.txt")
    assert "Pier: 2 groups of 2 ranks" in log
    assert re.search(r"Pier doctor: iteration 5, .* rank 0: [1-9]\d* collectives inside its group, and across groups:", log)
    # What the log of every iteration costs, and nothing else.
    assert "iteration        6/" not in log
