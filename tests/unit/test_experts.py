"""Ensembles of experts: what is described, how operations are shared, and the mixture against its definition."""

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pier_megatron import cli
from pier_megatron.commands import job_arguments
from pier_megatron.commands.findings import Findings
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.plan.model import Job
from pier_megatron.commands.script_sources import ScriptSources
from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts import mix, mixture, score, seeds
from pier_megatron.experiments.experts.budget import shares
from pier_megatron.experiments.experts.ensemble import VARIANTS, Ensemble
from pier_megatron.experiments.experts.plan import check_nothing_is_lost, check_scoring, make
from pier_megatron.experiments.experts.planned import Expert, Model, Plan
from pier_megatron.experiments.experts.scoring_arguments import scoring_arguments
from pier_megatron.integration.checkpoint.stored_model import StoredModel

pytestmark = pytest.mark.slow

_OPERATIONS = {"small": 3.1e12, "medium": 5.3e12, "large": 9.7e12}
# Operations of seed models: 900 iterations of each size.
_SEEDS = {name: 900 * of_one for name, of_one in _OPERATIONS.items()}
_MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 4 --global-batch-size 16 --tokenizer-type NullTokenizer --vocab-size 257 --lr 1e-2"
)


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    for name in ("law", "history", "physics", "poems"):
        (tmp_path / f"{name}.idx").touch()
    (tmp_path / "pretrain.py").touch()
    return {
        "script": "pretrain.py",
        "device": "cpu",
        "arguments": "--seq-length 32  # tokens\n--lr 1e-3",
        "sizes": {
            "small": {"arguments": "--hidden-size 32", "seed": "seeds/small"},
            "medium": {"arguments": "--hidden-size 64"},
            "large": {},
        },
        "domains": {
            "law": {"train": "law", "validation": "law", "size": "small", "difficulty": 3},
            "history": {"train": "history", "validation": "history", "size": "medium", "difficulty": 4},
            "physics": {"train": "physics", "validation": "physics", "size": "large", "difficulty": 5},
        },
        "held-out": {"poems": "poems"},
        "homogeneous": "medium",
        "iterations": 400,
        "machines": {"nodes": 2, "gpus-per-node": 8, "ranks-per-expert": 4, "cluster": "dgx-h100"},
    }


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Any], Ensemble]:
    def written(content: Any) -> Ensemble:
        file = tmp_path / "experts.yaml"
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        return Ensemble.read(file)

    return written


def test_description_is_read(read: Callable[[Any], Ensemble], content: dict[str, Any], tmp_path: Path) -> None:
    ensemble = read(content)
    assert ensemble.arguments == ("--seq-length", "32", "--lr", "1e-3")
    assert ensemble.sizes["small"].seed == tmp_path / "seeds" / "small"
    assert ensemble.sizes["large"].seed is None
    assert ensemble.variants == VARIANTS
    assert not ensemble.count_seeds
    assert list(ensemble.validation) == ["law", "history", "physics", "poems"]
    assert ensemble.domains["physics"].difficulty == 5


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (["script"], "nowhere.py", r"script: .*nowhere\.py: no such file"),
        (["arguments"], ["--lr"], "arguments: .* expected flags as on a command line"),
        (["domains", ".."], {}, r"domains\.\.\.: '\.\.': String should match pattern"),
        (["iterations"], 0, "iterations: 0: Input should be greater than 0"),
        (["iteration"], 4, "iteration: no such key. Did you mean iterations?"),
        (["homogeneous"], "huge", "homogeneous: huge: not one of small, medium, large"),
        (["domains", "law", "train"], "lore", r"domains\.law\.train: .*/lore: no dataset there\. .*\.idx"),
        (["held-out", "law"], "law", "held-out: law: is among the domains, too"),
        (["sizes", "small", "sead"], "x", r"sizes\.small\.sead: no such key\. Did you mean seed\?"),
        (["machines", "cluster"], "moon", r"machines\.cluster: moon: not one of perlmutter"),
        (["machines", "ranks-per-expert"], 32, "2 nodes x 8 gpus-per-node = 16"),
        (["machines", "ranks-per-expert"], 3, r"8 = 2 x 3 \+ 2"),
    ],
)
def test_bad_descriptions_are_refused(
    read: Callable[[Any], Ensemble], content: dict[str, Any], keys: list[str], value: Any, said: str
) -> None:
    *outer, key = keys
    section = content
    for name in outer:
        section = section[name]
    section[key] = value
    with pytest.raises(PierConfigError, match=said):
        read(content)


def test_what_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    for file in ("bad.yaml", "none.yaml"):
        with pytest.raises(PierConfigError, match=f"{file} cannot be read"):
            Ensemble.read(tmp_path / file)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("physics", ["large", "small"])
