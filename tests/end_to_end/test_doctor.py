"""``pier-megatron doctor``: what it says of a job before the job is queued, and what it sees when it starts it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import MODEL, REPOSITORY, data, execute, torchrun, user_job
from one_process import Said, pier_megatron

from pier_megatron.commands.plan.cluster import CLUSTERS
from pier_megatron.cpu.preparations import LOCAL

pytestmark = pytest.mark.processes

_DOCTOR = [sys.executable, "-m", "pier_megatron.cli", "doctor"]
_JOB = (
    "torchrun --nnodes 4 --nproc-per-node 4 --master-addr first -m pier_megatron "
    "pier_megatron/commands/demo/pretrain_bytes.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 "
    "--global-batch-size 512 --train-iters 100000 --eval-interval 1000 --lr 6e-4 --bf16 "
    "--tensor-model-parallel-size 2 --vocab-size 50257 "
    f"{LOCAL} --mock-data --optimizer pier "
)


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
_REFUSED = {
    _JOB + "--tensor-model-parallel-size 8": "does not divide the data-parallel size 2",
    _JOB.replace("--nproc-per-node 4", "--nproc-per-node 1") + "--pier-groups 2": "a tensor-parallel group crosses nodes",
    _JOB.replace("--train-iters 100000", ""): "--train-iters: not given",
    _JOB.replace("--eval-interval 1000", ""): "--eval-interval: not given. Megatron divides --train-iters by it",
    _JOB + "--num-attention-heads 11": "Megatron refuses the arguments: ",
    _SAMPLES + "--pier-save-inner-state first --save /nowhere --save-interval 75": "75 = 1 x 50 + 25",
}
_WRONG = f"{_JOB} --tensor-model-paralel-size 4 --pier-groop 2 --use-megatron-fsdp --adlr-autoresume --json --own 1"
_UNPLUGGED = _JOB.replace("-m pier_megatron pier_megatron/commands/demo/pretrain_bytes.py", "none.py")
_HUGGING_FACE = _JOB.replace("--vocab-size 50257", "") + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
_PAGE = (REPOSITORY / "docs" / "quickstart.md").read_text()
_SHOWN = re.findall(r"^pier-megatron doctor +(torchrun.*?)```", _PAGE.replace("\\\n", ""), re.MULTILINE | re.DOTALL)[0].strip()
_LARGE = _JOB + "--hidden-size 6144 --num-layers 96"


def doctor(job: str) -> Said:
    """What doctor says."""
    return pier_megatron(NCCL_IB_DISABLE="1")(f"doctor {job}")


def plan(job: str, flags: str = "") -> Said:
    """What plan says."""
    return pier_megatron(NCCL_IB_DISABLE="1")(f"plan --cluster perlmutter {flags} {job}")


def planned(job: str) -> dict[str, Any]:
    """A plan as plain values."""
    values: dict[str, Any] = json.loads(plan(job, "--json").out)
    return values


def accepted(job: str) -> str:
    """What doctor says of a job that will start."""
    status, findings, _ = doctor(job)
    assert status == 0, findings
    return findings


def test_healthy_job() -> None:
    findings = accepted(_JOB)
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


def test_what_deserves_a_warning() -> None:
    findings = accepted(_DOUBTFUL)
    for said in (
        "each node would wait for itself",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "WARNING: --async-save is turned off by Megatron, because --use-persistent-ckpt-worker is missing",
    ):
        assert said in findings


def test_one_rank() -> None:
    accepted(_JOB)
    findings = accepted(_ALONE)
    # The first line names what is not installed; Megatron would print it once per module.
    assert doctor(_ALONE).error == ""
    assert "1 node of 1 rank," in findings
    assert "1 group of 1 rank," in findings
    assert "WARNING: one model replica" in findings
    assert "NCCL_" not in findings


def test_breadth_first_pipeline() -> None:
    findings = accepted(_LAYERED)
    assert "breadth-first over 4 pipeline ranks of 3 virtual stages: a stage runs all 16 micro-batches" in findings
    assert "up to 39 of 48 stage-micro-batches at once; depth-first, of 15 (2.60 x)" in findings
    assert "WARNING: --pier-layered without --overlap-grad-reduce" in findings
    assert "WARNING: --pier-layered with one model replica per group" in findings
    name = "activations, without recomputation"
    held, depth_first = (planned(job)["memory"][name] for job in (_LAYERED, _INTERLEAVED))
    assert held / depth_first == pytest.approx(2.6)


def test_compression() -> None:
    findings = accepted(_COMPRESSED)
    assert "dp: gradients between data-parallel ranks, in the lazy start also between groups: int4, what it drops" in findings
    assert "outer: pseudo-gradients between groups: int8" in findings
    found, without = planned(_COMPRESSED), planned(_INTERLEAVED)
    kept = found["memory"]["gradients dropped by --pier-compress, for the next ones"]
    assert kept == pytest.approx(4 * found["parameters per rank"])
    assert sum(found["memory"].values()) > sum(without["memory"].values()) + 0.9 * kept
    assert "what --pier-compress changes in time is not counted" in found["assumed"]


def test_skipping_of_stages() -> None:
    findings = accepted(_SKIPPING)
    assert re.search(
        r"48 of 12 x 16 \(stages x micro-batches\) = 25.0% are skipped; predicted: (0\.\d+) x a whole step", findings
    )
    assert re.search(r"^  stage  5 on rank 1 [.#]{15}#$", findings, re.MULTILINE)
    assert "evaluation leaves out 2 of 12 stages: 3, 7" in findings
    assert "WARNING: --pier-skip-fraction" not in findings
    assert "WARNING: --pier-skip-fraction 0.25: a step is predicted to take 0.9" in accepted(_FLAT)


@pytest.mark.parametrize(
    ("flags", "finding"),
    [
        ("--pier-compress hybrid --pipeline-model-parallel-size 2", "dp: gradients between data-parallel ranks"),
        ("--pier-skip-fraction 0.2", "are skipped; predicted: 0."),
        ("--pier-layered", "Pier layered: breadth-first over 4 pipeline ranks"),
    ],
)
def test_stock_optimizers_with_flags_inside_a_group(flags: str, finding: str) -> None:
    findings = accepted(f"{_STOCK} {flags}")
    assert re.search(r"--optimizer adam, .*: every iteration is synchronous, without groups and outer steps", findings)
    assert finding in findings
    assert not re.search(r"preset|outer state|progress", findings)
    status, text, error = plan(f"{_STOCK} {flags}")
    assert status == 0, error
    assert f"what {flags.split()[0]} changes in time is not counted" in text
    assert "Stock optimizer: every iteration is synchronous" in text
    # No figures of an outer loop.
    assert not re.search(r"this job|outer step:|outer state|lazy start|groups on", text)
    status, _, error = plan(f"{_STOCK} {flags}", "--plot x.png")
    assert status == 2
    assert "--plot x.png draws what groups win: it needs a job with --optimizer pier" in error


def test_fast_networks_that_span_nodes() -> None:
    findings = accepted(_DOMAINS)
    assert "4 groups of 4 ranks" in findings
    assert "group 3: ranks 12-15 on domain 3 (node 12, node 13, node 14, node 15)" in findings


@pytest.mark.parametrize("job", _REFUSED)
def test_job_that_would_fail(job: str) -> None:
    status, findings, _ = doctor(job)
    assert status == 1
    *_, error, verdict = findings.splitlines()
    assert error.startswith("ERROR: ")
    assert _REFUSED[job] in error
    assert verdict == "will not start"


def test_plan_reports_everything_that_is_wrong_with_a_job(tmp_path: Path) -> None:
    status, out, error = plan(_WRONG)
    assert (status, out) == (2, "")
    for message in (
        "--pier-groop: no such flag. Did you mean --pier-groups?",
        "--tensor-model-paralel-size: Megatron does not know it, and no script adds it. Did you mean --tensor-model-parallel-",
        "--json: Megatron does not know it. Put it before the launch command of the job.",
        "--use-megatron-fsdp cannot be used with --optimizer pier",
    ):
        assert f"ERROR: {message}" in error
    assert all(line.startswith("ERROR: ") for line in error.splitlines())
    status, out, error = plan(_UNPLUGGED)
    assert (status, out) == (2, "")
    assert "--optimizer pier: none.py is started without -m pier_megatron, and cannot be read" in error
    # A warning is the first thing that is assumed.
    script = tmp_path / "computing.py"
    script.write_text("parser.add_argument(f'--{name}')\n")
    job = _JOB.replace("pier_megatron/commands/demo/pretrain_bytes.py", str(script))
    assert " assumed: --own: Megatron does not know it, and it is not in the text of" in " ".join(
        plan(job + "--own 1").out.split()
    )


def test_quickstart_shows_what_is_printed() -> None:
    blocks = [" ".join(block.split()) for block in re.findall(r"^```\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)]
    [shown] = [block for block in blocks if "preset pier-long " in block]
    findings = " ".join(doctor(_SHOWN).out.split())
    *parts, verdict = shown.split(" ...")
    assert all(part.strip() in findings for part in parts)
    assert verdict.strip() == "OK"
    assert " ".join(plan(_SHOWN).out.split("\n\n")[0].split()) in blocks


def test_vocabulary_of_a_tokenizer(tmp_path: Path) -> None:
    words = {
        "model": {"vocab": {f"w{place}": place for place in range(1000)}},
        "added_tokens": [{"id": 1000, "content": "<s>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    findings = accepted(f"{_HUGGING_FACE} {tmp_path}")
    assert f"--tokenizer-model {tmp_path}: 1,001 tokens" in findings
    assert re.search(r"per rank: [\d,]+ FP32 parameters", findings)
    known, assumed = planned(f"{_HUGGING_FACE} {tmp_path}"), planned(f"{_HUGGING_FACE} org/name")
    said = "the tokenizer cannot be read here: a vocabulary of 128,000 tokens is assumed. Give --vocab-size"
    assert said in assumed["assumed"]
    assert said not in known["assumed"]
    # Doctor assumes the same.
    findings = accepted(f"{_HUGGING_FACE} org/name")
    assert said in findings.splitlines()
    assert re.search(r"^up to the padding of buffers, outer state per rank: ", findings, re.MULTILINE)
    # Padded to a multiple of 256, and split over two tensor-parallel ranks.
    assert assumed["parameters per rank"] - known["parameters per rank"] == (128_000 - 1024) * 768 / 2


# 51,200,000 / 512; 2,560,000 / 256 + 48,640,000 / 512.
@pytest.mark.parametrize(("job", "iterations"), [(_JOB, 100_000), (_SAMPLES, 100_000), (_GROWING, 105_000)])
def test_length_of_the_run_in_iterations_or_samples(job: str, iterations: int) -> None:
    assert re.search(rf"^ +{iterations} +100.0%", accepted(job), re.MULTILINE)
    found = planned(job)
    assert found["iterations"] == iterations
    # Whatever the batches, the run is as much work.
    cluster, owned = CLUSTERS["perlmutter"], found["parameters per rank"] / 2
    overhead = cluster.overhead + cluster.overhead_per_parameter * owned
    work = [(each["prediction"]["compute"] - overhead) * each["iterations"] for each in (found, planned(_JOB))]
    assert work[0] == pytest.approx(work[1])


def test_plan() -> None:
    found = planned(_JOB)
    assert found["groups"] == 4
    own, overlapped, synchronous = (found["rows"][name]["seconds"] for name in ("this job", "--pier-overlap 25", "synchronous"))
    assert overlapped < own < synchronous
    owned = found["parameters per rank"] / 2
    assert found["bytes between groups per outer step and rank"] == pytest.approx(8 * 3 / 4 * owned)
    assert found["memory"]["outer state, --pier-offload to move it"] == pytest.approx(8 * owned)
    # Chunks of 64 MiB: two for what tensor-parallel ranks split, one for what they copy; pseudo-gradient and mean.
    assert found["memory"]["chunks of an outer step on their way"] == pytest.approx(2 * 3 * 64 * 2**20)
    assert re.search(r"memory of a GPU: [\d.]+ of 40 GB", plan(_JOB).out)
    assert plan(_LARGE).out.startswith("Does not fit: ")


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
    training = "--global-batch-size 8 --bf16 --train-iters 100 --use-distributed-optimizer --pier-compress dp=int8"
    started = user_job(torchrun(2), *MODEL, *data(corpus), *training.split())
    log = execute([*_DOCTOR, "--start", *started], tmp_path / "log.txt")
    assert "--optimizer adam, 2 model replicas: every iteration is synchronous" in log
    assert re.search(r"Pier doctor: iteration 2, of a stock optimizer, rank 0: [1-9]\d* .* none across groups", log)
    elsewhere = [*_DOCTOR, "--start", "/nonexistent/python", *started[1:]]
    ended = subprocess.run(elsewhere, cwd=REPOSITORY, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        2,
        "ERROR: --start: /nonexistent/python cannot be started: No such file or directory.",
    )
    assert re.search(r"Pier doctor: compressed, dp \(.*\): 0\.\d+ MB in int8, 0\.\d+ MB without", log)
    assert "iteration        3/" not in log
    assert re.fullmatch(r"OK|\d+ warnings?", log.splitlines()[-1]), log


def test_started_job_shows_what_crosses_the_groups_and_touches_nothing(
    tmp_path: Path, corpus: tuple[Path, Path], saved: Path
) -> None:
    training = (
        "--global-batch-size 8 --bf16 --eval-interval 2 --train-iters 100 --tensor-model-parallel-size 2 --optimizer pier "
        f"--pier-ranks-per-domain 2 --pier-sync-interval 2 --pier-lazy-start-iters 50 --save {saved} --load {saved} "
        f"--save-interval 1 --log-progress --tensorboard-dir {saved / 'tensorboard'} --exit-interval 1 --pier-compress tp=int8"
    )
    started = user_job(torchrun(4), *MODEL, *data(corpus), *training.split())
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    log = execute([*_DOCTOR, "--start", *started], tmp_path / "log.txt")
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert "Pier: 2 groups of 2 ranks" in log
    # Doctor, start-up and plan print the same, except for the lazy start: the started job has none.
    same = r"^ *(?:Pier: )?(2 groups of 2 ranks, .*|group \d: .*|exchange: .*)$"
    words = re.findall(same, log, re.MULTILINE)
    assert words[:4] == words[4:8]
    assert len(words) == 8
    said = re.findall(r"^ *((?:outer state )?per rank: .*)$", log, re.MULTILINE)
    assert len(said) == 4
    assert said[:2] == said[2:]
    text = plan(shlex.join(started), "--details").out
    assert re.findall(r"^((?:outer state )?per rank: .*)$", text, re.MULTILINE) == said[:2], text
    assert re.search(r"outer state, --pier-offload to move it 0\.[1-9]\d MB", " ".join(text.split()))
    assert "  group 1: ranks 2-3 on domain 1 (node 0)" in log
    assert "without a lazy start; nothing was loaded, saved or evaluated" in log
    # It logs every iteration.
    assert re.search(r"Pier doctor: iteration 3, between outer steps, rank 2: [1-9]\d* .*, none across groups", log)
    assert re.search(r"Pier doctor: compressed, tp \(.*\): 0\.\d+ MB in int8, 0\.\d+ MB without", log)
    assert "validation loss" not in log
    assert "iteration        4/" not in log
    assert re.fullmatch(r"OK|\d+ warnings?", log.splitlines()[-1]), log


# Groups of a launch reduce nothing over each other, unless a script connects them.
_REDUCES = """
import datetime
import pier_megatron
import torch.distributed as dist
from pier_megatron.commands.demo import pretrain_bytes

