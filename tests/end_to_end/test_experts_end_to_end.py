"""``pier-megatron experts``: from a description to the table, with a failure on the way, against one process that holds all."""

import contextlib
import io
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import export_mixture
import gpt_reference
import numpy as np
import pytest
import torch
import yaml
from launch import REPOSITORY, Run, execute, launch
from torch.nn import functional

from pier_megatron.cli import main
from pier_megatron.commands.demo.corpus import write_documents
from pier_megatron.experiments.experts import mixture
from pier_megatron.experiments.experts.mix import distinct
from pier_megatron.integration.checkpoint.stored_model import StoredModel

pytestmark = pytest.mark.processes

_SEQUENCE = 32
_END_OF_DOCUMENT = 256
_COMMON = (
    f"--num-layers 2 --num-attention-heads 4 --seq-length {_SEQUENCE} --max-position-embeddings {_SEQUENCE} "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 8 --global-batch-size 16 --tokenizer-type NullTokenizer "
    "--vocab-size 257 --make-vocab-size-divisible-by 16 --lr 1e-2 --lr-decay-style constant --log-interval 1 "
    "--eval-interval 1000 --eval-iters 1 --save-interval 2 --eval-global-batch-size 32 --eval-micro-batch-size 8"
)
_SMALL = "--hidden-size 32"
# What says how it is trained, and must not say how it is scored.
_LARGE = (
    "--hidden-size 48 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|t|L --micro-batch-size 4 "
    "--rampup-batch-size 8 8 16"
)
# Without momentum: it overshoots in so short a training, and large weights cost digits.
_PIER = (
    "--optimizer pier --pier-preset pier "
    "--pier-groups 2 --pier-sync-interval 2 --pier-lazy-start-iters 2 --pier-outer-momentum 0 "
    "--overlap-grad-reduce --overlap-param-gather"
)
_TEXTS = {"licence": REPOSITORY / "LICENSE", "code": REPOSITORY / "tests" / "distributed" / "muon_reference.py"}
# Trainings launched here have the small size.
_SEED = Run("seed", "--train-iters 2 --global-batch-size 16 --save {directory}/seed --save-interval 2")


