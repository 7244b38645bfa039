"""Megatron's GPT as Hugging Face's GPT-2: which models are one, and where their weights go.

Knows the names and the layout of what Megatron stores, but needs nothing of its code.
"""

import argparse
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pier_megatron.errors import PierConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GPT2Config, GPT2LMHeadModel


_ELSEWHERE = (
    "NVIDIA's Megatron-Bridge converts models of other architectures, such as Llama: examples/bridge/to_hugging_face.py and "
    "docs/megatron-bridge.md."
)

# What changes the function that a model computes: Megatron's flag, the argument behind it, its value in GPT-2.
_GPT2_ARCHITECTURE: tuple[tuple[str, str, str | bool | None], ...] = (
    ("--position-embedding-type", "position_embedding_type", "learned_absolute"),
    ("--normalization", "normalization", "LayerNorm"),
    ("--apply-layernorm-1p", "layernorm_zero_centered_gamma", False),
    ("--apply-residual-connection-post-layernorm", "apply_residual_connection_post_layernorm", False),
    ("--disable-bias-linear", "add_bias_linear", True),
    ("--swiglu", "swiglu", False),
    ("--squared-relu", "squared_relu", False),
    ("--quick-geglu", "quick_geglu", False),
    ("--activation-func-clamp-value", "activation_func_clamp_value", None),
    ("--use-te-activation-func", "use_te_activation_func", False),
    ("--use-transformer-engine-op-fuser", "use_transformer_engine_op_fuser", False),
    ("--group-query-attention", "group_query_attention", False),
    ("--multi-latent-attention", "multi_latent_attention", False),
    ("--experimental-attention-variant", "experimental_attention_variant", None),
    ("--attention-output-gate", "attention_output_gate", False),
    ("--window-size", "window_size", None),
    ("--softmax-type", "softmax_type", "vanilla"),
    ("--qk-layernorm", "qk_layernorm", False),
    ("--qk-l2-norm", "qk_l2_norm", False),
    ("--num-experts", "num_experts", None),
    ("--mtp-num-layers", "mtp_num_layers", None),
    ("--use-mup", "use_mup", False),
    ("--heterogeneous-layers-config-path", "heterogeneous_layers_config_path", None),
    ("--hybrid-layer-pattern", "hybrid_layer_pattern", None),
    ("--spec", "spec", None),
)

_NAMES = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}
# A layer norm is stored with the linear layer that it feeds, as Transformer Engine fuses them, or apart.
_NAMES_IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "ln_1.weight",
    "self_attention.linear_qkv.layer_norm_bias": "ln_1.bias",
    "input_layernorm.weight": "ln_1.weight",
    "input_layernorm.bias": "ln_1.bias",
    "self_attention.linear_qkv.weight": "attn.c_attn.weight",
    "self_attention.linear_qkv.bias": "attn.c_attn.bias",
    "self_attention.linear_proj.weight": "attn.c_proj.weight",
    "self_attention.linear_proj.bias": "attn.c_proj.bias",
    "mlp.linear_fc1.layer_norm_weight": "ln_2.weight",
    "mlp.linear_fc1.layer_norm_bias": "ln_2.bias",
    "pre_mlp_layernorm.weight": "ln_2.weight",
    "pre_mlp_layernorm.bias": "ln_2.bias",
    "mlp.linear_fc1.weight": "mlp.c_fc.weight",
    "mlp.linear_fc1.bias": "mlp.c_fc.bias",
    "mlp.linear_fc2.weight": "mlp.c_proj.weight",
    "mlp.linear_fc2.bias": "mlp.c_proj.bias",
}
# Layers that are all alike are stored as one tensor, with the layers in front; others each under its number.
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")


