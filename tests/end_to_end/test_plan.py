"""``pier-megatron plan`` as a user calls it, with Megatron's own arguments and the log of a real run."""

import json
import re
import statistics
from pathlib import Path

import pytest
from launch import REPOSITORY, data, execute, torchrun, user_job
from one_process import Said, pier_megatron

pytestmark = pytest.mark.processes

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
# Copies of a whole interval wait on the device.
_OVERLAPPED = f"{_7B.replace('--nnodes 32', '--nnodes 16')} --micro-batch-size 1 --pier-offload --pier-overlap 25"
_FLAGS = " --overlap-grad-reduce --overlap-param-gather"
# A model that trains on this machine in seconds; its job is the same on more ranks.
_TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 257 --lr 2e-3 --bf16 --eval-interval 1000 "
)


def plan(flags: str, job: str) -> Said:
    """What the planner says."""
    return pier_megatron()(f"plan {flags} {job}")


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the table, by row."""
    lines = text.split("GPU-hours\n")[1].split("\n\n")[0].splitlines()
    return {name.strip(): cells.split() for name, cells in (re.split(r"  +(?=[\d,]+ )", line, maxsplit=1) for line in lines)}


def test_answer_fits_one_screen_and_stands_on_the_page(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "plan.png"
    said = plan(f"--cluster perlmutter --memory 80 --plot {picture}", _XL + _FLAGS)
    assert said.status == 0, said.error
    lines = said.out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    verdict = " ".join(said.out.split("\n\n")[0].split())
    assert len(verdict.split()) <= 25
    assert verdict.startswith("Measure first, with --pier-overlap 25: ")
    assert list(rows(said.out)) == ["synchronous", "this job", "with --pier-overlap 25", "with --pier-exchange-dtype int8"]
    assert "90 TFLOP/s per GPU, not measured: give --tflops, or --log of a short run" in said.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = (REPOSITORY / "docs" / "planner.md").read_text()
    assert f"```text\n{said.out}```" in page
    details = plan("--cluster perlmutter --memory 80 --details", _XL + _FLAGS).out
    assert details.startswith(said.out)
    assert re.search(r"^an outer step: [\d,]+ ms on the wire in FP32", details, re.MULTILINE)


@pytest.mark.parametrize("job", [_XL + _FLAGS, _7B, _OVERLAPPED])
def test_verdict_is_gated_on_memory(job: str) -> None:
    said = plan("--cluster perlmutter", job).out
    verdict = " ".join(said.split("\n\n")[0].split())
    found = re.fullmatch(r"Does not fit: [\d.]+ of 40 GB\. With (--.+) \(([\d.]+) GB\) ([\d.]+ x) as fast as .*", verdict)
    assert found, verdict
    assert list(rows(said)) == ["synchronous", "this job", f"with {found[1]}"]
    assert rows(said)["this job"][-3:] == ["does", "not", "fit"]
    # With the remedy the same job fits, and is as fast as predicted.
    changed = json.loads(plan("--cluster perlmutter --json", f"{job} {found[1]}").out)
    assert changed["fits"]
    assert f"{changed['memory needed'] / 1e9:.1f}" == found[2]
    assert f"{changed['rows']['this job']['gain']:.2f} x" == found[3]


def test_memory_follows_the_types_of_the_precision_aware_optimizer() -> None:
    aware = " --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16"
    fewer = aware + " --main-params-dtype fp16 --exp-avg-dtype fp8"
    plain, changed, scaled = (
        json.loads(plan("--cluster perlmutter --json", f"{_XL} --pier-groups 64{more}").out) for more in ("", aware, fewer)
    )
    # With a GPU a group each owns all: 2 + 4 + 12 bytes, or 2 of weights, 2 of gradients, 2 of lower halves, 4 of moments.
    what = "weights, gradients, optimizer"
    assert changed["memory"][what] == pytest.approx(plain["memory"][what] * 10 / 18)
    # An FP16 number instead of the lower half, and one byte of a moment less.
    assert scaled["memory"][what] == pytest.approx(plain["memory"][what] * 9 / 18)
    # Chunks of main parameters pass by as FP32 copies.
    assert changed["memory needed"] > plain["memory needed"] - plain["memory"][what] * 8 / 18


def test_own_row_has_the_flags_of_the_job_and_no_others() -> None:
    with_flags, without = (json.loads(plan("--cluster perlmutter --json", _XL + more).out) for more in (_FLAGS, ""))
    assert with_flags["prediction"] == without["prediction"]
    own, synchronous = (without["rows"][name]["seconds"] for name in ("this job", "synchronous"))
    # A group waits for its own gradients, and all groups for theirs in the lazy start.
    assert own > with_flags["rows"]["this job"]["seconds"]
    assert synchronous == without["prediction"]["synchronous"]
    assert with_flags["rows"]["synchronous"]["seconds"] == without["prediction"]["synchronous_hidden"]
    gain = with_flags["rows"]["this job"]["gain"]
    assert any(f"with them in all rows this job is {gain:.2f} x" in assumed for assumed in without["assumed"])
    assert not any("--overlap-grad-reduce" in assumed for assumed in with_flags["assumed"])


# What README and should-i-use-it.md say of each rate, in GB/s: blocking, overlapped.
_SAID = {
    "0.125": ("8.43", None),
    "1.25": (None, "7.75"),
    "5": (None, "4.95"),
    "12.5": ("2.8", "2.93"),
    "50": ("1.15", None),
    "400": ("1.00", None),
}


def test_pages_say_what_the_planner_says() -> None:
    """GPT-2 XL on eight nodes of eight GPUs, by the command that the planner's page shows."""
    page, planner, readme = (
        (REPOSITORY / name).read_text() for name in ("docs/should-i-use-it.md", "docs/planner.md", "README.md")
    )
    [shown] = re.findall(r"## Where Pier pays\n.*?^pier-megatron plan (.*?)```", planner, re.MULTILINE | re.DOTALL)
    flags, job = shown.replace("\\\n", " ").split("torchrun")
    for rate, (blocking, overlapped) in _SAID.items():
        found = json.loads(plan(flags.replace("1.25", rate) + "--json", f"torchrun {job}").out)["rows"]
        gains = (found["this job"]["gain"], found["--pier-overlap 25"]["gain"])
        for said, gain in zip((blocking, overlapped), gains, strict=True):
            if said is not None:
                assert said == f"{gain:.{len(said.split('.')[1])}f}", rate
                assert f"predicted {said} x" in page or f"predicted {said} x" in readme
    assert "2.9 x with `--pier-overlap 25`" in readme


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "--cluster: not given. Name perlmutter, vista,"),
        ("--clustr vista", "--clustr: plan does not know it. Did you mean --cluster?"),
        ("--node-bandwidth -5", "argument --node-bandwidth: -5: must be a number in (0, 1000000]"),
        ("--nodes-per-site 2", "--nodes-per-site without site-bandwidth: give both"),
        ("--log nowhere", "argument --log: nowhere: no such file"),
        ("--suggest", "--suggest was removed: compare the rows of plan with flags of your choice"),
        ("--mtbf 500", "--mtbf was removed: plan simulates no failures; see docs/reliability.md"),
        ("--routes routes.json", "--routes was removed: python examples/skip_routes.py searches routes"),
    ],
)
def test_values_that_cannot_be(flags: str, said: str) -> None:
    refusal = plan(flags if flags.startswith("--clu") or not flags else f"--cluster perlmutter {flags}", _XL)
    assert refusal.status == 2
    assert said in refusal.error
    assert "Traceback" not in refusal.error
    assert not refusal.out


