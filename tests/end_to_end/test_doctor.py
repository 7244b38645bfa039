"""``pier-megatron doctor``: what it says of a job before the job is queued, and what it sees when it starts it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import REPOSITORY, execute, torchrun

from pier_megatron.commands.plan.cluster import CLUSTERS

pytestmark = pytest.mark.processes

_DOCTOR = [sys.executable, "-m", "pier_megatron.commands.cli", "doctor"]
_JOB = (
    "torchrun --nnodes 4 --nproc-per-node 4 --master-addr first -m pier_megatron "
    "pier_megatron/commands/demo/pretrain_bytes.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 "
    "--global-batch-size 512 --train-iters 100000 --eval-interval 1000 --lr 6e-4 --bf16 "
    "--tensor-model-parallel-size 2 --vocab-size 50257 "
    "--mock-data --optimizer pier "
)


# Looks at many jobs in one process: a start of Megatron takes longer than a look.
_SCRIPT = """
import contextlib, io, json, shlex, sys
from pier_megatron.commands import cli

said = []
for command in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(shlex.split(command))
    said.append([status, out.getvalue(), err.getvalue()])
print("SAID", json.dumps(said))
"""

_DOUBTFUL = (
    _JOB.replace("torchrun ", "torchrun --max-restarts 3 ").replace("--master-addr first", "")
    + "--pipeline-model-parallel-size 2 --pier-offload --async-save"
)
_ALONE = _JOB.replace("--nnodes 4 --nproc-per-node 4 --master-addr first", "--nproc-per-node 1") + (
    "--tensor-model-parallel-size 1"
)
_SAMPLES = _JOB.replace("--train-iters 100000", "--train-samples 51200000")
# The first 2,560,000 samples in batches half as large; the thresholds are tokens.
_GROWING = _SAMPLES.replace("--global-batch-size 512", "--step-batch-size-schedule '0:256 2621440000:512'")
# Tensor parallelism and groups of four nodes of one rank each, on fast networks of four nodes.
_DOMAINS = _JOB.replace("--nnodes 4 --nproc-per-node 4", "--nnodes 16 --nproc-per-node 1") + "--pier-ranks-per-domain 4"
_INTERLEAVED = _JOB + (
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 --global-batch-size 128 --pier-groups 2 "
)
_LAYERED = _INTERLEAVED + "--pier-layered"
_COMPRESSED = _INTERLEAVED + "--pier-compress aggressive"
_SKIPPING = _INTERLEAVED + "--pier-skip-fraction 0.25 --pier-eval-skip 3,7"
_FLAT = _JOB + "--pipeline-model-parallel-size 4 --global-batch-size 128 --pier-groups 2 --pier-skip-fraction 0.25"
# Flags inside a group, with a stock optimizer.
_STOCK = _INTERLEAVED.replace("--optimizer pier", "--optimizer adam --use-distributed-optimizer").replace(
    "--pier-groups 2 ", ""
)
_STOCK_COMPRESSED = _STOCK.replace("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2") + (
    "--pier-compress hybrid"
)
_STOCK_SKIPPING = _STOCK + "--pier-skip-fraction 0.2"
_REFUSED = {
    _JOB + "--tensor-model-parallel-size 8": "does not divide the data-parallel size 2",
    _JOB.replace("--nproc-per-node 4", "--nproc-per-node 1") + "--pier-groups 2": "a tensor-parallel group crosses nodes",
    _JOB + "--gpu-sniff-test-interval 75": "75 = 1 x 50 + 25",
    _JOB.replace("--train-iters 100000", ""): "--train-iters: not given",
    _JOB.replace("--eval-interval 1000", ""): "--eval-interval: not given. Megatron divides --train-iters by it",
    _JOB + "--num-attention-heads 11": "Megatron refuses the arguments: ",
    _SAMPLES + "--gpu-sniff-test-interval 75": "75 = 1 x 50 + 25",
}
_WRONG = f"{_JOB} --tensor-model-paralel-size 4 --pier-groop 2 --use-megatron-fsdp --gpu-sniff-test-interval 75 --json --own 1"
_UNPLUGGED = _JOB.replace("-m pier_megatron pier_megatron/commands/demo/pretrain_bytes.py", "none.py")
_HUGGING_FACE = _JOB.replace("--vocab-size 50257", "") + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
_PAGE = (REPOSITORY / "docs" / "quickstart.md").read_text()
_SHOWN = re.findall(r"^pier-megatron doctor (torchrun.*?)```", _PAGE, re.MULTILINE | re.DOTALL)[0].replace("\\\n", " ").strip()
_LARGE = _JOB + "--hidden-size 6144 --num-layers 96"


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the planner draws."""
    return tmp_path_factory.mktemp("plan") / "pictures" / "scaling.png"


