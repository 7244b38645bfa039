"""The recipes in ``examples/``: what they start, what it costs, and that Megatron takes it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from forked_ranks import free_port
from launch import REPOSITORY, execute
from one_process import pier_megatron

from pier_megatron.commands.findings import Findings
from pier_megatron.commands.job_script import launch_line

pytestmark = pytest.mark.processes

_EXAMPLES = REPOSITORY / "examples"
_CHECKOUTS = [Path(path) for path in os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep) if path]

# Groups of the published runs (arXiv 2511.17849), each a node of 4 GPUs. Parameters: of the released GPT-2 weights (Radford
# et al., 2019) and of GPT-3 6.7B (Brown et al., arXiv 2005.14165).
_PUBLISHED = {"small": (8, 124e6), "medium": (32, 354e6), "xl": (64, 1558e6), "7b": (32, 6.7e9)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty checkout, data to find, and stand-ins for the commands that print how they are called."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("checkout", "data/tokenizer", "bin"):
        (folder / name).mkdir(parents=True)
    (folder / "checkout" / "pretrain_gpt.py").touch()
    (folder / "data" / "text.bin").touch()
    (folder / "data" / "text.idx").touch()
    stand_ins = {
        "torchrun": 'echo "torchrun $*"',
        "pier-megatron": 'echo "pier-megatron $*"',
    }
    for name, script in stand_ins.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "MEGATRON_LM_PATH": str(folder / "checkout"),
        "DATA": str(folder / "data"),
        "RUNS": str(folder / "runs"),
    }


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in (environment(folder) | variables).items() if value}
    return subprocess.run(["./train.sh", *words], cwd=_EXAMPLES, env=given, capture_output=True, text=True)


def command(folder: Path, *words: str, **variables: str) -> list[str]:
    """What a dry run says it would start."""
    process = run(folder, *words, DRY_RUN="1", **variables)
    assert process.returncode == 0, process.stderr
    return shlex.split(process.stdout.split("\n\n")[0].replace("\\\n", ""))


def check(commands: dict[str, list[str]], megatron: Path | None = None) -> None:
    path = os.pathsep.join(str(folder) for folder in (megatron, REPOSITORY) if folder)
    # train.sh sets it for doctor and job.
    run = pier_megatron(PYTHONPATH=path, CUDA_DEVICE_MAX_CONNECTIONS="1")
    for model, words in commands.items():
        examined, planned = (run(f"{tool} {shlex.join(words)}") for tool in ("doctor", "plan --cluster perlmutter --json"))
        assert (examined.status, planned.status) == (0, 0), examined.out + planned.error
        doctor, plan = examined.out, json.loads(planned.out)
        nodes, parameters = _PUBLISHED[model]
        # What is free in the folder of the tests, or missing on this machine, says nothing of the recipe.
        assert re.findall("^(?:WARNING|ERROR): (?!--save|here:)", doctor, re.MULTILINE) == []
        assert f"{nodes} groups of 4 ranks, preset pier" in doctor
        assert "1-10000" in doctor
        assert plan["groups"] == nodes
        # On the machine of the published runs; 7B with --pier-offload, as its file says.
        on_device = [size for name, size in plan["memory"].items() if model != "7b" or not name.startswith("outer state")]
        assert sum(on_device) < plan["memory of a GPU"]
        tensor = int(words[words.index("--tensor-model-parallel-size") + 1]) if "--tensor-model-parallel-size" in words else 1
        assert plan["parameters per rank"] * tensor == pytest.approx(parameters, rel=0.01)


@pytest.fixture(scope="module")
def commands(folder: Path) -> dict[str, list[str]]:
    """The command of each recipe on as many nodes as published."""
    return {model: command(folder, model, NNODES=str(nodes)) for model, (nodes, _) in _PUBLISHED.items()}


def test_recipes_are_examined_and_planned(commands: dict[str, list[str]]) -> None:
    check(commands)


@pytest.mark.parametrize("model", _PUBLISHED)
def test_only_the_lines_of_pier_differ(folder: Path, commands: dict[str, list[str]], model: str) -> None:
    stock = command(folder, model, NNODES=str(_PUBLISHED[model][0]), OPTIMIZER="adam")
    pier = [word.replace(f"{model}-pier", f"{model}-adam") for word in commands[model]]
    launcher = pier.index("-m")
    assert pier[launcher : launcher + 2] == ["-m", "pier_megatron"]
    assert pier[:launcher] + pier[launcher + 2 :] == [
        *stock,
        "--optimizer",
        "pier",
        "--pier-preset",
        "pier",
        "--pier-sync-interval",
        "50",
        "--pier-load-newest-whole",
    ]


def test_dry_run_examines_what_a_run_starts(folder: Path) -> None:
    dry = run(folder, "small", "--lr", "1e-3", DRY_RUN="1", CLUSTER="vista")
    wet = run(folder, "small", "--lr", "1e-3")
    assert wet.stdout.split() == command(folder, "small", "--lr", "1e-3")
    assert f"pier-megatron doctor {wet.stdout}" in dry.stdout
    assert f"pier-megatron plan --cluster vista {wet.stdout}" in dry.stdout
    assert wet.stdout.endswith("--lr 1e-3\n")


def test_job_script_starts_the_same_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What doctor reads of it; under Slurm it trains in ``tests/slurm``."""
    monkeypatch.chdir(_EXAMPLES)
    queued = "sbatch --nodes 2 --gpus-per-node 8 train.slurm medium --seed 7"
    with mock.patch.dict(os.environ, environment(folder)):
        line = launch_line(queued.split(), Findings())
    by_hand = run(folder, "medium", "--seed", "7", NNODES="2", NODE_RANK="0", GPUS_PER_NODE="8", MASTER_ADDR="node0")
    assert by_hand.stdout.startswith("torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr node0")
    assert " ".join(line) == by_hand.stdout.rstrip()


