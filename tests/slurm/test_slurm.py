"""Job scripts of the pages and of the examples under a real Slurm: how their jobs end, and whether they return."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster
import forked_ranks
import pytest
from launch import MODEL, REPOSITORY, data, environment
from test_experts_script import EXPERTS, planned, started

from pier_megatron.commands.demo.corpus import write_documents
from pier_megatron.experiments.experts.planned import Plan

__all__ = ["planned"]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(cluster.missing()), reason=f"Debian's slurm-wlm and munge are missing: no {cluster.missing()}"),
]

_PAGE = (REPOSITORY / "docs" / "deploy.md").read_text()
_SCRIPTS = [text for text in re.findall(r"```bash\n(.*?)```", _PAGE, re.DOTALL) if "#SBATCH" in text]
_PIER, _ISLANDS = _SCRIPTS
_PRETRAIN = REPOSITORY / "tests" / "end_to_end" / "faulty_pretrain.py"
_FLAGS = "--global-batch-size 8 --bf16 --hidden-dropout 0.1 --attention-dropout 0.1 --pier-sync-interval 4 --train-iters 32"
_EXAMPLES = REPOSITORY / "examples"
_RECIPE = (
    "train.slurm small --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr-warmup-iters 2 --log-interval 1 --eval-interval 1000 --eval-iters 1 "
    "--save-interval 1000 --train-iters 16 --tokenizer-type NullTokenizer --vocab-size 257 --split 60,20,20 "
    "--pier-groups 2 --pier-sync-interval 4 --pier-lazy-start-iters 4"
)
# What torchrun prints as it hands a signal on to its rank.
_SENT = "closing signal SIGTERM"
# The recipe takes a node as a whole, and says so itself; here it has a share.
_IN_TIME = ("--nodes", "2", "--signal", "TERM@60")
# Ends before it has saved, whatever it is asked.
_FAILING = """#!/usr/bin/env bash
#SBATCH --requeue
#SBATCH --open-mode append
. ./again.sh || exit 2
${CHECK:+true} srun --ntasks-per-node 1 bash -c 'exit 4'
queue_again $? runs/a "$@"
"""
# A task of an array with a folder of its own, which has saved before each of its first two failures.
_SWEEP = _FAILING.replace("runs/a", "runs/$SLURM_ARRAY_TASK_ID").replace(
    "again.sh || exit 2",
    """again.sh || exit 2