@pytest.fixture(scope="module")
def said(picture: Path) -> dict[tuple[str, str], tuple[int, str, str]]:
    """Exit status, standard output and error, by command and job."""
    accepted = (_JOB, _DOUBTFUL, _ALONE, _DOMAINS, _SAMPLES, _GROWING, _LAYERED, _SKIPPING, _FLAT, _COMPRESSED)
    looks = [("doctor", job) for job in (*accepted, *_REFUSED)]
    looks += [("doctor", job) for job in (_STOCK_COMPRESSED, _STOCK_SKIPPING, _STOCK + "--pier-layered")]
    looks += [("plan", job) for job in (_STOCK_COMPRESSED, _STOCK_SKIPPING, _STOCK + "--pier-layered")]
    looks += [("plan --plot x.png", _STOCK_COMPRESSED), ("plan", _WRONG), ("plan", _UNPLUGGED), ("plan", _JOB + "--own 1")]
    looks += [("doctor", _SHOWN), ("plan", _SHOWN)]
    tokenizer = picture.parents[1] / "tokenizer"
    tokenizer.mkdir()
    words = {
        "model": {"vocab": {f"w{place}": place for place in range(1000)}},
        "added_tokens": [{"id": 1000, "content": "<s>"}],
    }
    (tokenizer / "tokenizer.json").write_text(json.dumps(words))
    looks += [("doctor", f"{_HUGGING_FACE} {place}") for place in (tokenizer, "org/name")]
    looks += [("plan --json", f"{_HUGGING_FACE} {place}") for place in (tokenizer, "org/name")]
    looks += [("plan --json", job) for job in (_JOB, _SAMPLES, _GROWING, _INTERLEAVED, _LAYERED, _COMPRESSED)] + [
        ("plan", job) for job in (_JOB, _LARGE, _INTERLEAVED)
    ]
    perlmutter = "--cluster perlmutter"
    flags = {
        "plan --plot x.png": perlmutter,
        "doctor": "",
        "plan": "--cluster perlmutter",
        "plan --json": f"--cluster perlmutter --plot {picture}",
    }
    process = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        cwd=REPOSITORY,
        env=os.environ | {"NCCL_IB_DISABLE": "1"},
        input=json.dumps([f"{command} {flags[command]} {job}" for command, job in looks]),
        capture_output=True,
        text=True,
    )
    assert "SAID" in process.stdout, process.stderr
    return dict(zip(looks, map(tuple, json.loads(process.stdout[process.stdout.index("SAID ") + 5 :])), strict=True))