def configuration(arguments: argparse.Namespace) -> "GPT2Config":
    """Describes a model to Hugging Face.

    Args:
        arguments: Megatron's, as stored with the model.

    Raises:
        PierConfigError: If the model is not a GPT-2.
    """
    from transformers import GPT2Config

    for flag, name, expected in _GPT2_ARCHITECTURE:
        # Releases before a flag computed what it computes by default; False and None both mean that it was not given.
        value = getattr(arguments, name, expected)
        if (value or None) != (expected or None):
            raise PierConfigError(
                f"{flag}: the model was trained with {name} = {value}, but GPT-2 computes what Megatron does with {expected}. "
                f"{_ELSEWHERE}"
            )
    hidden, heads = arguments.hidden_size, arguments.num_attention_heads
    if arguments.kv_channels * heads != hidden:
        raise PierConfigError(
            f"--kv-channels {arguments.kv_channels}: {heads} heads have {heads * arguments.kv_channels} channels, but those of "
            f"a GPT-2 divide --hidden-size {hidden}. {_ELSEWHERE}"
        )
    return GPT2Config(
        # With Megatron's padding, which takes part in its softmax: log-likelihoods stay those that were trained.
        vocab_size=arguments.padded_vocab_size,
        n_positions=arguments.max_position_embeddings,
        n_embd=hidden,
        n_layer=arguments.num_layers,
        n_head=heads,
        n_inner=arguments.ffn_hidden_size,
        # Megatron's fusion of bias and GELU computes the tanh approximation, its plain path the exact function.
        activation_function="gelu_new" if arguments.bias_gelu_fusion else "gelu",
        resid_pdrop=arguments.hidden_dropout,
        embd_pdrop=arguments.hidden_dropout,
        attn_pdrop=arguments.attention_dropout,
        layer_norm_epsilon=arguments.layernorm_epsilon,
        initializer_range=arguments.init_method_std,
        tie_word_embeddings=not arguments.untie_embeddings_and_output_weights,
        # Which tokens are special is the tokenizer's business.
        bos_token_id=None,
        eos_token_id=None,
    )


def build(config: "GPT2Config", weights: Mapping[str, "Tensor"]) -> "GPT2LMHeadModel":
    """Builds a model around Megatron's weights, in their type and, where the layouts allow it, in their memory.

    Args:
        config: Configuration, see :func:`configuration`.
        weights: Whole tensors by their names in a ``torch_dist`` checkpoint.

    Raises:
        PierConfigError: If these are not the weights of such a model.
    """
    import torch
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    state = _renamed(weights, config.n_head)
    if config.tie_word_embeddings and "transformer.wte.weight" in state:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise PierConfigError(
            f"the checkpoint's weights are not those of the model that its arguments describe: {error}"
        ) from error
    model.tie_weights()
    return model


def _renamed(weights: Mapping[str, "Tensor"], heads: int) -> dict[str, "Tensor"]:
    state, unknown = {}, []
    for key, tensor in weights.items():
        in_layer = _LAYER.fullmatch(key)
        if key in _NAMES:
            state[_NAMES[key]] = tensor
        elif in_layer and in_layer[2] in _NAMES_IN_LAYER:
            name = _NAMES_IN_LAYER[in_layer[2]]
            layers = {int(in_layer[1]): tensor} if in_layer[1] else dict(enumerate(tensor))
            for layer, own in layers.items():
                state[f"transformer.h.{layer}.{name}"] = _laid_out(name, own, heads)
        else:
            unknown.append(key)
    if unknown:
        raise PierConfigError(
            f"the checkpoint holds weights for which GPT-2 has no place: {', '.join(sorted(unknown))}. {_ELSEWHERE}"
        )
    return state


def _laid_out(name: str, tensor: "Tensor", heads: int) -> "Tensor":
    if name.startswith("attn.c_attn"):
        tensor = _with_heads_inside(tensor, heads)
    # GPT-2's linear layers multiply from the other side.
    return tensor.T.contiguous() if tensor.dim() == 2 else tensor


def _with_heads_inside(qkv: "Tensor", heads: int) -> "Tensor":
    """Turns rows of ``[head, (query, key, value), channel]`` into rows of ``[(query, key, value), head, channel]``."""
    interleaved: Tensor = qkv.unflatten(0, (heads, 3, -1))
    return interleaved.transpose(0, 1).flatten(0, 2)