mkdir -p runs/$SLURM_ARRAY_TASK_ID
((${SLURM_RESTART_COUNT:-0} > 1)) || echo 8 > runs/$SLURM_ARRAY_TASK_ID/latest_checkpointed_iteration.txt""",
)
# Where no file can be made, as on a full disk.
_FULL = _FAILING.replace("runs/a", "/proc/self")
# Saved at the signal before the end of its time; doctor would refuse it, but takes time.
_LATE = _FAILING.replace("${CHECK:+true}", "signal_at=1000000\n${CHECK:+false}").replace("exit 4", "exit 3")
# Where a job lives whose node is killed, the recipe, and islands.
_NODES = [f"127.0.0.{number}" for number in range(1, 7)]
_LIFE, _WITH_LIMIT = (("--nodelist", ",".join(_NODES[first : first + 2])) for first in (0, 2))


@pytest.fixture(scope="module")
def slurm() -> Iterator[cluster.Cluster]:
    """A cluster of six nodes."""
    with cluster.Cluster(len(_NODES)) as running:
        yield running


class Submitted:
    """A job script in a folder of its own, submitted once or several times."""

    def __init__(self, slurm: cluster.Cluster, folder: Path, script: str, *waits: int) -> None:
        """Writes the script.

        Args:
            slurm: Cluster that runs it.
            folder: Folder from which it is submitted, for all that it writes.
            script: Text of the script, or name of one in ``examples/``.
            waits: Iterations before which rank 0 waits for :meth:`go_on`.
        """
        self.slurm, self.folder = slurm, folder
        (folder / "ranks").mkdir(parents=True)
        if "\n" in script:
            (folder / "job.sbatch").write_text(script)
            (folder / "again.sh").symlink_to(REPOSITORY / "examples" / "again.sh")
        faults = [{"fault": "waits", "rank": 0, "iteration": iteration} for iteration in waits]
        port = str(forked_ranks.free_port())
        self.variables = environment() | {
            "PIER_TEST_WARM": "",
            "PYTHONUNBUFFERED": "1",
            "PIER_TEST_FOLDER": str(folder / "ranks"),
            "PIER_TEST_LOSSES": str(folder / "losses.txt"),
            "PIER_TEST_FAULTS": json.dumps(faults),
            # torchrun's own default: jobs share this machine.
            "PET_MASTER_PORT": port,
            "MASTER_PORT": port,
        }
        self.number = ""

    def submit(self, *options: str, words: str = "job.sbatch", folder: Path | None = None) -> str:
        """Submits it; returns the job's number."""
        log = str(self.folder / ("log%a.txt" if "--array" in options else "log.txt"))
        self.number = self.slurm.submit(
            "--output", log, *options, *words.split(), folder=folder or self.folder, **self.variables
        )
        return self.number

    def log(self, task: str = "") -> str:
        """What it has printed so far."""
        path = self.folder / f"log{task}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, text: str, times: int = 1, task: str = "", seconds: float = 600) -> None:
        """Waits until it has printed something as many times."""
        deadline = time.monotonic() + seconds
        while len(re.findall(text, self.log(task))) < times:
            assert time.monotonic() < deadline, f"no {text}: {self.log(task)[-5000:]}"
            time.sleep(0.1)

    def go_on(self, iteration: int) -> None:
        """Ends the wait before an iteration."""
        for folder in (self.folder, self.folder / "ranks"):
            (folder / f"go on with {iteration}").touch()

    def kill(self, rank: int, task: str = "") -> None:
        """Ends a rank as the kernel's out-of-memory killer would."""
        os.kill(int((self.folder / "ranks" / task / f"rank{rank}.pid").read_text()), signal.SIGKILL)

    def losses(self) -> dict[int, str]:
        """Losses to the last bit, by iteration; of iterations that were trained again, the last."""
        return dict(line.split() for line in (self.folder / "losses.txt").read_text().splitlines())

    def doctor(self, line: str, folder: Path | None = None) -> tuple[int, list[str]]:
        """What doctor says of a way to submit it: exit status, and errors."""
        command = [sys.executable, "-m", "pier_megatron.cli", "doctor", *line.split()]
        run = subprocess.run(
            command, cwd=folder or self.folder, env=os.environ | self.variables, capture_output=True, text=True, timeout=600
        )
        return run.returncode, re.findall("^ERROR: (.*)$", run.stdout, re.MULTILINE)


def on_cpu(script: str, corpus: tuple[Path, Path], flags: str) -> str:
    """A script of the page: its dots filled in, one rank on each node, on the CPU."""
    changes = {
        "pretrain_gpt.py": f"--device cpu {_PRETRAIN}",
        " ...": " " + " ".join([*MODEL, *data(corpus), *_FLAGS.split(), *flags.split()]),
        "--nproc-per-node 4": "--nproc-per-node 1",
        "--save-interval 1000": "--save-interval 4",
    }
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    return script