def test_variants_take_equal_operations_with_their_seeds(
    read: Callable[[Any], Ensemble], content: dict[str, Any], variant: str, physics: str
) -> None:
    """Unequal sizes: three seeds or two, where equal experts have one; each seed counts once. In runs of one iteration, too."""
    for share in (short := shares(read(content | {"iterations": 1}), variant, _OPERATIONS, {})):
        assert share.iterations >= 1
    taken = sum(_OPERATIONS[share.size] * share.iterations for share in short)
    assert abs(taken - 3 * _OPERATIONS["medium"]) <= sum(_OPERATIONS[share.size] for share in short)
    assert [domain for share in short for domain in share.domains] == ["law", "history", "physics"]
    content["domains"]["physics"]["size"] = physics
    found = shares(read(content | {"count-seeds": True}), variant, _OPERATIONS, _SEEDS)
    own = sum(_OPERATIONS[share.size] * share.iterations for share in found)
    total = 3 * 400 * _OPERATIONS["medium"] + sum(_SEEDS[size] for size in {"small", "medium", physics})
    taken = own + sum(_SEEDS[size] for size in {share.size for share in found})
    assert abs(taken - total) <= sum(_OPERATIONS[share.size] for share in found) / 2
    if variant == "MHe-IHo":
        # What the dearest seeds leave is what the description says.
        assert own == pytest.approx(3 * 400 * _OPERATIONS["medium"], rel=2e-3)


def test_what_differs_in_each_variant(read: Callable[[Any], Ensemble], content: dict[str, Any]) -> None:
    found = {variant: shares(read(content), variant, _OPERATIONS, {}) for variant in VARIANTS}
    assert [(share.size, share.iterations) for share in found["MHo-IHo"]] == [("medium", 400)] * 3
    # HDEE's own shares of its iterations.
    assert [(share.size, share.iterations) for share in found["MHo-IHe"]] == [("medium", 300), ("medium", 400), ("medium", 500)]
    assert [share.size for share in found["MHe-IHo"]] == ["small", "medium", "large"]
    assert {share.iterations for share in found["MHe-IHo"]} == {round(400 * 3 * 5.3 / (3.1 + 5.3 + 9.7))}
    assert [(share.size, share.iterations) for share in found["dense"]] == [("medium", 1200)]
    unit = 400 * 3 * 5.3 / (3 * 3.1 + 4 * 5.3 + 5 * 9.7)
    assert [(share.size, share.iterations) for share in found["MHe-IHe"]] == [
        ("small", round(3 * unit)),
        ("medium", round(4 * unit)),
        ("large", round(5 * unit)),
    ]


def stored_training(**arguments: Any) -> StoredModel:
    """A checkpoint of 20 sequences of a small model, unless told otherwise."""
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "padded_vocab_size": 257}
    begun = {"consumed_train_samples": 20, "pretrained_checkpoint": None, "finetune": False, "load": "own"}
    return StoredModel(Path(), argparse.Namespace(**model | begun | arguments), 1, None)