class Ensemble(NamedTuple):
    """What was done: the folder of the plan, that of the exported models, and what each command printed."""

    folder: Path
    exported: Path
    planned: str
    failed: str
    resumed: str
    replanned: str
    scored: str
    mixed: str


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> Ensemble:
    home = tmp_path_factory.mktemp("experts")
    data = {name: str(write_documents(home / "data" / name, [text])) for name, text in _TEXTS.items()}
    description = {
        "script": str(Path(__file__).with_name("pretrain_failing_once.py")),
        "device": "cpu",
        "arguments": _COMMON,
        "sizes": {"small": {"arguments": f"{_SMALL} {_PIER}", "seed": "seed"}, "large": {"arguments": _LARGE}},
        "domains": {
            "licence": {"train": data["licence"], "validation": data["licence"], "size": "small"},
            "code": {"train": data["code"], "validation": data["code"], "size": "large"},
        },
        "homogeneous": "small",
        "iterations": 8,
        "variants": ["MHe-IHo"],
        "machines": {"gpus-per-node": 4, "ranks-per-expert": 2},
    }
    (home / "experts.yaml").write_text(yaml.safe_dump(description, sort_keys=False))
    folder = home / "runs"
    plan = [*_COMMAND, "plan", str(home / "experts.yaml"), "--output", str(folder)]
    with ThreadPoolExecutor() as beside:
        planning = beside.submit(execute, plan, home / "plan.txt")
        launch(home, corpus, [_SEED], world_size=1)
    train = [folder / "train.sh"]
    first = subprocess.run(train, cwd=REPOSITORY, capture_output=True, text=True)
    assert first.returncode == 1, first.stdout + first.stderr
    (folder / "MHe-IHo" / "code" / "is_failing").rename(folder / "MHe-IHo" / "code" / "has_failed")
    said = [subprocess.run(train, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout]
    # The others need no process for themselves, and this one has imported most of what they use.
    # Once the seed is there, what it has cost is known.
    again = here("plan", str(home / "experts.yaml"), "--output", str(folder))
    said += [again, *(here(name, str(folder)) for name in ("score", "mix"))]
    assert export_mixture.main([str(folder), "--output", str(home / "exported"), "--prior", "code"]) == 0
    return Ensemble(folder, home / "exported", planning.result(), first.stdout + first.stderr, *said)


def here(*words: str) -> str:
    """What a subcommand prints, run in the process of the tests."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["experts", *words]) == 0
    return printed.getvalue()


_COMMAND = [sys.executable, "-m", "pier_megatron.cli", "experts"]


def test_plan_has_equal_operations(ensemble: Ensemble) -> None:
    plan = json.loads((ensemble.folder / "plan.json").read_text())
    small, large = plan["experts"]
    assert small["iterations"] == large["iterations"]
    of_one = {expert["name"]: expert["operations"] / expert["iterations"] for expert in plan["experts"]}
    total = 2 * 8 * of_one["MHe-IHo/licence"]
    assert abs(small["operations"] + large["operations"] - total) <= sum(of_one.values())
    assert re.search(r"MHe-IHo together, 2 experts +\d", ensemble.planned)


def test_seed_is_counted(ensemble: Ensemble) -> None:
    """Two iterations of the small size."""
    plan = json.loads((ensemble.folder / "plan.json").read_text())
    small, large = plan["experts"]
    seed = 2 * small["operations"] / small["iterations"]
    assert plan["seeds"] == {"small": pytest.approx(seed), "large": 0}
    experts = small["operations"] + large["operations"]
    assert f"{'  and its seeds, small, large':50} {experts + seed:11.3e}\n" in ensemble.replanned
    assert f"{'MHe-IHo':12}  {experts:11.3e}  {seed:11.3e}  {experts + seed:11.3e}\n" in ensemble.mixed


def test_failure_stops_nobody_and_training_goes_on(ensemble: Ensemble) -> None:
    path = ensemble.folder / "MHe-IHo" / "code" / "log.txt"
    assert f"MHe-IHo/code: started at iteration 0, log in {path}\n" in ensemble.failed
    assert "MHe-IHo/code: ended with status 1 at iteration 2 of" in ensemble.failed
    assert "MHe-IHo/licence: ended with status 0" in ensemble.failed
    assert ensemble.resumed.startswith("1 of 2 experts are trained\nMHe-IHo/code: started at iteration 2")
    log = path.read_text()
    assert "ValueError: a planted failure" in log
    assert len(re.findall(r" iteration +2/", log)) == 1
    assert len(re.findall(r" iteration +3/", log)) == 2


def test_expert_begins_from_the_seed(ensemble: Ensemble) -> None:
    log = (ensemble.folder / "MHe-IHo" / "licence" / "log.txt").read_text()
    assert re.search(rf"loaded checkpoint from {ensemble.folder.parent / 'seed'} ", log)


def test_expert_trains_with_pier(ensemble: Ensemble) -> None:
    log = (ensemble.folder / "MHe-IHo" / "licence" / "log.txt").read_text()
    assert re.findall(r"outer step after iteration +(\d)", log) == ["4", "5"]
    assert "outer step" not in (ensemble.folder / "MHe-IHo" / "code" / "log.txt").read_text()


@pytest.fixture(scope="module")
def scores(ensemble: Ensemble) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Losses and labels by model and domain."""
    found: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for name in ("seed/small", "MHe-IHo/licence", "MHe-IHo/code"):
        for domain in _TEXTS:
            with np.load(ensemble.folder / name / "scores" / f"{domain}.npz") as stored:
                found.setdefault(name, {})[domain] = stored["losses"], stored["labels"]
    return found


def test_scores_are_what_megatron_prints(
    ensemble: Ensemble, scores: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]
) -> None:
    for name, by_domain in scores.items():
        log = (ensemble.folder / name / "scores" / "log.txt").read_text()
        printed = re.findall(r"validation-\S+ loss at .* lm loss value: (\S+)", log)
        assert len(printed) == 2
        for (losses, labels), loss in zip(by_domain.values(), printed, strict=True):
            assert losses.shape == labels.shape
            assert losses.mean() == pytest.approx(float(loss), rel=1e-4)
    assert "MHe-IHo/code on licence: " in ensemble.scored


def test_every_sequence_is_scored_once(scores: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]) -> None:
    for by_domain in scores.values():
        for (_, labels), text in zip(by_domain.values(), _TEXTS.values(), strict=True):
            # The text and the end of the document; the last token has no label.
            assert len(labels) == text.stat().st_size // _SEQUENCE
            assert len(distinct(labels)) == len(labels)


def inputs_of(labels: torch.Tensor, text: bytes) -> torch.Tensor:
    """What came before the labels, found in the text."""
    tokens = [*text, _END_OF_DOCUMENT]
    starts = {tuple(tokens[start + 1 : start + 1 + _SEQUENCE]): tokens[start] for start in range(0, len(text), _SEQUENCE)}
    first = [starts[tuple(sequence.tolist())] for sequence in labels]
    return torch.cat([torch.tensor(first)[:, None], labels[:, :-1]], dim=1)