@pytest.fixture(scope="module")
def recipe(slurm: cluster.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """The recipe's job with a time limit, on the last two nodes; it runs out of time while other tests run."""
    folder = tmp_path_factory.mktemp("recipe")
    job = Submitted(slurm, folder / "job", "", 10)
    for name in ("checkout", "data/tokenizer"):
        (folder / name).mkdir(parents=True)
    (folder / "checkout" / "pretrain_gpt.py").symlink_to(_PRETRAIN)
    # Documents for each part of the split: Megatron waits for ever on an empty one.
    write_documents(folder / "data" / "text", [REPOSITORY / "LICENSE"] * 10)
    job.variables |= {"MEGATRON_LM_PATH": str(folder / "checkout"), "DATA": str(folder / "data"), "RUNS": str(folder / "runs")}
    job.variables |= {"DEVICE": "cpu", "GPUS_PER_NODE": "1", "GRACE": "60"}
    job.submit("--time", "3", *_IN_TIME, *_WITH_LIMIT, words=_RECIPE, folder=_EXAMPLES)

    def answer() -> None:
        job.wait_for(_SENT, times=2)
        job.go_on(10)

    threading.Thread(target=answer, daemon=True).start()
    return job


@contextlib.contextmanager
def lighthouse(port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The rendezvous server of three islands."""
    command = [sys.executable, "-m", "pier_megatron.cli", "lighthouse", "--islands", "3", "--port", str(port)]
    process = subprocess.Popen([*command, "--heartbeat-timeout", "2"], env=os.environ | {"RUST_LOG": "error"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def islands(
    slurm: cluster.Cluster, corpus: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Submitted, "subprocess.Popen[bytes]", int]]:
    """An array of three islands, which wait before their tenth iteration; their lighthouse, and its port."""
    port = forked_ranks.free_port()
    script = on_cpu(_ISLANDS, corpus, "--pier-island-timeout 60")
    for old, new in {
        "http://10.0.0.1:29510": f"http://127.0.0.1:{port}",
        "29500": str(forked_ranks.free_port()),
        "--pier-groups 4": "--pier-groups 3",
        "--global-batch-size 8": "--global-batch-size 12",
        " --pier-secret-file pier.secret": "",
        "export MASTER": "export PIER_TEST_FOLDER=$PIER_TEST_FOLDER/$SLURM_ARRAY_TASK_ID\nexport MASTER",
    }.items():
        assert old in script
        script = script.replace(old, new)
    job = Submitted(slurm, tmp_path_factory.mktemp("islands") / "job", script, 10, 18, 26)
    for island in "012":
        (job.folder / "ranks" / island).mkdir()
    with lighthouse(port) as process:
        job.submit("--array", "0-2", "--nodes", "1", "--exclude", ",".join(_NODES[:4]))
        yield job, process, port


@pytest.mark.usefixtures("islands")
def test_doctor_agrees_with_slurm(recipe: Submitted, corpus: tuple[Path, Path]) -> None:
    """What doctor refuses ends with status 2 and is not queued again; where it finds nothing, other tests see the job start."""
    slurm, folder = recipe.slurm, recipe.folder.parent
    # Without Slurm's own count of GPUs, too.
    short = "the job has 120 s, and the signal comes up to 60 s + 60 s before their end: it would end as it starts"
    status, errors = recipe.doctor(f"sbatch {' '.join(_IN_TIME)} --time 2 {_RECIPE}", _EXAMPLES)
    assert status == 1
    assert len(errors) == 1
    assert short in errors[0]
    refused = Submitted(slurm, folder / "refused", on_cpu(_PIER, corpus, "--pier-groups 2 --pier-sync-interval 0"))
    refused.submit("--nodes", "2")
    hurried = Submitted(slurm, folder / "hurried", on_cpu(_PIER, corpus, "--pier-groups 2"))
    # A site's own, in which Slurm's commands then write.
    hurried.variables["SLURM_TIME_FORMAT"] = "%d.%m. %H:%M"
    hurried.submit("--nodes", "2", "--time", "10")
    alone = Submitted(slurm, folder / "alone", on_cpu(_PIER, corpus, "--pier-groups 2"))
    (alone.folder / "again.sh").unlink()
    alone.submit("--nodes", "2")
    bounded = [
        Submitted(slurm, folder / name, text)
        for name, text in (("failing", _FAILING), ("full", _FULL), ("sweep", _SWEEP), ("late", _LATE))
    ]
    for job in bounded:
        job.variables["TRIES"] = "1"
        job.submit("--nodes", "2", "--time", "10", *(("--array", "3") if job.folder.name == "sweep" else ()))
    failing, full, sweep, late = bounded
    assert refused.doctor("sbatch --nodes 2 job.sbatch")[0] == 1
    assert hurried.doctor("sbatch --nodes 2 job.sbatch") == (0, [])
    assert "before its launch line" in alone.doctor("sbatch --nodes 2 job.sbatch")[1][0]
    tries = "ended 2 times without a newer checkpoint, not queued again"
    for job, restarts, status, said in (
        (refused, "0", 2, "not queued again, because the job cannot start"),
        (hurried, "0", 2, "it would end as it starts"),
        (alone, "0", 2, "again.sh: No such file"),
        (failing, "1", 4, tries),
        (full, "1", 4, tries),
        (sweep, "3", 4, tries),
        (late, "1", 3, tries),
    ):
        ended = slurm.wait(job.number, "FAILED")
        log = job.log("3" if job is sweep else "")
        assert (ended["Restarts"], ended["ExitCode"]) == (restarts, f"{status}:0"), log
        assert said in log


def test_life_of_a_job(recipe: Submitted, corpus: tuple[Path, Path], tmp_path: Path) -> None:
    """A rank is killed, a node loses its power, somebody ends the job: in the end it has trained like its undisturbed twin."""
    slurm = recipe.slurm
    script = on_cpu(_PIER, corpus, "--pier-groups 2 --pier-lazy-start-iters 8")
    twin = Submitted(slurm, tmp_path / "twin", script)
    here = ("--nodes", "2", *_LIFE)
    twin.submit(*here)
    job = Submitted(slurm, tmp_path / "job", script, 14, 18, 22)
    job.submit(*here)
    job.wait_for("outer step after iteration +12")
    job.wait_for("iteration +13/")
    job.kill(1)
    job.go_on(14)
    assert slurm.wait(twin.number, "COMPLETED")["Restarts"] == "0"
    assert "outer step after iteration" in twin.log()
    job.wait_for("iteration +17/")
    assert "failed with status 4" in job.log()
    assert "resumes exactly from iteration 12" in job.log()
    slurm.kill_node(_NODES[1])
    slurm.wait(job.number, "PENDING")
    # As if it had died while it wrote this file.
    (job.folder / "runs" / "a" / "latest_checkpointed_iteration.txt").write_text("")
    job.go_on(18)
    slurm.resume_node(_NODES[1])
    job.wait_for("iteration +21/")
    assert "is empty. --pier-load-newest-whole takes iteration 16" in job.log()
    assert "resumes exactly from iteration 16" in job.log()
    sent = len(re.findall(_SENT, job.log()))
    slurm.slurm("scancel", "--signal", "TERM", job.number)
    job.wait_for(_SENT, times=sent + 2)
    job.go_on(22)
    assert slurm.wait(job.number, "COMPLETED")["Restarts"] == "2"
    assert "exiting program after receiving SIGTERM" in job.log()
    assert "again.sh: saved and ended at a signal" in job.log()
    assert (job.folder / "runs" / "a" / "latest_checkpointed_iteration.txt").read_text() == "24"
    job.submit(*here)
    slurm.wait(job.number, "COMPLETED")
    assert "resumes exactly from iteration 24" in job.log()
    assert job.losses() == twin.losses()
    assert list(map(int, twin.losses())) == list(range(1, 33))


def test_islands_of_an_array(slurm: cluster.Cluster, islands: tuple[Submitted, "subprocess.Popen[bytes]", int]) -> None:
    """One of three is killed and returns while the others continue; the lighthouse is killed and returns."""
    job, first, port = islands

    def wait_for_all(text: str) -> None:
        for island in "012":
            job.wait_for(text, task=island)

    wait_for_all("iteration +9/")
    # The last task of an array has the number that stands for all.
    job.kill(0, "2")
    slurm.wait(f"{job.number}_2", "PENDING", "COMPLETING")
    job.go_on(10)
    job.wait_for("iteration +17/", task="0")
    # It asks for the others before they train past the steps that are left.
    job.wait_for("resumes exactly from iteration 8(?s:.*)Start quorum", task="2")
    job.go_on(18)
    wait_for_all("iteration +25/")
    first.kill()
    job.go_on(26)
    with lighthouse(port):
        for island, restarts in (("0", "0"), ("1", "0"), ("2", "1")):
            assert slurm.wait(f"{job.number}_{island}", "COMPLETED")["Restarts"] == restarts, job.log(island)
    assert "island 2 joins the others at iteration" in job.log("2")
    assert f"job {job.number}_2 is queued again" in job.log("2")


def test_time_limit(recipe: Submitted) -> None:
    """The recipe saves before its time is over, returns by itself and trains to the end."""
    assert recipe.slurm.wait(recipe.number, "COMPLETED")["Restarts"] == "1", recipe.log()
    assert "again.sh: the time is over" in recipe.log()
    assert "resumes exactly from iteration 12" in recipe.log()


def test_experts_of_an_array(slurm: cluster.Cluster, planned: Callable[..., Plan]) -> None:
    plan = planned(**{"nodes": 2, "ranks-per-expert": 8})
    number = slurm.submit("--array", "1", *_LIFE, str(plan.folder / "train.sh"), folder=plan.folder)
    slurm.wait(f"{number}_1", "COMPLETED")
    both = started(plan, EXPERTS[1])
    assert sorted(each["node"] for each in both) == ["0", "1"]
    for each in both:
        launch = " ".join(each["words"][:12])
        assert launch.startswith(f"-m torch.distributed.run --node-rank {each['node']} --nnodes 2 --nproc-per-node 4 ")
        assert re.search(r"--master-addr 127.0.0.1 --master-port 2\d{4}$", launch)
    assert [expert.name for expert in plan.untrained()] == [EXPERTS[0], EXPERTS[2]]