def test_seed_costs_what_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what it began from: another seed model, or a checkpoint that it was a fine-tuning of."""
    trainings = {
        "base": stored_training(consumed_train_samples=100),
        "longer": stored_training(consumed_train_samples=200),
        "child": stored_training(pretrained_checkpoint="base", finetune=True),
        "tuned": stored_training(finetune=True, load="child"),
        "converted": stored_training(consumed_train_samples=0, load=None),
        "again": stored_training(finetune=True, load="again"),
    }
    monkeypatch.setattr(StoredModel, "find", lambda path: trainings[path.name])
    command = LaunchCommand(1, 1, "x.py", tuple(f"{_MODEL} --train-iters 1 --eval-interval 1".split()))
    defaults = job_arguments.read(command, ScriptSources.of(command), Findings())
    assert defaults is not None
    cost = {name: seeds.operations(Path(name), defaults) for name in ("base", "longer", "child", "tuned")}
    assert cost["base"] == pytest.approx(100 / 16 * Job.of(defaults).flops)
    assert cost["longer"] == pytest.approx(2 * cost["base"])
    assert cost["child"] == pytest.approx(1.2 * cost["base"])
    assert cost["tuned"] == pytest.approx(1.4 * cost["base"])
    with pytest.raises(PierConfigError, match="converted: no training is stored with it"):
        seeds.operations(Path("converted"), defaults)
    with pytest.raises(PierConfigError, match="again: its model began from its own folder"):
        seeds.operations(Path("again"), defaults)


def test_a_trained_plan_takes_more_variants_and_no_other_change(tmp_path: Path) -> None:
    law = Expert("MHo-IHo/law", ("law",), "one", 8, 1e9, 1e9, None)
    longer, dense = dataclasses.replace(law, iterations=9), dataclasses.replace(law, name="dense/dense")
    plan = Plan(tmp_path, "pretrain.py", "cpu", 2, "one", {}, ("law",), {}, (law,))
    plan.write()
    check_nothing_is_lost(dataclasses.replace(plan, experts=(longer,)))
    plan.checkpoints(law.name).mkdir(parents=True)
    check_nothing_is_lost(dataclasses.replace(plan, experts=(law, dense)))
    # What seeds have cost is known once they are trained.
    check_nothing_is_lost(dataclasses.replace(plan, seeds={"one": 1e9}))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PierConfigError, match=r"no plan that this release wrote .* Choose another folder"):
        check_nothing_is_lost(plan)
    plan.write()
    for change in ({"experts": (longer, dense)}, {"experts": (dense,)}, {"experts": (law, dense), "script": "other.py"}):
        with pytest.raises(PierConfigError, match="another plan has been trained there"):
            check_nothing_is_lost(dataclasses.replace(plan, **change))


def test_models_are_scored_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {name: Model((), None, ranks, 1) for name, ranks in (("small", 1), ("large", 2), ("huge", 8))}
    plan = Plan(tmp_path, "pretrain.py", "cuda", 4, "small", {}, (), models, ())

    def places(*sizes: str) -> list[str]:
        return [",".join(found) for found in score.places(plan, [score.Scored(size, tmp_path, size) for size in sizes])]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert places("small", "small") == ["0", "1", "2", "3"]
    assert places("small", "large") == ["0,1", "2,3"]
    with pytest.raises(PierConfigError, match=r"takes 8 ranks .* this node has 4 \(machines.gpus-per-node\)"):
        places("small", "huge")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-6a,7")
    assert places("small", "large") == ["5,GPU-6a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(PierConfigError, match=r"takes 2 ranks .* this node has 1 \(CUDA_VISIBLE_DEVICES\)"):
        places("large")


def test_model_is_scored_without_what_says_how_it_was_trained() -> None:
    model = "--hidden-size 32 --bf16 --pipeline-model-parallel-size 2 --micro-batch-size 4"
    training = (
        "--pipeline-model-parallel-layout E(t|)*7tL --rampup-batch-size 8 8 16 --eval-global-batch-size=32 "
        "--eval-micro-batch-size 8 --overlap-grad-reduce --overlap-param-gather --pier-layered --pier-groups 2"
    )
    found = scoring_arguments(f"{model} {training}".split(), 4, "saved", ["one", "two"])
    assert found[: len(model.split())] == model.split()
    assert " ".join(found[len(model.split()) :]).startswith("--pipeline-model-parallel-layout Etttt|ttttL ")
    kept = {word for word in found if word.startswith("--")}
    assert not kept & {word.partition("=")[0] for word in training.split()} - {"--pipeline-model-parallel-layout"}


def test_plan_refuses_sizes_that_could_not_be_scored(
    read: Callable[[Any], Ensemble], content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tuple(f"{_MODEL} --overlap-grad-reduce --overlap-param-gather".split()), None, 1, 4)
    check_scoring(read(content), "small", model)
    # The list of flags lacks that flag.
    monkeypatch.setattr("pier_megatron.experiments.experts.scoring_arguments._OF_TRAINING", ("--pier-",))
    with pytest.raises(PierConfigError, match=r"scoring experts of size small: .* --overlap-param-gather only supported with"):
        check_scoring(read(content), "small", model)


def test_plan_refuses_what_megatron_would(read: Callable[[Any], Ensemble], content: dict[str, Any], tmp_path: Path) -> None:
    content["arguments"] = content["arguments"].replace("--lr ", "--lrr ")
    with pytest.raises(PierConfigError, match="size small: --lrr: Megatron does not know it, and no script adds it"):
        make(read(content), tmp_path)


def trained_plan(folder: Path, *names: str) -> Plan:
    experts = tuple(Expert(f"MHo-IHo/{name}", (name,), "one", 8, 1e9, 1e9, None) for name in names)
    plan = Plan(folder, "pretrain.py", "cpu", 1, "one", {"law": "law"}, ("law",), {"one": Model((), None, 1, 1)}, experts)
    folder.mkdir(exist_ok=True)
    plan.write()
    for expert in experts:
        plan.checkpoints(expert.name).mkdir(parents=True)
        (plan.checkpoints(expert.name) / "latest_checkpointed_iteration.txt").write_text("8")
    return plan


def plan_with_scores(folder: Path, labels: np.ndarray, printed: float) -> tuple[Plan, score.Scored]:
    """A plan of one trained expert; a job has just written its scores of 2 nats and a log."""
    plan = trained_plan(folder, "law")
    written = score.unchecked(score.scores_file(plan, "MHo-IHo/law", "law"))
    written.parent.mkdir(parents=True)
    np.savez(written, losses=np.full(labels.shape, 2, dtype=np.float32), labels=labels)
    log = f" validation-0 loss at iteration 8 on validation set | lm loss value: {printed:E} | "
    (folder / "MHo-IHo/law/scores/log.txt").write_text(log)
    return plan, score.scored_models(plan)[0]


def test_scores_count_that_pass_their_check(tmp_path: Path) -> None:
    plan, model = plan_with_scores(tmp_path / "good", np.arange(8).reshape(4, 2), 2.0)
    score.accept(plan, model)
    assert score.is_scored(plan, model)
    assert (score.read_scores(plan, model.name, "law")[0] == -2).all()
    plan, model = plan_with_scores(tmp_path / "bad", np.arange(8).reshape(4, 2), 2.01)
    with pytest.raises(PierConfigError, match=r"law: the losses of all tokens have a mean of 2\.000000, Megatron printed"):
        score.accept(plan, model)
    assert not score.is_scored(plan, model)
    with pytest.raises(PierConfigError, match="no such file"):
        score.read_scores(plan, model.name, "law")


def test_job_that_cannot_start_gives_its_devices_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_plan(tmp_path, "law", "history")
    # No log can be written there.
    (tmp_path / "MHo-IHo/law/scores/log.txt").mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(PierConfigError) as refused:
        score.run(argparse.Namespace(folder=tmp_path))
    directory, status = refused.value.args
    assert directory.startswith("MHo-IHo/law: [Errno 21] Is a directory")
    assert status == f"MHo-IHo/history: ended with status 1, log in {tmp_path}/MHo-IHo/history/scores/log.txt"


def test_prior_is_not_learned_from_what_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six sequences that come four times each, and one that is twice in them: half of the distinct ones teach the prior."""
    once = np.arange(12).reshape(6, 2)
    once[5] = once[0]
    plan, model = plan_with_scores(tmp_path, np.concatenate([once] * 4), 2.0)
    score.accept(plan, model)
    scores, seen = mix.distinct_scores(plan, "law")
    assert (len(scores[model.name]), seen) == (5, 2)
    assert "law: 19 of 24 sequences repeat another one" in capsys.readouterr().out
    with pytest.raises(PierConfigError, match="1 sequences would both teach the cached prior and be evaluated"):
        mix.check_disjoint("law", once[:2], once[4:])


