"""The unmodified ``pretrain_gpt.py`` of Megatron-LM checkouts. Needs them, hence not part of CI.

``MEGATRON_LM_PATH=/path/to/0.17:/path/to/0.18:/path/to/0.19 make test``
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launch import REPOSITORY, execute, torchrun

from pier_megatron.cpu.preparations import missing_cpu_flags

_CHECKOUTS = [Path(path) for path in os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep) if path]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not _CHECKOUTS, reason="MEGATRON_LM_PATH names no Megatron-LM checkout"),
]

_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --bf16 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-3 --lr-decay-style constant --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-interval 20 --eval-iters 1"
).split()
_LAYOUTS = {
    "TP 2 x 2 groups": ("--tensor-model-parallel-size 2", 2),
    "TP 1 x 4 groups": ("", 4),
    "PP 2 x 2 groups": ("--pipeline-model-parallel-size 2", 2),
}
_LAZY_START, _ITERATIONS = 8, 20


def stock(groups: int) -> list[str]:
    return ["--use-distributed-optimizer", "--num-distributed-optimizer-instances", str(groups)]


def pier(groups: int) -> list[str]:
    settings = "--optimizer pier --pier-preset pier --pier-sync-interval 4 --pier-lazy-start-iters 8 --pier-groups"
    return [*settings.split(), str(groups)]


def minor_of(checkout: Path) -> str:
    return re.search(r"^MINOR = (\d+)", (checkout / "megatron/core/package_info.py").read_text(), re.MULTILINE).group(1)


def losses(log: str) -> list[str]:
    """What Megatron printed, to the last digit: loss and gradient norm of each iteration."""
    return re.findall(r"lm loss: (\S+) .*?grad norm: \S+", log)


def train(checkout: Path, tmp_path: Path, name: str, script: Path, *arguments: str, **options: Path) -> str:
    launcher = ["-m", "pier_megatron", "--device", "cpu", str(script)]
    return execute([*torchrun(4), *launcher, *_MODEL, *arguments], tmp_path / f"{name}.txt", **options)


def check(pier_log: str, stock_log: str) -> None:
    assert len(losses(pier_log)) == len(losses(stock_log)) == _ITERATIONS
    assert losses(pier_log)[:_LAZY_START] == losses(stock_log)[:_LAZY_START]
    assert pier_log.count("outer step after iteration") == (_ITERATIONS - _LAZY_START) // 4
    assert "validation loss at iteration 20" in pier_log


@pytest.fixture(params=_CHECKOUTS, ids=lambda path: path.name)
def checkout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The warm processes have imported the installed release.
    monkeypatch.setenv("PIER_TEST_WARM", "")
    return request.param


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_checkout_with_its_own_package(checkout: Path, tmp_path: Path, layout: str) -> None:
    flags, groups = _LAYOUTS[layout]
    script = checkout / "pretrain_gpt.py"
    logs = [
        train(checkout, tmp_path, name, script, *flags.split(), *optimizer(groups))
        for name, optimizer in (("pier", pier), ("stock", stock))
    ]
    check(*logs)


def test_muon_whole_and_layer_wise(checkout: Path, tmp_path: Path) -> None:
    script, muon = checkout / "pretrain_gpt.py", ["--muon-fp32-matmul-prec", "high"]
    inside = [*pier(2), "--pier-inner-optimizer", "muon", *muon]
    whole = train(checkout, tmp_path, "whole", script, *inside)
    check(whole, train(checkout, tmp_path, "stock", script, "--optimizer", "muon", *muon))
    if minor_of(checkout) == "17":
        # Pier refuses its layer-wise optimizer.
        return
    # Stock Megatron gathers parts of unequal length with the script of 0.19, which gloo refuses.
    layer_wise = train(checkout, tmp_path, "layer-wise", script, *inside, "--use-distributed-optimizer")
    check(layer_wise, layer_wise)
    one, other = ([float(loss) for loss in losses(log)] for log in (layer_wise, whole))
    assert one == pytest.approx(other, rel=2e-4)


def test_scripts_of_a_checkout_with_the_package_of_the_wheel(checkout: Path, tmp_path: Path) -> None:
    for name in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        shutil.copy(checkout / name, tmp_path)
    minor = minor_of(checkout)
    release = {"17": Path(sys.prefix) / "megatron-0.17.1", "18": Path(sys.prefix) / "megatron-0.18.2"}.get(minor)
    if minor == "17":
        # The scripts of 0.17 import megatron.legacy, which its wheel does not have.
        legacy = tmp_path / "megatron" / "legacy"
        shutil.copytree(checkout / "megatron" / "legacy", legacy)
    flags, groups = _LAYOUTS["TP 2 x 2 groups"]
    script = tmp_path / "pretrain_gpt.py"
    logs = [
        train(checkout, tmp_path, name, script, *flags.split(), *optimizer(groups), megatron=release)
        for name, optimizer in (("pier", pier), ("stock", stock))
    ]
    check(*logs)


def test_patched_checkout_without_the_launcher(checkout: Path, tmp_path: Path) -> None:
    patched = tmp_path / "patched"
    shutil.copytree(checkout, patched, ignore=shutil.ignore_patterns(".git", "tests", "docs", "images"))
    minor = minor_of(checkout)
    patch = REPOSITORY / "patches" / f"megatron-lm-0.{minor}.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=patched, check=True)
    # All that stands in for a GPU here: every Python of the run emulates one before it does anything else.
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os\nif 'RANK' in os.environ:\n    from pier_megatron.cpu import emulation\n    emulation.install()\n"
    )
    flags, groups = _LAYOUTS["TP 2 x 2 groups"]
    arguments = [*_MODEL, *flags.split(), *pier(groups), "--save", str(tmp_path / "checkpoint"), "--save-interval", "20"]
    command = [*torchrun(4), str(patched / "pretrain_gpt.py"), *arguments, *missing_cpu_flags([])]
    # The launcher sets it on the CPU.
    log = execute(command, tmp_path / "patched.txt", megatron=site, CUDA_DEVICE_MAX_CONNECTIONS="1")
    stock_log = train(checkout, tmp_path, "stock", checkout / "pretrain_gpt.py", *flags.split(), *stock(groups))
    check(log, stock_log)
    assert (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").read_text() == "20"


def test_experts(checkout: Path, tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    train, validation = map(str, corpus)
    # Tokens of the corpus are bytes and one for the end of a document.
    arguments = [word for word in _MODEL if word != "--mock-data"] + ["--vocab-size", "257"]
    description = {
        "script": str(checkout / "pretrain_gpt.py"),
        "device": "cpu",
        "arguments": " ".join(arguments),
        "sizes": {"one": {}},
        "domains": {name: {"train": train, "validation": validation, "size": "one"} for name in ("law", "history")},
        "homogeneous": "one",
        "iterations": 2,
        "variants": ["MHo-IHo"],
        "machines": {"gpus-per-node": 2, "ranks-per-expert": 1},
    }
    (tmp_path / "experts.yaml").write_text(yaml.safe_dump(description))
    command, runs = [sys.executable, "-m", "pier_megatron.cli", "experts"], str(tmp_path / "runs")
    execute([*command, "plan", str(tmp_path / "experts.yaml"), "--output", runs], tmp_path / "plan.txt")
    execute([f"{runs}/train.sh"], tmp_path / "train.txt")
    for name in ("score", "mix"):
        said = execute([*command, name, runs], tmp_path / f"{name}.txt")
    assert "MHo-IHo/law on law: " in (tmp_path / "score.txt").read_text()
    assert re.search(r"^MHo-IHo, uniform prior +\d+\.\d", said, re.MULTILINE)
