"""A mixture of experts that know nothing of each other, as one Hugging Face model.

``export_mixture.py`` writes this file into the folder of the weights. It needs PyTorch and transformers, and
nothing of the plugin::

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

After the tokens before ``t`` of a sequence, expert ``e`` has the weight ``w_e(t) = softmax_e(log prior_e + sum_{s<t} log
p_e(x_s))``. The model's logits are the logarithm of ``p(x_t) = sum_e w_e(t) p_e(x_t)``, normalised, in float32.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class MixtureConfig(PretrainedConfig):
    """Configuration of a mixture.

    Attributes:
        experts: Configurations of the experts, as their ``to_dict()`` gives them.
        names: Names of the experts.
        log_prior: Logarithms of the experts' weights before the first token of a sequence; they are normalised.
        vocab_size: Size of the largest vocabulary.
        max_position_embeddings: Length of the longest sequence that all experts take.
        num_hidden_layers: Layers of the deepest expert.
    """

    model_type = "pier_mixture"

    def __init__(
        self,
        experts: Sequence[dict[str, object]] = (),
        names: Sequence[str] = (),
        log_prior: Sequence[float] = (),
        vocab_size: int = 0,
        max_position_embeddings: int = 0,
        num_hidden_layers: int = 0,
        **more: object,
    ) -> None:
        self.experts = list(experts)
        self.names = list(names)
        self.log_prior = list(log_prior)
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.num_hidden_layers = num_hidden_layers
        # Each expert ties its own embeddings or does not.
        super().__init__(**{"tie_word_embeddings": False, **more})


@dataclasses.dataclass
class MixtureOutput(CausalLMOutputWithPast):
    """Output of a mixture.

    Attributes:
        weights: Weights of the experts in the prediction after each token, ``[batch, tokens, experts]``.
    """

    weights: Tensor | None = None


class MixtureCache:
    """Memory of a mixture between calls: what each expert keeps, and what it takes to weigh it.

    Attributes:
        experts: Caches of the experts.
        weights: Logarithms of the experts' weights after the last token, ``[experts, batch]``.
        predicted: Log-probabilities of the next token under each expert, ``[batch, vocabulary]`` each.
    """

    is_compileable = False

    def __init__(self, experts: Sequence[object], weights: Tensor, predicted: Sequence[Tensor]) -> None:
        self.update(experts, weights, predicted)

    def update(self, experts: Sequence[object], weights: Tensor, predicted: Sequence[Tensor]) -> None:
        """Continues with what is after the next tokens; the experts' caches have been changed in place."""
        self.experts, self.weights, self.predicted = list(experts), weights, list(predicted)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Counts the tokens so far."""
        length: int = self.experts[0].get_seq_length()  # type: ignore[attr-defined]
        return length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the sequences with which a beam search continues."""
        for expert in self.experts:
            expert.reorder_cache(beam_idx)  # type: ignore[attr-defined]
        self.weights = self.weights[:, beam_idx]
        self.predicted = [of_expert[beam_idx] for of_expert in self.predicted]