@pytest.mark.parametrize("domain", list(_TEXTS))
def test_mixture_is_that_of_one_process_with_all_experts(
    ensemble: Ensemble, scores: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]], domain: str
) -> None:
    experts = ["MHe-IHo/licence", "MHe-IHo/code"]
    labels = torch.from_numpy(scores[experts[0]][domain][1])
    inputs = inputs_of(labels, _TEXTS[domain].read_bytes())
    assert all(np.array_equal(scores[name][domain][1], labels) for name in scores)
    distributions = []
    for name in experts:
        weights = gpt_reference.trainable(dict(StoredModel.find(ensemble.folder / name / "checkpoints").weights()))
        distributions.append(gpt_reference.logits(weights, inputs).log_softmax(-1))
        chosen = distributions[-1].gather(-1, labels[..., None])[..., 0]
        np.testing.assert_allclose(-scores[name][domain][0], chosen, atol=1e-4)
    # The definition, with whole distributions.
    joint = torch.full((2, len(labels)), 0.5, dtype=torch.float64)
    expected = torch.empty(labels.shape, dtype=torch.float64)
    for token in range(_SEQUENCE):
        weights_of_experts = joint / joint.sum(0)
        of_token = torch.stack([distribution[:, token].exp() for distribution in distributions])
        mixed = (weights_of_experts[..., None] * of_token).sum(0)
        torch.testing.assert_close(mixed.sum(-1), torch.ones(len(labels), dtype=torch.float64))
        label = labels[:, token, None]
        expected[:, token] = mixed.gather(-1, label)[:, 0].log()
        joint = weights_of_experts * of_token.gather(-1, label.expand(2, -1, -1))[..., 0]
    found = mixture.mixed(np.stack([-scores[name][domain][0].astype(np.float64) for name in experts]), np.log([0.5, 0.5]))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    seen = min(100, len(labels) // 2)
    told = json.loads((ensemble.folder / "mixture.json").read_text())["MHe-IHo, uniform prior"][domain]
    assert told == pytest.approx(float(np.exp(-expected[seen:].mean())), rel=1e-4)


@pytest.mark.parametrize(("expert", "weights"), [("licence", "synchronised"), ("code", "stock")])
def test_exported_expert_is_the_one_that_was_scored(
    ensemble: Ensemble, scores: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]], expert: str, weights: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ensemble.exported / "MHe-IHo" / expert).eval()
    assert model.config.megatron_checkpoint == {"iteration": 5, "weights": weights}
    for domain, text in _TEXTS.items():
        losses, labels = map(torch.from_numpy, scores[f"MHe-IHo/{expert}"][domain])
        with torch.no_grad():
            logits = model(inputs_of(labels, text.read_bytes())).logits
        found = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        np.testing.assert_allclose(found, losses.flatten(), atol=1e-4)


@pytest.mark.parametrize("domain", list(_TEXTS))
def test_exported_mixture_is_the_one_that_was_mixed(
    ensemble: Ensemble, scores: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]], domain: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ensemble.exported / "MHe-IHo", trust_remote_code=True).eval()
    assert model.config.names == ["licence", "code"]
    by_domain = {
        name: np.stack([-scores[f"MHe-IHo/{expert}"][name][0].astype(np.float64) for expert in model.config.names])
        for name in _TEXTS
    }
    labels = torch.from_numpy(scores["MHe-IHo/code"][domain][1])
    inputs = inputs_of(labels, _TEXTS[domain].read_bytes())

    def of_model() -> np.ndarray:
        with torch.no_grad():
            logits = model(inputs).logits
        found: np.ndarray = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0].numpy()
        return found

    learned = mixture.cached_prior(by_domain["code"][:, : min(100, by_domain["code"].shape[1] // 2)])
    np.testing.assert_allclose(model.config.log_prior, learned, atol=1e-12)
    np.testing.assert_allclose(of_model(), mixture.mixed(by_domain[domain], learned), atol=1e-4)
    model.config.log_prior = [0.0, 0.0]
    found = of_model()
    np.testing.assert_allclose(found, mixture.mixed(by_domain[domain], np.log([0.5, 0.5])), atol=1e-4)
    told = json.loads((ensemble.folder / "mixture.json").read_text())["MHe-IHo, uniform prior"][domain]
    assert np.exp(-found[min(100, len(found) // 2) :].mean()) == pytest.approx(told, rel=1e-5)


def test_table_has_every_model(ensemble: Ensemble) -> None:
    for name in ("seed/small", "MHe-IHo/licence", "MHe-IHo/code", "MHe-IHo, uniform prior", "MHe-IHo, cached prior"):
        assert re.search(rf"^{name} +\d+\.\d{{4}}[ *] +\d+\.\d{{4}}[ *]$", ensemble.mixed, re.MULTILINE)
    # Several are starred where the lowest agree to all digits shown.
    assert ensemble.mixed.count("*") >= len(_TEXTS)
    assert (ensemble.folder / "mixture.png").stat().st_size > 1000