def test_healthy_job(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    status, findings, _ = said["doctor", _JOB]
    assert status == 0
    assert "4 nodes of 4 ranks" in findings
    assert "group 3: ranks 12-15 on node 3" in findings
    [parameters] = re.findall(r"up to the padding of buffers, per rank: ([\d,]+) FP32 parameters; sends", findings)
    # Half a layer's matrices, biases and norms; the padded vocabulary; positions; all of it halved by the two ranks of a group.
    layer = (12 * 768 * 768 + 7 * 768) // 2 + 6 * 768
    assert int(parameters.replace(",", "")) == -(-(12 * layer + 50432 // 2 * 768 + 1024 * 768 + 2 * 768) // 2)
    assert f"outer state per rank: {8 * int(parameters.replace(',', '')) / 1e6:,.2f} MB of device memory" in findings
    assert "NCCL_SOCKET_IFNAME unset" in findings
    assert "WARNING: NCCL_IB_DISABLE=1" in findings
    assert "NCCL_NSOCKS_PERTHREAD unset" in findings
    assert findings.endswith("\n2 warnings\n")
    assert "each node would wait for itself" not in findings


def test_what_deserves_a_warning(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    status, findings, _ = said["doctor", _DOUBTFUL]
    assert status == 0
    assert "each node would wait for itself" in findings
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in findings
    assert "not contiguous over nodes (ranks 0-1, 8-9)" in findings
    assert "GB of host memory per node" in findings
    assert "WARNING: --async-save is turned off by Megatron, because --use-persistent-ckpt-worker is missing" in findings


def test_one_rank(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    status, findings, error = said["doctor", _ALONE]
    assert status == 0
    assert "1 node of 1 rank," in findings
    assert "1 group of 1 rank," in findings
    assert "WARNING: one model replica" in findings
    assert "NCCL_" not in findings
    # Of what is not installed the first line tells; Megatron would tell once per module.
    assert error == ""


def test_breadth_first_pipeline(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    status, findings, _ = said["doctor", _LAYERED]
    assert status == 0
    assert "breadth-first over 4 pipeline ranks of 3 virtual stages, each of which takes all 16 micro-batches" in findings
    assert "up to 39 of 48 stage-micro-batches at once; depth-first, of 15 (2.60 x)" in findings
    assert "WARNING: --pier-layered without --overlap-grad-reduce" in findings
    assert "WARNING: --pier-layered with one model replica per group" in findings
    name = "activations, without recomputation"
    held, depth_first = (json.loads(said["plan --json", job][1])["memory"][name] for job in (_LAYERED, _INTERLEAVED))
    assert held / depth_first == pytest.approx(2.6)


def test_compression(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    status, findings, _ = said["doctor", _COMPRESSED]
    assert status == 0
    assert "dp: gradients between data-parallel ranks, in the lazy start also between groups: int4, what it drops" in findings
    assert "outer: pseudo-gradients between groups: int8" in findings
    plan, without = (json.loads(said["plan --json", job][1]) for job in (_COMPRESSED, _INTERLEAVED))
    kept = plan["memory"]["gradients dropped by --pier-compress, for the next ones"]
    assert kept == pytest.approx(4 * plan["parameters per rank"])
    assert sum(plan["memory"].values()) > sum(without["memory"].values()) + 0.9 * kept
    policies = {(saving["what"], saving["policy"]): saving for saving in without["compression"]}
    # 16 micro-batches of 4 sequences of 1024 tokens through 3 stages, there and back; 2 bytes, a quarter of a node's network.
    between = policies["activations and gradients between stages", "pp=int8"]
    hidden = next(int(size) for size in re.findall(r"--hidden-size (\d+)", _INTERLEAVED))
    length = next(int(size) for size in re.findall(r"--seq-length (\d+)", _INTERLEAVED))
    assert between["wire"] == pytest.approx(2 * 16 * 3 * 4 * length * hidden * 2 / (CLUSTERS["perlmutter"].node_bandwidth / 4))


def test_skipping_of_stages(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    status, findings, _ = said["doctor", _SKIPPING]
    assert status == 0
    expected = re.search(r"48 of 12 stages x 16 micro-batches = 25.0% are skipped; (0\.\d+) x the time", findings)
    assert expected
    assert re.search(r"^  stage  5 on rank 1 [.#]{15}#$", findings, re.MULTILINE)
    assert "evaluation leaves out 2 of 12 stages: 3, 7" in findings
    assert "WARNING: --pier-skip-fraction" not in findings
    assert "WARNING: --pier-skip-fraction 0.25: a step is expected to take 0.9" in said["doctor", _FLAT][1]
    planned = json.loads(said["plan --json", _INTERLEAVED][1])
    assert planned["skipping"].keys() == {"0.0", "0.25", "0.33", "0.5"}
    whole, quarter = planned["skipping"]["0.0"], planned["skipping"]["0.25"]
    assert whole == {"share": 1.0, "local": planned["prediction"]["local"]}
    # Messages take the time that they take; at the start they take none.
    assert float(expected[1]) < quarter["share"] < 1
    assert whole["local"] * quarter["share"] < quarter["local"] < whole["local"]
    assert "--pier-skip-fraction (simulated; costs quality): 0: " in said["plan", _INTERLEAVED][1]
    assert json.loads(said["plan --json", _JOB][1])["skipping"] == {}
    assert "--pier-skip-fraction" not in said["plan", _JOB][1]
    assert "--pier-compress" not in said["plan", _INTERLEAVED][1]
    assert "--pier-compress dp=int8, gradients" in said["plan", _STOCK_COMPRESSED][1]


def test_stock_optimizers_with_flags_inside_a_group(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    for job, finding, mode in (
        (_STOCK_COMPRESSED, "dp: gradients between data-parallel ranks", "--pier-compress hybrid (gradients int8)"),
        (_STOCK_SKIPPING, "are skipped; 0.", "--pier-skip-fraction 0.2 "),
        (_STOCK + "--pier-layered", "Pier layered: breadth-first over 4 pipeline ranks", "synchronous, overlap flags "),
    ):
        status, findings, error = said["doctor", job]
        assert status == 0, error
        assert "--optimizer adam, " in findings
        assert ": every iteration is synchronous, without groups and outer steps" in findings
        assert finding in findings
        status, plan, error = said["plan", job]
        assert status == 0, error
        assert mode in plan
        assert "A stock optimizer: every iteration is synchronous" in plan
        # No figures of an outer loop.
        assert not re.search(r"DiLoCo|NoLoCo|Pier, H|outer step:|outer state|local phase|lazy start|groups on", plan)
        assert not re.search(r"preset|outer state|progress", findings)
    times = {name.strip(): float(ms) for name, ms in re.findall(r"^(synchronous.*?) +([\d,]+) +[\d.]+ ", plan, re.MULTILINE)}
    assert times.keys() == {"synchronous", "synchronous, overlap flags"}
    status, _, error = said["plan --plot x.png", _STOCK_COMPRESSED]
    assert status == 2
    assert "--plot x.png draws what groups win: it needs a job with --optimizer pier" in error


def test_fast_networks_that_span_nodes(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    status, findings, _ = said["doctor", _DOMAINS]
    assert status == 0
    assert "4 groups of 4 ranks" in findings
    assert "group 3: ranks 12-15 on domain 3 (node 12, node 13, node 14, node 15)" in findings


@pytest.mark.parametrize("job", _REFUSED)
def test_job_that_would_fail(said: dict[tuple[str, str], tuple[int, str, str]], job: str) -> None:
    status, findings, _ = said["doctor", job]
    assert status == 1
    *_, error, verdict = findings.splitlines()
    assert error.startswith("ERROR: ")
    assert _REFUSED[job] in error
    assert verdict == "will not start"


def test_plan_reports_everything_that_is_wrong_with_a_job(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    status, out, error = said["plan", _WRONG]
    assert (status, out) == (2, "")
    for message in (
        "--pier-groop: no such flag. Did you mean --pier-groups?",
        "--tensor-model-paralel-size: Megatron does not know it, and no script adds it. Did you mean --tensor-model-parallel-",
        "--json: Megatron does not know it. Put it before the launch command of the job.",
        "--use-megatron-fsdp cannot be used with --optimizer pier",
    ):
        assert f"ERROR: {message}" in error
    assert all(line.startswith("ERROR: ") for line in error.splitlines())
    status, out, error = said["plan", _UNPLUGGED]
    assert (status, out) == (2, "")
    assert "--optimizer pier: none.py is started without -m pier_megatron, and cannot be read" in error
    status, out, _ = said["plan", _JOB + "--own 1"]
    assert status == 0
    # Above the verdict.
    assert out.startswith("WARNING: --own: Megatron does not know it, and it is not in the text of")


def test_quickstart_shows_what_is_printed(said: dict[tuple[str, str], tuple[int, str, str]]) -> None:
    blocks = [" ".join(block.split()) for block in re.findall(r"^```\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)]
    [doctor] = [block for block in blocks if "preset pier-annealed" in block]
    findings = " ".join(said["doctor", _SHOWN][1].split())
    *shown, verdict = doctor.split(" ...")
    assert all(part.strip() in findings for part in shown)
    assert verdict.strip() == "OK"
    assert said["plan", _SHOWN][1].splitlines()[0] in blocks


def test_vocabulary_of_a_tokenizer(said: dict[tuple[str, str], tuple[int, str, str]], picture: Path) -> None:
    folder = picture.parents[1] / "tokenizer"
    status, findings, _ = said["doctor", f"{_HUGGING_FACE} {folder}"]
    assert (status, f"--tokenizer-model {folder}: 1,001 tokens" in findings) == (0, True)
    assert re.search(r"per rank: [\d,]+ FP32 parameters", findings)
    known, assumed = (json.loads(said["plan --json", f"{_HUGGING_FACE} {place}"][1]) for place in (folder, "org/name"))
    assert known["warnings"] == []
    assert assumed["warnings"] == [
        "the tokenizer cannot be read here: a vocabulary of 128,000 tokens is assumed. Give --vocab-size"
    ]
    # Doctor assumes the same.
    status, findings, _ = said["doctor", f"{_HUGGING_FACE} org/name"]
    assert status == 0
    assert assumed["warnings"][0] in findings.splitlines()
    assert re.search(r"^up to the padding of buffers, outer state per rank: ", findings, re.MULTILINE)
    # Padded to a multiple of 256, and split over two tensor-parallel ranks.
    assert assumed["parameters per rank"] - known["parameters per rank"] == (128_000 - 1024) * 768 / 2


# 51,200,000 / 512; 2,560,000 / 256 + 48,640,000 / 512.
@pytest.mark.parametrize(("job", "iterations"), [(_JOB, 100_000), (_SAMPLES, 100_000), (_GROWING, 105_000)])
def test_length_of_the_run_in_iterations_or_samples(
    said: dict[tuple[str, str], tuple[int, str, str]], job: str, iterations: int
) -> None:
    status, findings, _ = said["doctor", job]
    assert status == 0
    assert re.search(rf"^ +{iterations} +100.0%", findings, re.MULTILINE)
    plan = json.loads(said["plan --json", job][1])
    assert plan["iterations"] == iterations
    # Whatever the batches, the run is as much work.
    cluster, owned = CLUSTERS["perlmutter"], plan["parameters per rank"] / 2
    overhead = cluster.overhead + cluster.overhead_per_parameter * owned
    constant = json.loads(said["plan --json", _JOB][1])
    work = [(found["prediction"]["compute"] - overhead) * found["iterations"] for found in (plan, constant)]
    assert work[0] == pytest.approx(work[1])


def test_plan(said: dict[tuple[str, str], tuple[int, str, str]], picture: Path) -> None:
    plan = json.loads(said["plan --json", _JOB][1])
    assert plan["groups"] == 4
    assert plan["modes"]["Pier, H = 50, blocking"] < plan["modes"]["synchronous"]
    assert plan["modes"]["Pier, H = 50, overlapped by H / 2"] < plan["modes"]["Pier, H = 50, blocking"]
    assert plan["bytes between groups per outer step and rank"] == pytest.approx(8 * 3 / 4 * plan["parameters per rank"] / 2)
    owned = plan["parameters per rank"] / 2
    assert plan["memory"]["outer state, --pier-offload to move it"] == pytest.approx(8 * owned)
    # Of 64 MiB each: two of what tensor-parallel ranks split, one of what they copy; the pseudo-gradient and its mean.
    assert plan["memory"]["chunks of an outer step on their way"] == pytest.approx(2 * 3 * 64 * 2**20)
    scaling = plan["sweeps"]["gpus"]
    sizes = list(map(int, scaling))
    assert sizes == [plan["gpus"] // 4 * 2**power for power in range(len(sizes))]
    assert scaling[str(plan["gpus"])]["synchronous"] == plan["modes"]["synchronous"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert plan["verdict"].startswith(("Use it", "Measure first", "Do not use it"))
    text = said["plan", _JOB][1]
    assert "GPU-hours" in text
    assert re.search(r"GB together, of 40 GB$", text, re.MULTILINE)
    assert re.search(r"GB together, of 40 GB: does not fit", said["plan", _LARGE][1])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Where a job has saved its iteration 90, as far as the doctor looks: a stock checkpoint, with whole files."""
    folder = tmp_path / "saved"
    dcp.save({"weight": torch.zeros(1)}, checkpoint_id=folder / "iter_0000090", no_dist=True)
    torch.save({"content_metadata": {}}, folder / "iter_0000090" / "common.pt")
    (folder / "iter_0000090" / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text("90")
    return folder


def test_started_job_with_a_stock_optimizer_ends_and_shows_what_is_compressed(
    tmp_path: Path, corpus: tuple[Path, Path]
) -> None:
    train, validation = corpus
    training = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 2 --global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 257 --lr 2e-3 --bf16 "
        f"--train-data-path {train} --valid-data-path {validation} --test-data-path {validation} --log-interval 1 "
        "--eval-interval 100 --eval-iters 1 --train-iters 100 --use-distributed-optimizer --pier-compress dp=int8"
    )
    script = REPOSITORY / "pier_megatron" / "commands" / "demo" / "pretrain_bytes.py"
    job = [*torchrun(2), "-m", "pier_megatron", "--device", "cpu", str(script), *training.split()]
    log = execute([*_DOCTOR, "--start", *job], tmp_path / "log.txt")
    assert "--optimizer adam, 2 model replicas: every iteration is synchronous" in log
    assert re.search(r"Pier doctor: iteration 2, of a stock optimizer, rank 0: [1-9]\d* .* none across groups", log)
    assert re.search(r"Pier doctor: compressed, dp \(.*\): 0\.\d+ MB in int8, 0\.\d+ MB without", log)
    assert "iteration        3/" not in log
    assert re.fullmatch(r"OK|\d+ warnings?", log.splitlines()[-1]), log


def test_started_job_shows_what_crosses_the_groups_and_touches_nothing(
    tmp_path: Path, corpus: tuple[Path, Path], saved: Path
) -> None:
    train, validation = corpus
    training = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 2 --global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 257 --lr 2e-3 --bf16 "
        f"--train-data-path {train} --valid-data-path {validation} --test-data-path {validation} --log-interval 1 "
        "--eval-interval 2 --eval-iters 1 --train-iters 100 --tensor-model-parallel-size 2 --optimizer pier "
        f"--pier-ranks-per-domain 2 --pier-sync-interval 2 --pier-lazy-start-iters 50 --save {saved} --load {saved} "
        f"--save-interval 1 --log-progress --tensorboard-dir {saved / 'tensorboard'} --exit-interval 1 "
        "--pier-compress tp=int8"
    )
    script = REPOSITORY / "pier_megatron" / "commands" / "demo" / "pretrain_bytes.py"
    job = [*torchrun(4), "-m", "pier_megatron", "--device", "cpu", str(script), *training.split()]
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    log = execute([*_DOCTOR, "--start", *job], tmp_path / "log.txt")
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert "Pier: 2 groups of 2 ranks" in log
    # Doctor, start-up and plan say the same.
    said = re.findall(r"^ *((?:outer state )?per rank: .*)$", log, re.MULTILINE)
    assert len(said) == 4
    assert said[:2] == said[2:]
    planned = subprocess.run(
        [*_DOCTOR[:-1], "plan", "--cluster", "perlmutter", *job], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert re.findall(r"^((?:outer state )?per rank: .*)$", planned.stdout, re.MULTILINE) == said[:2], planned.stderr
    assert re.search(r"^memory per rank: outer state, --pier-offload to move it: 0\.[1-9]\d MB$", planned.stdout, re.MULTILINE)
    # No interval of which the run has not two.
    assert set(re.findall(r"H = (\d+),", planned.stdout)) == {"2", "10", "50"}
    assert "  group 1: ranks 2-3 on domain 1 (node 0)" in log
    assert "without the lazy start; nothing was loaded, saved or evaluated" in log
    # It logs every iteration.
    assert re.search(r"Pier doctor: iteration 3, between outer steps, rank 0: [1-9]\d* .*, none across groups", log)
    assert re.search(r"Pier doctor: compressed, tp \(.*\): 0\.\d+ MB in int8, 0\.\d+ MB without", log)
    assert "validation loss" not in log
    assert "iteration        4/" not in log
    assert re.fullmatch(r"OK|\d+ warnings?", log.splitlines()[-1]), log