class MixtureForCausalLM(PreTrainedModel, GenerationMixin):
    """Causal language model whose next-token probabilities are a mixture of its experts'.

    Every expert runs on every token. A sequence begins with the prior; padding, on either side, does not count.
    """

    config_class = MixtureConfig
    # Weights of the experts cannot be taken back token by token, which assisted decoding would need.
    _is_stateful = True

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        # Each under a name of its own: in a list, transformers would not look for tied weights.
        for place, of_expert in enumerate(config.experts):
            self.add_module(f"expert_{place}", AutoModelForCausalLM.from_config(AutoConfig.for_model(**of_expert)))
        self.post_init()

    @property
    def experts(self) -> list[PreTrainedModel]:
        """Experts, in the order of the prior."""
        return [self.get_submodule(f"expert_{place}") for place in range(len(self.config.experts))]

    @classmethod
    def of(cls, experts: Sequence[PreTrainedModel], names: Sequence[str], log_prior: Sequence[float]) -> "MixtureForCausalLM":
        """Makes one model of several with the same tokenizer, which share its memory.

        Args:
            experts: Causal language models, of any sizes.
            names: Names of the experts.
            log_prior: Logarithms of the experts' weights before the first token.
        """
        config = MixtureConfig(
            # Folders of the experts do not belong into the model.
            [{**expert.config.to_dict(), "_name_or_path": ""} for expert in experts],
            names,
            log_prior,
            vocab_size=max(expert.config.vocab_size for expert in experts),
            max_position_embeddings=min(expert.config.max_position_embeddings for expert in experts),
            num_hidden_layers=max(expert.config.num_hidden_layers for expert in experts),
            bos_token_id=experts[0].config.bos_token_id,
            eos_token_id=experts[0].config.eos_token_id,
        )
        with torch.device("meta"):
            model = cls(config)
        for place, expert in enumerate(experts):
            setattr(model, f"expert_{place}", expert)
        return model

    def get_input_embeddings(self) -> nn.Module:
        """Embeddings of the first expert."""
        embeddings: nn.Module = self.experts[0].get_input_embeddings()
        return embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MixtureCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **more: object,
    ) -> MixtureOutput:
        """Predicts the next tokens; arguments are those of all causal language models of transformers."""
        cache = past_key_values if isinstance(past_key_values, MixtureCache) else None
        if past_key_values is not None and cache is None and past_key_values.get_seq_length():
            raise ValueError("past_key_values: a mixture accepts only a cache that a mixture returned.")
        use_cache = getattr(self.config, "use_cache", True) if use_cache is None else use_cache
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        is_seen = self._counts(input_ids, attention_mask, cache)
        probabilities, scores, caches, predicted = [], [], [], []
        for place, expert in enumerate(self.experts):
            output = expert(
                input_ids=input_ids,
                attention_mask=attention_mask,
                past_key_values=cache.experts[place] if cache else None,
                use_cache=use_cache,
                **({} if position_ids is None else {"position_ids": position_ids}),
            )
            # An expert may be on another device.
            of_expert = self._log_probabilities(output.logits.to(input_ids.device))
            before = cache.predicted[place][:, None] if cache else of_expert[:, :1]
            of_token = torch.cat([before, of_expert[:, :-1]], dim=1).gather(-1, input_ids[..., None])[..., 0]
            scores.append(torch.where(is_seen, of_token, 0).double())
            probabilities.append(of_expert[:, kept])
            caches.append(output.past_key_values)
            predicted.append(of_expert[:, -1])
        # What a sequence has begun with, and every token since.
        first = cache.weights[..., None] if cache else self._log_prior(input_ids.device)[:, None, None]
        weights = (first + torch.stack(scores).cumsum(-1)).log_softmax(0)
        logits = self._mixed(probabilities, weights[..., kept].float())
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **more)
        if cache:
            cache.update(caches, weights[..., -1], predicted)
        elif use_cache:
            cache = MixtureCache(caches, weights[..., -1], predicted)
        return MixtureOutput(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            weights=weights.exp().float().movedim(0, -1),
        )

    def _counts(self, tokens: Tensor, mask: Tensor | None, cache: MixtureCache | None) -> Tensor:
        """Whether each token says something of the experts: neither it nor the one before it is padding."""
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"attention_mask has {mask.dim()} dimensions: a mixture takes one of [batch, tokens].")
        length = tokens.shape[1]
        past = cache.get_seq_length() if cache else 0
        is_text = tokens.new_ones((len(tokens), past + length)) if mask is None else mask
        is_text = is_text.bool()
        own = is_text[:, -length:]
        # Nothing predicts the first token of a sequence.
        before = is_text[:, -length - 1 : -1] if past else nn.functional.pad(is_text[:, :-1], (1, 0))
        return own & before

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """Log-probabilities over the common vocabulary: an expert gives nothing to tokens that it does not know."""
        missing = self.config.vocab_size - logits.shape[-1]
        return nn.functional.pad(logits.float().log_softmax(-1), (0, missing), value=-math.inf)

    def _log_prior(self, device: torch.device) -> Tensor:
        return torch.tensor(self.config.log_prior, dtype=torch.float64, device=device).log_softmax(0)

    @staticmethod
    def _mixed(probabilities: Sequence[Tensor], weights: Tensor) -> Tensor:
        """Logarithm of the weighted sum, one expert after the other so that few whole distributions are held at once."""
        mixed = probabilities[0] + weights[0][..., None]
        for of_expert, weight in zip(probabilities[1:], weights[1:], strict=True):
            mixed = torch.logaddexp(mixed, of_expert + weight[..., None])
        return mixed


MixtureConfig.register_for_auto_class()
MixtureForCausalLM.register_for_auto_class("AutoModelForCausalLM")
