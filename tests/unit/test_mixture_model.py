"""A mixture as one Hugging Face model: unlike experts, against the definition from their own likelihoods."""

import argparse
import ast
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import export_mixture
import mixture_model
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts import mixture
from pier_megatron.experiments.experts.planned import Expert, Model, Plan
from pier_megatron.integration.checkpoint.stored_model import StoredModel

pytestmark = pytest.mark.slow

_PRIOR = [0.5, 0.3, 0.2]
_TOKENS = 12
# For float32 sums in another order: a tenth of the tolerance for Megatron's and Hugging Face's likelihoods.
_CLOSE = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def experts() -> list[PreTrainedModel]:
    """Unlike in size, length, vocabulary and architecture, with large weights so that the posterior moves."""
    torch.manual_seed(1)
    common: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
    gpt2 = [
        GPT2Config(vocab_size=vocabulary, n_embd=hidden, n_layer=layers, n_head=2, n_positions=positions, **common)
        for vocabulary, hidden, layers, positions in ((40, 16, 2, 64), (44, 24, 1, 32))
    ]
    llama = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=48,
        **common,
    )
    return [GPT2LMHeadModel(gpt2[0]).eval(), GPT2LMHeadModel(gpt2[1]).eval(), LlamaForCausalLM(llama).eval()]


@pytest.fixture(scope="module")
def folder(experts: list[PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = tmp_path_factory.mktemp("mixture") / "three-experts"
    mixture_model.MixtureForCausalLM.of(experts, ["a", "b", "c"], np.log(_PRIOR).tolist()).save_pretrained(saved)
    return saved


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """Loads the model like a user, with the code in the folder of the weights."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(loaded) is not mixture_model.MixtureForCausalLM
    return loaded


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    # Without token 0, which pads.
    return torch.randint(1, 40, (3, _TOKENS), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def likelihoods(logits: Tensor, tokens: Tensor) -> np.ndarray:
    """Log-likelihood of each token after the first one, under the prediction before it."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].double().numpy()


def test_likelihood_is_that_of_experts_mix(model: PreTrainedModel, experts: list[PreTrainedModel], tokens: Tensor) -> None:
    scores = np.stack([likelihoods(expert(tokens).logits, tokens) for expert in experts])
    logits = model(tokens).logits
    np.testing.assert_allclose(likelihoods(logits, tokens), mixture.mixed(scores, np.log(_PRIOR)), **_CLOSE)
    # Also for the tokens that only one expert knows, which the others exclude.
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(3, _TOKENS), **_CLOSE)
    assert logits.shape[-1] == 44
    assert logits.dtype == torch.float32


def test_cache_changes_nothing(model: PreTrainedModel, tokens: Tensor) -> None:
    cache, found = None, []
    for piece in tokens.split([5, 1, 6], dim=1):
        output = model(piece, past_key_values=cache)
        # As in other models, the cache is changed in place: its holder can continue.
        cache = cache or output.past_key_values
        assert output.past_key_values is cache
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), model(tokens).logits, **_CLOSE)


@pytest.mark.parametrize("beams", [1, 3])
def test_text_is_generated_from_the_mixture(model: PreTrainedModel, tokens: Tensor, beams: int) -> None:
    def generated(use_cache: bool) -> Tensor:
        mask = torch.ones_like(tokens)
        found: Tensor = model.generate(
            tokens, attention_mask=mask, max_new_tokens=8, do_sample=False, num_beams=beams, use_cache=use_cache, pad_token_id=0
        )
        return found

    assert torch.equal(generated(use_cache=True), generated(use_cache=False))
    if beams == 1:
        expected = tokens
        for _ in range(8):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
        assert torch.equal(generated(use_cache=True), expected)


@pytest.mark.parametrize("use_cache", [True, False])
def test_padding_on_the_left_does_not_count(model: PreTrainedModel, tokens: Tensor, use_cache: bool) -> None:
    """Prompts of three lengths in one batch go on as each does alone."""
    lengths = (_TOKENS, 7, 1)
    batch, mask = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        batch[row, -length:], mask[row, -length:] = tokens[row, :length], 1
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
    together = model.generate(batch, attention_mask=mask, **options)
    for row, length in enumerate(lengths):
        alone = model.generate(tokens[row : row + 1, :length], attention_mask=torch.ones(1, length), **options)
        assert torch.equal(together[row, -8:], alone[0, -8:])


def test_padding_on_the_right_does_not_count(model: PreTrainedModel, tokens: Tensor) -> None:
    mask = torch.ones_like(tokens)
    mask[:, 7:] = 0
    padded = model(torch.where(mask.bool(), tokens, 0), attention_mask=mask)
    torch.testing.assert_close(padded.logits[:, :7], model(tokens[:, :7]).logits, **_CLOSE)
    # What comes behind it, if anything, is weighed by the text alone.
    torch.testing.assert_close(padded.weights[:, -1], model(tokens[:, :7]).weights[:, -1], **_CLOSE)


