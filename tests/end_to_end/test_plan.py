"""``pier-megatron plan`` as a user calls it, with Megatron's own arguments and the log of a real run."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPOSITORY, execute, torchrun

from pier_megatron.pipeline.routes import Routes

pytestmark = pytest.mark.processes

_PLAN = [sys.executable, "-m", "pier_megatron.commands.cli", "plan"]
_SHAPE = (
    "--seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257 --global-batch-size 512 --lr 1.5e-4 --bf16 "
    "--eval-interval 1000"
)
_XL = (
    "torchrun --nnodes 16 --nproc-per-node 4 -m pier_megatron pretrain_gpt.py --num-layers 48 --hidden-size 1600 "
    f"--num-attention-heads 25 {_SHAPE} --micro-batch-size 8 --train-iters 100000 --optimizer pier"
)
_7B = (
    "torchrun --nnodes 32 --nproc-per-node 4 -m pier_megatron pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    f"--num-attention-heads 32 --tensor-model-parallel-size 4 {_SHAPE} --micro-batch-size 4 --train-iters 100000 "
    "--optimizer pier"
)
_COPIED = (
    _7B.replace("--nnodes 32", "--nnodes 16").replace("--micro-batch-size 4", "--micro-batch-size 1")
    + " --pier-overlap 25 --pier-offload"
)
_UNEQUAL = (
    "torchrun --nnodes 4 --nproc-per-node 2 -m pier_megatron pretrain_gpt.py --num-layers 24 --hidden-size 1024 "
    "--num-attention-heads 16 --pipeline-model-parallel-size 4 --micro-batch-size 4 --train-iters 1000 "
    f"{_SHAPE.replace('512', '64')} --optimizer adam"
)
# A model that trains on this machine in seconds; its job is the same on more ranks.
_TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 257 --lr 2e-3 --bf16 --eval-interval 1000 "
)


def plan(flags: str, job: str) -> subprocess.CompletedProcess[str]:
    """A finished call of the planner."""
    return subprocess.run([*_PLAN, *flags.split(), *job.split()], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("job", "model"), [(_XL, "XL"), (_7B, "7B")])
def test_first_line_is_gated_on_memory(job: str, model: str, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "plan.png"
    said = plan(f"--cluster perlmutter --plot {picture}", job)
    assert said.returncode == 0, said.stderr
    first, second = said.stdout.splitlines()[:2]
    assert first.startswith("Does not fit: it needs ")
    remedy = re.search(r"It fits with (--.+?) \(", first)
    assert remedy, first
    assert "Use it" not in said.stdout
    assert "90 TFLOP/s per GPU assumed: measure them with --tflops, or --log of a short run" in first
    assert second.startswith("Loss: not known. It follows the noise of a run's pseudo-gradients")
    assert [line.split("  ")[0] for line in said.stdout.splitlines() if line.endswith("<- this job")] == [
        "Pier, H = 50, blocking"
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The page has the line of GPT-2 XL.
    assert (first in " ".join((REPOSITORY / "docs" / "planner.md").read_text().split())) == (model == "XL")
    # With the remedy the same job fits, and is as fast as was said.
    changed = json.loads(plan("--cluster perlmutter --json", f"{job} {remedy[1]}").stdout)
    assert changed["fits"]
    assert changed["waits"]["job"] == "blocking with --pier-offload"
    assert changed["waits"]["fastest"] == "blocking with --pier-offload"
    assert changed["verdict"].startswith("Measure first: " if model == "XL" else "Use it: ")
    assert first.endswith(changed["verdict"][changed["verdict"].index(": ") :])


def test_page_says_how_long_four_modes_wait() -> None:
    said = plan("--cluster perlmutter --node-bandwidth 80", _COPIED).stdout
    page = " ".join((REPOSITORY / "docs" / "planner.md").read_text().split())
    assert " ".join(re.findall("waited for.*\n.*", said)[0].split()) in page


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--node-bandwidth -5", "argument --node-bandwidth: -5: must be a number in (0, 1000000]"),
        ("--tflops 0", "argument --tflops: 0: must be a number in (0, 1000000]"),
        ("--latency -1", "argument --latency: -1: must be a number in [0, 1000000]"),
        ("--nodes-per-site 2", "--nodes-per-site without site-bandwidth: give both"),
        ("--log nowhere", "argument --log: nowhere: no such file"),
        ("--suggest", "--suggest was removed: compare the rows of plan with flags of your choice"),
        ("--mtbf 500", "--mtbf was removed: plan simulates no failures; see docs/reliability.md"),
        ("--spread=5", "--spread was removed: "),
    ],
)
def test_values_that_cannot_be(flags: str, said: str) -> None:
    refusal = plan(f"--cluster perlmutter {flags}", _XL)
    assert refusal.returncode == 2
    assert said in refusal.stderr
    assert "Traceback" not in refusal.stderr
    assert not refusal.stdout


def test_routes_are_written_for_the_job_and_nothing_else(tmp_path: Path) -> None:
    file, flags = tmp_path / "new" / "routes.json", "--cluster examples/unequal-cluster.yaml --json"
    found = json.loads(plan(f"{flags} --routes {file} --place", f"{_UNEQUAL} --pier-skip-fraction 0.25").stdout)["routes"]
    # One message in three passes the slow link of a whole step; a route that skips a stage may spare it none.
    assert found["routes"] < 0.6 * found["full"]
    assert found["passed"] > 0.9 * found["full"]
    assert sorted(found["hosts"]) == ["a", "b", "c", "d"]
    routes = Routes.of_text(file.read_text())
    assert (routes.stages, routes.replicas, routes.micro_batches) == (4, 2, 8)
    assert (routes.fraction, routes.hosts, routes.held) == (0.25, tuple(found["hosts"]), found["held"])
    followed = plan("--cluster examples/unequal-cluster.yaml", f"{_UNEQUAL} --pier-skip-routes {file}").stdout
    assert f"ms with --pier-skip-routes {file}, which the figures of iterations leave out (25.0% skipped" in followed
    by_samples = _UNEQUAL.replace("--train-iters 1000", "--train-samples 64000").replace("--global-batch-size 64", "")
    in_groups = _UNEQUAL.replace("--optimizer adam", "--optimizer pier --pier-groups 2")
    for job, words in {
        in_groups: "--place orders the nodes of one group, and the job has 2",
        by_samples
        + " --step-batch-size-schedule 0:32,1000000:64": "and the job's batch ramps up: its steps have 4, 8 of a replica",
    }.items():
        refusal = plan(f"{flags} --routes {file} --place", f"{job} --pier-skip-fraction 0.25")
        assert refusal.returncode == 2
        assert words in refusal.stderr
    assert "--place says how routes are searched: it needs --routes FILE" in plan(f"{flags} --place", _XL).stderr


def test_sites_of_a_file_are_rows() -> None:
    found = json.loads(plan("--cluster examples/cluster.yaml --json", _7B).stdout)
    assert found["sites"] == 2
    assert "this job, H = 50, --pier-groups 2: one per site" in found["modes"]
    assert found["modes"]["this job, H = 50, all in one site"] < found["modes"][found["mode of the job"]]
    alone = json.loads(plan("--cluster examples/cluster.yaml --nodes-per-site 16 --json", _7B).stdout)
    assert alone["sites"] == 1
    assert alone["modes"][alone["mode of the job"]] == found["modes"]["this job, H = 50, all in one site"]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> Path:
    """Folder of a run of one rank: what it printed as log.txt, and its TensorBoard folder."""
    folder = tmp_path_factory.mktemp("short")
    train, validation = map(str, corpus)
    script = REPOSITORY / "pier_megatron" / "commands" / "demo" / "pretrain_bytes.py"
    words = (
        f"{_TINY} --global-batch-size 8 --train-iters 8 --log-interval 1 --eval-interval 100 --eval-iters 1 --optimizer adam "
        f"--train-data-path {train} --valid-data-path {validation} --test-data-path {validation} "
        f"--tensorboard-dir {folder / 'tensorboard'} --log-timers-to-tensorboard"
    )
    arguments = ["-m", "pier_megatron", "--device", "cpu", str(script), *words.split()]
    execute([*torchrun(1), *arguments], folder / "log.txt")
    return folder


def test_tflops_of_a_short_run(short_run: Path) -> None:
    """A job like the run takes as long as its last half, whether the log is text or TensorBoard."""
    job = f"torchrun --nproc-per-node 1 -m pier_megatron pretrain_gpt.py {_TINY} --train-iters 1000 --optimizer pier "
    text = (short_run / "log.txt").read_text()
    times = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)]
    assert len(times) == 8
    for path in (short_run / "log.txt", short_run):
        found = json.loads(plan(f"--cluster perlmutter --log {path} --json", job + "--global-batch-size 8").stdout)
        assert found["tflops"]["source"] == f"measured in {path}"
        assert found["prediction"]["compute"] * 1e3 == pytest.approx(statistics.median(times[4:]), rel=0.01)
    given = json.loads(plan(f"--cluster perlmutter --tflops 30 --log {path} --json", job + "--global-batch-size 8").stdout)
    assert given["tflops"] == {"per GPU": 30.0, "source": "from --tflops", "measured": True}


def test_log_of_another_model_is_refused(short_run: Path) -> None:
    job = f"torchrun --nproc-per-node 4 -m pier_megatron pretrain_gpt.py {_TINY} --num-layers 4 --train-iters 1000"
    refusal = plan(f"--cluster perlmutter --log {short_run}", f"{job} --global-batch-size 8 --optimizer pier --pier-groups 2")
    assert refusal.returncode == 2
    assert "--num-layers is 2 there and 4 in the job" in refusal.stderr


@pytest.mark.parametrize(("line", "said"), [("", "not logged"), ("  world_size ........ None", "None")])
def test_log_without_its_ranks_is_refused(short_run: Path, tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "log.txt"
    file.write_text(re.sub(r"(?m)^ *world_size \.\..*$", line, (short_run / "log.txt").read_text()))
    job = f"torchrun --nproc-per-node 1 -m pier_megatron pretrain_gpt.py {_TINY} --train-iters 1000 --optimizer pier"
    refusal = plan(f"--cluster perlmutter --log {file}", f"{job} --global-batch-size 8")
    assert refusal.returncode == 2
    assert f"--log {file}: world_size is {said} there" in refusal.stderr
    assert "Traceback" not in refusal.stderr


@pytest.mark.parametrize(
    ("flags", "launch", "settings"),
    [
        # 41.3 GB blocking, 43.7 GB with chunks that wait for half an interval.
        ("--memory 42", "--nnodes 16 --nproc-per-node 4", ""),
        ("--memory 80", "--nnodes 16 --nproc-per-node 4", "--pier-save-inner-state first"),
        (
            "--memory 80 --node-bandwidth 0.5",
            "--nproc-per-node 4",
            "--pier-lighthouse http://10.0.0.1:29510 --pier-island 1 --pier-groups 16 --mock-data",
        ),
    ],
)
def test_overlap_is_recommended_where_the_job_would_start_with_it(flags: str, launch: str, settings: str) -> None:
    job = f"{_XL.replace('--nnodes 16 --nproc-per-node 4', launch)} {settings}"
    found = json.loads(plan(f"--cluster perlmutter {flags} --json", job).stdout)
    assert found["verdict"].startswith(("Measure first: ", "Use it: "))
    assert "--pier-overlap" not in found["verdict"]
    overlapped = next(seconds for name, seconds in found["modes"].items() if name == "Pier, H = 50, overlapped by H / 2")
    assert overlapped < found["modes"]["Pier, H = 50, blocking"] / 1.02
    # One launch, or sixteen jobs that are an island each.
    assert found["gpus"] == 64


def test_plan_that_never_pays_is_json() -> None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    for job in (_XL, f"{_XL} --pier-groups 1"):
        found = json.loads(plan("--cluster dgx-h100 --json", job).stdout, parse_constant=refuse)
        assert found["break-even interval"] is None
    assert "faster than synchronous training with overlap flags at no H" in plan("--cluster dgx-h100", _XL).stdout