def test_sites_of_a_file_share_their_link() -> None:
    found, alone = (
        json.loads(plan(f"--cluster examples/cluster.yaml {flags} --json", _7B).out) for flags in ("", "--nodes-per-site 16")
    )
    assert (found["sites"], alone["sites"]) == (2, 1)
    assert alone["rows"]["this job"]["seconds"] < found["rows"]["this job"]["seconds"]
    for each in (found, alone):
        over = {float(rate): times["this job"] for rate, times in each["over the link's rate"].items()}
        assert (min(over) * 100, max(over) / 100) == pytest.approx((each["link"], each["link"]))
        assert over[each["link"]] == pytest.approx(each["rows"]["this job"]["seconds"])
        assert over[max(over)] < over[min(over)]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> Path:
    """What a run of one rank has printed."""
    folder = tmp_path_factory.mktemp("short")
    words = (
        f"{_TINY} --global-batch-size 8 --train-iters 8 --log-interval 1 --eval-interval 100 --eval-iters 1 --optimizer adam"
    )
    execute(user_job(torchrun(1), *words.split(), *data(corpus)), folder / "log.txt")
    return folder / "log.txt"


def test_tflops_of_a_short_run(short_run: Path) -> None:
    """A job like the run takes as long as its last half."""
    job = f"torchrun --nproc-per-node 1 -m pier_megatron pretrain_gpt.py {_TINY} --train-iters 1000 --optimizer pier "
    text = short_run.read_text()
    times = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)]
    assert len(times) == 8
    found, given = (
        json.loads(plan(f"--cluster perlmutter {flags} --log {short_run} --json", job + "--global-batch-size 8").out)
        for flags in ("", "--tflops 30")
    )
    assert found["tflops"]["source"] == f"measured in {short_run}"
    assert found["prediction"]["compute"] * 1e3 == pytest.approx(statistics.median(times[4:]), rel=0.01)
    assert given["tflops"] == {"per GPU": 30.0, "source": "given", "measured": True}