def test_folder_has_every_weight_once(folder: Path, experts: list[PreTrainedModel]) -> None:
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info.values())
    state = loaded.state_dict()
    for place, expert in enumerate(experts):
        for key, tensor in expert.state_dict().items():
            assert torch.equal(state[f"expert_{place}.{key}"], tensor)
    # Embeddings that were tied are: trained on, they stay one.
    assert loaded.expert_0.lm_head.weight is loaded.expert_0.transformer.wte.weight
    assert loaded.num_parameters() == sum(expert.num_parameters() for expert in experts)


def test_weights_keep_their_type(experts: list[PreTrainedModel], tokens: Tensor, tmp_path: Path) -> None:
    halves = [type(expert)(expert.config).to(torch.bfloat16).eval() for expert in experts[:2]]
    made = mixture_model.MixtureForCausalLM.of(halves, ["a", "b"], [0.0, 0.0])
    made.save_pretrained(tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float32)
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    scores = np.stack([likelihoods(half(tokens).logits.float(), tokens) for half in halves])
    found = likelihoods(loaded(tokens).logits, tokens)
    np.testing.assert_allclose(found, mixture.mixed(scores, np.log([0.5, 0.5])), **_CLOSE)


def test_what_cannot_be_is_refused(model: PreTrainedModel, experts: list[PreTrainedModel], tokens: Tensor) -> None:
    of_another = experts[0](tokens, use_cache=True).past_key_values
    assert isinstance(of_another, DynamicCache)
    with pytest.raises(ValueError, match="only a cache that a mixture returned"):
        model(tokens, past_key_values=of_another)
    with pytest.raises(ValueError, match="attention_mask has 4 dimensions"):
        model(tokens, attention_mask=torch.ones(3, 1, _TOKENS, _TOKENS))
    # It would take back tokens, which a mixture has weighed.
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(tokens[:1], attention_mask=torch.ones(1, _TOKENS), max_new_tokens=4, prompt_lookup_num_tokens=2)


def test_code_beside_the_weights_needs_nothing_of_the_plugin(folder: Path) -> None:
    module = Path(mixture_model.__file__)
    beside = (folder / module.name).read_text()
    assert beside == module.read_text()
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else name.name).partition(".")[0]
        for node in ast.walk(ast.parse(beside))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported == {"collections", "dataclasses", "math", "torch", "transformers"}


def test_server_finds_the_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``transformers serve`` looks for the architecture that the configuration names in transformers."""
    asked: list[list[str]] = []
    monkeypatch.setattr("transformers.cli.transformers.main", lambda: asked.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["serve_mixture.py", str(folder), "--port", "8001"])
    # Like the server's import: the module replaces itself after its first import.
    transformers = sys.modules["transformers"]
    monkeypatch.setattr(transformers, "MixtureForCausalLM", None, raising=False)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "downstream" / "serve_mixture.py"), run_name="__main__")
    assert asked == [["serve", "--trust-remote-code", str(folder), "--port", "8001"]]
    (architecture,) = AutoConfig.from_pretrained(folder, trust_remote_code=True).architectures
    assert isinstance(getattr(transformers, architecture).from_pretrained(folder, trust_remote_code=True), PreTrainedModel)


# What the script refuses.


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    experts = [Expert(f"MHo-IHo/{name}", (name,), "one", 8, 1e9, 1e9, None) for name in ("law", "code")]
    made = Plan(tmp_path, "x.py", "cpu", 1, "one", {"law": "law"}, ("law",), {"one": Model((), None, 1, 1)}, tuple(experts))
    made.write()
    return made


def test_experts_of_a_mixture_share_a_tokenizer(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(path: Path) -> StoredModel:
        vocabulary = 257 if path.parent.name == "law" else 300
        arguments = {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "vocab_size": vocabulary}
        return StoredModel(path, argparse.Namespace(**arguments), 8, None)

    monkeypatch.setattr(StoredModel, "find", stored)
    with pytest.raises(PierConfigError, match="the same tokenizer: MHo-IHo/law: NullTokenizer None 257; MHo-IHo/code"):
        export_mixture._check_same_tokens(plan, plan.experts)
    export_mixture._check_same_tokens(plan, plan.experts[:1])


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]
    for name in ("mixture_model", "export_mixture"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PierConfigError, match=r"needs transformers, not installed: pip install .*\[downstream\]"):
        importlib.import_module("export_mixture").run(argparse.Namespace(folder=tmp_path))
