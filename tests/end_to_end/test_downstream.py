"""``examples/downstream``: what Megatron trained is what Hugging Face loads."""

import argparse
import copy
import json
import math
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import export_gpt2
import gpt2
import pytest
import run_tasks
import torch
from launch import Recorded, Run, execute, launch
from mixture_model import MixtureForCausalLM
from run_tasks import PAPER, score
from torch import Tensor
from torch.nn import functional

from pier_megatron.errors import PierConfigError

pytestmark = pytest.mark.processes

# Large weights, so that the two kinds of GELU differ.
_COMMON = "--init-method-std 0.3 --global-batch-size 8 "
_RUNS = [
    Run(
        "pier",
        _COMMON + "--train-iters 9 --optimizer pier --pier-preset pier "
        "--pier-groups 2 --pier-sync-interval 3 --pier-lazy-start-iters 3 "
        "--tensor-model-parallel-size 2 --save {directory}/pier --save-interval 9",
        ["samples"],
        saves=[6, 7],
    ),
    Run(
        "stock",
        _COMMON + "--train-iters 2 --use-distributed-optimizer --pipeline-model-parallel-size 2 "
        "--untie-embeddings-and-output-weights --save {directory}/stock --save-interval 2",
    ),
]
_FUSED = {"bias_gelu_fusion": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> dict[str, Recorded]:
    return launch(tmp_path_factory.mktemp("downstream"), corpus, _RUNS)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(257, (4, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def megatron(runs: dict[str, Recorded], tokens: Tensor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Logits of Megatron's GPTModel, by run."""
    folder = tmp_path_factory.mktemp("logits")
    pier, stock = (str(folder_of(runs[name], iteration)) for name, iteration in (("pier", 6), ("stock", 2)))
    models = {"pier": (pier, {}), "stock": (stock, {}), "pier, fused": (pier, _FUSED)}
    torch.save({"tokens": tokens, "models": models}, folder / "asked.pt")
    script = Path(__file__).with_name("megatron_logits.py")
    execute([sys.executable, str(script), str(folder / "asked.pt"), str(folder / "found.pt")], folder / "log.txt")
    return torch.load(folder / "found.pt")


@pytest.fixture(scope="module")
def exported(runs: dict[str, Recorded], tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of exported models, by the checkpoint they come from."""
    folder, found = tmp_path_factory.mktemp("exported"), {}
    for name, path in {
        "pier": folder_of(runs["pier"], 6),
        # The folder of the run: its last checkpoint, taken between two outer steps.
        "drifted": runs["pier"].directory,
        "stock": runs["stock"].directory,
    }.items():
        found[name] = folder / name
        flags = ["--checkpoint", str(path), "--output", str(found[name]), "--tokenizer", str(tokenizer)]
        assert export_gpt2.main(flags) == 0
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokens of the corpus, which are bytes, as a Hugging Face tokenizer."""
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()} | {"<|endoftext|>": 256}
    GPT2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    return folder


def folder_of(run: Recorded, iteration: int) -> Path:
    return run.directory / f"iter_{iteration:07d}"


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens).logits


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether logits are equal to FP32 rounding."""
    assert one.std() > 0.1
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-5)


# The model.


@pytest.mark.parametrize("name", ["pier", "stock"])
def test_logits_are_those_of_megatron(
    exported: dict[str, Path], megatron: dict[str, Tensor], tokens: Tensor, name: str
) -> None:
    assert are_equal(logits(loaded(exported[name]), tokens), megatron[name])


def test_loss_is_the_one_that_megatron_logged(exported: dict[str, Path], runs: dict[str, Recorded]) -> None:
    # After an outer step all groups train their first iteration on the weights that were saved.
    micro_batches = [batch for group in (0, 1) for batch in runs["pier"].of_group(group)[0]["samples"][7]]
    inputs, labels = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
    assert len(inputs) == 8
    found = functional.cross_entropy(logits(loaded(exported["pier"]), inputs).flatten(0, 1), labels.flatten())
    assert float(found) == pytest.approx(runs["pier"].losses[7], rel=1e-5)


def test_fused_gelu_is_the_tanh_approximation(runs: dict[str, Recorded], megatron: dict[str, Tensor], tokens: Tensor) -> None:
    assert are_equal(logits(converted(runs["pier"], _FUSED), tokens), megatron["pier, fused"])
    assert not are_equal(logits(converted(runs["pier"], {}), tokens), megatron["pier, fused"])


def converted(run: Recorded, changes: dict[str, Any]) -> Any:
    """The model of a run, as if it had been trained with other arguments."""
    arguments, weights = stored(run)
    vars(arguments).update(changes)
    return gpt2.build(gpt2.configuration(arguments), weights)


def stored(run: Recorded) -> tuple[argparse.Namespace, dict[str, Tensor]]:
    from pier_megatron.integration.checkpoint.stored_model import StoredModel

    model = StoredModel.find(folder_of(run, 6))
    return copy.copy(model.arguments), model.weights()


def test_model_says_where_it_comes_from(exported: dict[str, Path]) -> None:
    origins = {
        name: json.loads((folder / "config.json").read_text())["megatron_checkpoint"] for name, folder in exported.items()
    }
    assert origins == {
        "pier": {"iteration": 6, "weights": "synchronised"},
        "drifted": {"iteration": 7, "weights": "anchor"},
        "stock": {"iteration": 2, "weights": "stock"},
    }


def test_weights_between_outer_steps_are_those_of_the_last_one(exported: dict[str, Path]) -> None:
    drifted, met = loaded(exported["drifted"]).state_dict(), loaded(exported["pier"]).state_dict()
    assert all(torch.equal(tensor, met[name]) for name, tensor in drifted.items())


# Refusals.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position_embedding_type": "rope"}, "--position-embedding-type.* = rope, .* learned_absolute"),
        ({"normalization": "RMSNorm"}, "--normalization.* = RMSNorm, .* LayerNorm"),
        ({"num_experts": 8}, "--num-experts.* = 8, .* None"),
        ({"add_bias_linear": False}, "--disable-bias-linear"),
        ({"kv_channels": 16}, "--kv-channels 16: 4 heads have 64 channels, .* --hidden-size 32"),
    ],
)
def test_what_is_no_gpt2_is_refused(runs: dict[str, Recorded], changes: dict[str, Any], said: str) -> None:
    arguments, _ = stored(runs["pier"])
    vars(arguments).update(changes)
    with pytest.raises(PierConfigError, match=f"{said}.*Megatron-Bridge"):
        gpt2.configuration(arguments)


def test_weights_without_a_place_are_refused(runs: dict[str, Recorded]) -> None:
    arguments, weights = stored(runs["pier"])
    config = gpt2.configuration(arguments)
    with pytest.raises(PierConfigError, match=r"no place: decoder\.layers\.mlp\.router\.weight"):
        gpt2.build(config, weights | {"decoder.layers.mlp.router.weight": torch.zeros(2, 4, 32)})
    del weights["decoder.final_layernorm.bias"]
    with pytest.raises(PierConfigError, match=r"(?s)not those of the model.*ln_f\.bias"):
        gpt2.build(config, weights)


def refused(capsys: pytest.CaptureFixture[str], script: ModuleType, *words: str) -> str:
    assert script.main(words) == 2
    return capsys.readouterr().err


def test_bad_input_of_export_is_refused(
    exported: dict[str, Path], runs: dict[str, Recorded], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "model")]
    checkpoint = ["--checkpoint", str(folder_of(runs["pier"], 6))]
    assert "no torch_dist checkpoint there" in refused(capsys, export_gpt2, "--checkpoint", str(tmp_path), *output)
    assert "there is a model already" in refused(capsys, export_gpt2, *checkpoint, "--output", str(exported["pier"]))
    no_tokenizer = refused(capsys, export_gpt2, *checkpoint, *output, "--tokenizer", str(tmp_path))
    assert f"--tokenizer {tmp_path} cannot be loaded" in no_tokenizer
    damaged = shutil.copytree(folder_of(runs["pier"], 6), tmp_path / "damaged")
    (damaged / "__0_0.distcp").unlink()
    assert "damaged is damaged: __0_0.distcp is missing" in refused(capsys, export_gpt2, "--checkpoint", str(damaged), *output)


@pytest.mark.usefixtures("few_tasks")
def test_bad_input_of_run_tasks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "known.yaml").write_text(_TASK.format(data="nowhere"))
    words = ["--model", str(tmp_path), "--include-path", str(tmp_path), "--tasks"]
    misspelt = refused(capsys, run_tasks, *words, "next_bytes", "misspelt")
    assert re.search("--tasks misspelt: not among the 1 .*--include-path", misspelt)
    assert "has no tokenizer with it: name" in refused(capsys, run_tasks, *words, "next_bytes")
    (tmp_path / "tokenizer_config.json").touch()
    assert f"--model {tmp_path} cannot be loaded: " in refused(capsys, run_tasks, *words, "next_bytes")


# The tasks.


def test_tasks_of_the_paper_are_known_to_the_harness() -> None:
    from lm_eval import tasks

    folders = ("super_glue", "glue", "lambada", "race", "mathqa", "piqa", "winogrande")
    manager = tasks.TaskManager(
        include_path=[Path(tasks.__file__).parent / folder for folder in folders], include_defaults=False
    )
    assert len(PAPER) == 13
    assert set(PAPER) <= set(manager.all_subtasks)
    for task in PAPER:
        metrics = {f"{metric['metric']},none": 0.5 for metric in manager.task_index[task].cfg["metric_list"]}
        assert score(task, metrics).metric == ("f1" if task == "record" else "acc")


_TASK = """
task: next_bytes
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def written_task(model: Any, folder: Path) -> None:
    """Writes a task of eight questions; the model gets six right."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    questions = []
    for place in range(1000, 9000, 1000):
        prompt, choices = text[place : place + 20], [text[other : other + 5] for other in (place + 20, place // 2, place // 3)]
        likelihoods = [likelihood(model, prompt, choice) for choice in choices]
        questions.append({"text": prompt, "choices": choices, "label": likelihoods.index(max(likelihoods))})
    for question in questions[:2]:
        question["label"] = (question["label"] + 1) % 3
    (folder / "tasks").mkdir()
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "tasks" / "next_bytes.yaml").write_text(_TASK.format(data=folder / "questions.jsonl"))


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness takes long to look through all of its own tasks."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))


@pytest.mark.usefixtures("few_tasks")
def test_checkpoint_is_evaluated(
    runs: dict[str, Recorded], exported: dict[str, Path], tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the checkpoint to the score, with a task of one's own whose score is known."""
    written_task(loaded(exported["pier"]), tmp_path)
    words = ["--model", str(folder_of(runs["pier"], 6)), "--tokenizer", str(tokenizer), "--tasks", "next_bytes"]
    words += ["--include-path", str(tmp_path / "tasks"), "--device", "cpu", "--output", str(tmp_path / "evaluation.json")]
    assert run_tasks.main(words) == 0
    log = capsys.readouterr().out
    assert re.search(r"next_bytes +acc +0\.7500 \+- ", log)
    assert "weights: those that all groups hold, iteration 6" in log
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["mean"] == found["tasks"]["next_bytes"]["value"] == 0.75
    assert math.isclose(found["harness"]["results"]["next_bytes"]["acc,none"], 0.75)


@pytest.mark.usefixtures("few_tasks")
def test_mixture_is_evaluated(exported: dict[str, Path], tokenizer: Path, tmp_path: Path, capsys: Any) -> None:
    """Two models as one, whose code is run only if that is allowed."""
    experts = [loaded(exported[name]).eval() for name in ("pier", "stock")]
    mixture = MixtureForCausalLM.of(experts, ["pier", "stock"], [0.0, 0.0])
    mixture.save_pretrained(tmp_path / "mixture")
    written_task(mixture.eval(), tmp_path)
    words = ["--model", str(tmp_path / "mixture"), "--tokenizer", str(tokenizer), "--tasks", "next_bytes"]
    words += ["--include-path", str(tmp_path / "tasks"), "--device", "cpu", "--output", str(tmp_path / "evaluation.json")]
    assert "trust_remote_code=True" in refused(capsys, run_tasks, *words)
    assert run_tasks.main([*words, "--trust-remote-code"]) == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())["mean"] == 0.75


def likelihood(model: Any, prompt: str, choice: str) -> float:
    tokens = torch.tensor([list((prompt + choice).encode())])
    # The logits at a place are of the token after it.
    scores = logits(model, tokens)[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
    return float(scores[len(prompt) - 1 :].sum())