def test_log_of_another_model_is_refused(short_run: Path) -> None:
    job = f"torchrun --nproc-per-node 4 -m pier_megatron pretrain_gpt.py {_TINY} --num-layers 4 --train-iters 1000"
    refusal = plan(f"--cluster perlmutter --log {short_run}", f"{job} --global-batch-size 8 --optimizer pier --pier-groups 2")
    assert refusal.status == 2
    assert "--num-layers is 2 there and 4 in the job" in refusal.error


@pytest.mark.parametrize(("line", "said"), [("", "not logged"), ("  world_size ........ None", "None")])
def test_log_without_its_ranks_is_refused(short_run: Path, tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "log.txt"
    file.write_text(re.sub(r"(?m)^ *world_size \.\..*$", line, short_run.read_text()))
    job = f"torchrun --nproc-per-node 1 -m pier_megatron pretrain_gpt.py {_TINY} --train-iters 1000 --optimizer pier"
    refusal = plan(f"--cluster perlmutter --log {file}", f"{job} --global-batch-size 8")
    assert refusal.status == 2
    assert f"--log {file}: world_size is {said} there" in refusal.error
    assert "Traceback" not in refusal.error


@pytest.mark.parametrize(
    ("flags", "launch", "settings"),
    [
        # 41.3 GB blocking, 43.7 GB with chunks that wait for half an interval.
        ("--memory 42", "--nnodes 16 --nproc-per-node 4", ""),
        ("--memory 80", "--nnodes 16 --nproc-per-node 4", "--pier-save-inner-state first"),
    ],
)
def test_overlap_is_recommended_where_the_job_would_start_with_it(flags: str, launch: str, settings: str) -> None:
    job = f"{_XL.replace('--nnodes 16 --nproc-per-node 4', launch)} {settings} {_FLAGS}"
    found = json.loads(plan(f"--cluster perlmutter {flags} --json", job).out)
    assert found["verdict"].startswith(("Measure first", "Use it"))
    assert "--pier-overlap" not in found["verdict"]
    overlapped = found["rows"].get("--pier-overlap 25")
    assert overlapped is None or not overlapped["fits"]
    assert found["gpus"] == 64


def test_overlap_is_recommended_to_elastic_islands() -> None:
    islands = "--pier-lighthouse http://10.0.0.1:29510 --pier-island 1 --pier-groups 16 --mock-data"
    job = f"{_XL.replace('--nnodes 16 --nproc-per-node 4', '--nproc-per-node 4')} {islands} {_FLAGS}"
    found = json.loads(plan("--cluster perlmutter --memory 80 --node-bandwidth 0.5 --json", job).out)
    assert found["verdict"].startswith("Use it, with --pier-overlap 25: ")
    assert found["rows"]["--pier-overlap 25"]["fits"]
    # Sixteen jobs that are an island each.
    assert found["gpus"] == 64


def test_stock_job_and_one_group() -> None:
    stock = plan("--cluster perlmutter --memory 80", _XL.replace("--optimizer pier", "--optimizer adam")).out
    assert stock.startswith("Stock optimizer: every iteration is synchronous.")
    assert list(rows(stock)) == ["synchronous"]
    alone = json.loads(plan("--cluster perlmutter --memory 80 --json", f"{_XL} --pier-groups 1").out)
    assert alone["verdict"].startswith("Do not use it for speed: one group has nothing to relax")
    assert list(alone["rows"]) == ["synchronous", "this job"]


def test_a_group_takes_the_memory_of_a_job_of_its_size() -> None:
    experts = " --num-experts 8 --expert-model-parallel-size 4 --disable-bias-linear --moe-router-load-balancing-type none"
    of_groups, alone = (_XL.replace("--nnodes 16", f"--nnodes {nodes}") + experts for nodes in (16, 2))
    takes = [
        json.loads(plan("--cluster perlmutter --json", job).out)["memory"]["weights, gradients, optimizer"]
        for job in (f"{of_groups} --pier-groups 8", f"{alone} --global-batch-size 64 --pier-groups 1")
    ]
    assert takes[0] == takes[1]