# Variables or words, and the words of their refusal.
_REFUSED = {
    "no model": ([], {}, "MODEL '': there is no"),
    "another model": (["huge"], {}, "Give one of: 7b medium small xl"),
    "no checkout": (["small"], {"MEGATRON_LM_PATH": ""}, "MEGATRON_LM_PATH: is unset: set it to a checkout"),
    "not a checkout": (["small"], {"MEGATRON_LM_PATH": "/"}, "MEGATRON_LM_PATH=/: no pretrain_gpt.py"),
    "no data": (["small"], {"DATA": ""}, "DATA: is unset"),
    "other data": (["small"], {"DATA": "/nowhere"}, "prepare_openwebtext.py --output /nowhere"),
    "no runs": (["small"], {"RUNS": ""}, "RUNS: is unset"),
    "no rank": (["small"], {"NNODES": "2"}, "NODE_RANK: is unset, and NNODES=2: set it to 0 on MASTER_ADDR, to 1 ... 1"),
    "no address": (["small"], {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: is unset, and NNODES=2"),
    "another device": (["small"], {"DEVICE": "tpu"}, "DEVICE=tpu: give cuda or cpu"),
    "another optimizer": (["small"], {"OPTIMIZER": "lion"}, "OPTIMIZER=lion: give pier or adam"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_bad_input(folder: Path, case: str) -> None:
    words, variables, said = _REFUSED[case]
    process = run(folder, *words, **variables)
    assert process.returncode != 0
    assert not process.stdout
    assert said in process.stderr


@pytest.mark.parametrize("script", ["train.sh", "train.slurm", "again.sh"])
def test_scripts_are_sound(script: str) -> None:
    subprocess.run([Path(sys.executable).parent / "shellcheck", "-x", script], cwd=_EXAMPLES, check=True)


@pytest.mark.skipif(not _CHECKOUTS, reason="MEGATRON_LM_PATH names no Megatron-LM checkout")
@pytest.mark.parametrize("checkout", _CHECKOUTS, ids=lambda path: path.name)
class TestCheckout:
    """The recipes on the parser and the ``pretrain_gpt.py`` of Megatron-LM checkouts."""

    def test_recipes_are_examined_and_planned(self, commands: dict[str, list[str]], checkout: Path) -> None:
        check(commands, checkout)

    def test_text_to_trained_model(self, checkout: Path, tmp_path: Path) -> None:
        """From text through the data preparation and the recipe, with Pier and without."""
        prepare(tmp_path)
        variables = {"DATA": str(tmp_path / "data"), "RUNS": str(tmp_path), "MEGATRON_LM_PATH": str(checkout)}
        variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # The recipe on one emulated node: a smaller model, fewer iterations, nothing else. With the checkout's own Megatron,
        # which is not the one that warm processes have imported.
        variables |= {"DEVICE": "cpu", "MASTER_PORT": str(free_port()), "PIER_TEST_WARM": ""}
        flags = (
            "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
            "--micro-batch-size 2 --global-batch-size 8 --lr-warmup-iters 2 --log-interval 1 --eval-interval 12 --eval-iters 1 "
            "--save-interval 12 --save-retain-interval 24 --train-iters 24"
        ).split()
        pier_flags = "--pier-groups 2 --pier-sync-interval 4 --pier-lazy-start-iters 8".split()
        logs = {}
        for optimizer, more in (("pier", pier_flags), ("adam", [])):
            recipe = [str(_EXAMPLES / "train.sh"), "small", *flags, *more]
            logs[optimizer] = execute(recipe, tmp_path / f"{optimizer}.txt", OPTIMIZER=optimizer, **variables)
        losses = {name: re.findall(r"lm loss: (\S+)", log) for name, log in logs.items()}
        assert len(losses["pier"]) == len(losses["adam"]) == 24
        assert logs["pier"].count("outer step after iteration") == (24 - 8) // 4
        assert logs["pier"].count("validation loss at iteration") >= 2
        assert float(losses["pier"][-1]) < float(losses["pier"][0])
        saved = tmp_path / "small-pier" / "checkpoints"
        assert {path.name for path in saved.glob("iter_*")} == {"iter_0000024"}


def prepare(folder: Path) -> None:
    """Prepares the license as a data set, with a tokenizer of its own."""
    import tokenizers
    import transformers

    # Many documents, because one in a thousand is for the test, and Megatron does not get over a split without any.
    lines = [line for line in (REPOSITORY / "LICENSE").read_text().splitlines() if line] * 20
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(lines, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    backend = tokenizers.Tokenizer.from_str(trained.to_str())
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(
        folder / "tokenizer"
    )
    words = f"--files {folder}/text.jsonl --tokenizer {folder}/tokenizer --output {folder}/data --workers 1"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    execute([sys.executable, str(_EXAMPLES / "prepare_openwebtext.py"), *words.split()], folder / "prepare.txt", **environment)