_LABELS = torch.randint(5, (4, 6, 1), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    """Logits of three experts, ``[experts, sequences, tokens, vocabulary]``: unlike, so that the posterior moves."""
    return 2 * torch.randn(3, 4, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture(scope="module")
def scores(logits: torch.Tensor) -> np.ndarray:
    return logits.log_softmax(-1).gather(-1, _LABELS.expand(3, -1, -1, 1))[..., 0].numpy()


def test_whole_sequences_have_the_likelihood_of_a_mixture(scores: np.ndarray) -> None:
    """The product over tokens is the prior's mean of the experts' products: a sum that telescopes only without a leak."""
    prior = np.log([0.7, 0.2, 0.1])
    whole = np.logaddexp.reduce(prior[:, None] + scores.sum(axis=2), axis=0)
    np.testing.assert_allclose(mixture.mixed(scores, prior).sum(axis=1), whole, rtol=1e-12)


def test_long_sequences_do_not_underflow() -> None:
    scores = np.full((2, 1, 5000), -10.0)
    scores[1] -= 1
    found = mixture.mixed(scores, mixture.uniform_prior(2))
    assert np.isfinite(found).all()
    assert found[0, -1] == pytest.approx(-10)


def test_cached_prior_is_that_of_the_published_code(scores: np.ndarray) -> None:
    # In probabilities, as written: 0.3^(k+1) times the prior, and the posterior of the whole sequence.
    prior = np.ones(3)
    likelihoods = np.exp(scores.sum(axis=2))
    for k in range(4):
        posterior = prior * likelihoods[:, k] / (prior * likelihoods[:, k]).sum()
        prior = 0.3 ** (k + 1) * prior + posterior
    found = np.exp(mixture.cached_prior(scores))
    np.testing.assert_allclose(found, prior / prior.sum(), rtol=1e-12)


def test_simple_average_is_a_geometric_mean(logits: torch.Tensor, scores: np.ndarray) -> None:
    whole = logits.log_softmax(-1).mean(0)
    assert (whole.exp().sum(-1) < 1).all()
    expected = whole.gather(-1, _LABELS)[..., 0].numpy()
    np.testing.assert_allclose(mixture.averaged(scores), expected, rtol=1e-12)


@pytest.mark.parametrize("text", ["", "[]", '{"models": {}, "experts": [{}]}'])
def test_damaged_plan_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(text)
    for command in ("score", "mix"):
        assert cli.main(["experts", command, str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert f"{tmp_path}/plan.json: no plan that this release wrote (" in said
        assert f"pier-megatron experts plan FILE --output {tmp_path}" in said