loss_of, between = pretrain_bytes._loss, []

def reduced(mask, losses):
    loss, tokens, said = loss_of(mask, losses)
    between[:] = between or [pier_megatron.launch().connect("of the script", datetime.timedelta(minutes=1))]
    dist.all_reduce(said["lm loss"], group=between[0])
    return loss, tokens, said

pretrain_bytes._loss = reduced
pretrain_bytes.main()
"""


def test_started_job_whose_loss_crosses_the_groups_is_refused(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    (tmp_path / "reduces.py").write_text(_REDUCES)
    # On the last stage alone.
    training = (
        "--global-batch-size 8 --bf16 --eval-interval 2 --train-iters 100 --pipeline-model-parallel-size 2 --optimizer pier "
        "--pier-groups 2 --pier-sync-interval 4"
    )
    started = user_job(torchrun(4), *MODEL, *data(corpus), *training.split())
    place = next(place for place, word in enumerate(started) if word.endswith("pretrain_bytes.py"))
    started[place] = str(tmp_path / "reduces.py")
    ended = subprocess.run([*_DOCTOR, "--start", *started], cwd=REPOSITORY, capture_output=True, text=True)
    # The first stage reduces no loss.
    assert re.search(r"rank 2: \d+ collectives .*, none across groups\.", ended.stdout), ended.stderr
    assert re.search(r"on other ranks: +\d+ x allreduce_ .* over ranks 1, 3", ended.stdout), ended.stdout
    assert "ERROR: --start: what is listed above reduces over ranks of several groups" in ended.stdout
    assert (ended.stdout.splitlines()[-1], ended.returncode) == ("will not start", 1)


def test_a_checkpoint_has_as_many_parameters_in_every_layout(tmp_path: Path) -> None:
    experts = f"{_JOB} --num-experts 8 --disable-bias-linear --save {tmp_path} --save-interval 1000 --pier-groups 2 "
    layouts = ("--tensor-model-parallel-size 1", "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2")
    said = [re.search(r"takes about (\S+) parameters", doctor(experts + layout).out) for layout in layouts]
    numbers = [int(found[1].replace(",", "")) for found in said if found is not None]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01)
