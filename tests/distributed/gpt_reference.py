"""The GPT that the tests train, written out in plain float64 PyTorch: no Megatron, no parallelism.

Weights are the whole tensors of a ``torch_dist`` checkpoint, by their names there, with the layers stacked in front.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

HEADS = 4


def trainable(weights: dict[str, object]) -> dict[str, Tensor]:
    """The parameters among what a checkpoint holds, as float64."""
    return {name: value.double() for name, value in weights.items() if isinstance(value, Tensor)}


def loss(weights: dict[str, Tensor], tokens: Tensor, labels: Tensor, layers: Sequence[int] | None = None) -> Tensor:
    """Mean cross entropy of a micro-batch.

    Args:
        weights: Weights from :func:`trainable`.
        tokens: Inputs, shape ``[batch, sequence]``.
        labels: The tokens that follow them, same shape.
        layers: Those that the model shall have, in order, from 0; None for all.
    """
    return functional.cross_entropy(logits(weights, tokens, layers).flatten(0, 1), labels.flatten())


def logits(weights: dict[str, Tensor], tokens: Tensor, layers: Sequence[int] | None = None) -> Tensor:
    """Logits ``[batch, sequence, vocabulary]``, of arguments as for :func:`loss`."""
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[tokens] + weights["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for layer in range(len(weights["decoder.layers.self_attention.linear_proj.weight"])) if layers is None else layers:
        own = {
            name.removeprefix("decoder.layers."): stacked[layer]
            for name, stacked in weights.items()
            if name.startswith("decoder.layers.") and ".experts." not in name
        }
        x = x + _attention(own, x)
        if any(".experts." in name for name in weights):
            x = x + _mixture(own, _experts(weights, layer), x)
        else:
            x = x + _linear(own, "mlp.linear_fc2", functional.gelu(_linear(own, "mlp.linear_fc1", _mlp_norm(own, x))))
    x = _norm(x, weights["decoder.final_layernorm.weight"], weights["decoder.final_layernorm.bias"])
    return x @ embedding.T


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias)


def _linear(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]


def _attention(own: dict[str, Tensor], x: Tensor) -> Tensor:
    batch, sequence, hidden = x.shape
    name = "self_attention.linear_qkv"
    qkv = _linear(own, name, _norm(x, own[f"{name}.layer_norm_weight"], own[f"{name}.layer_norm_bias"]))
    # Megatron interleaves query, key and value by head.
    query, key, value = qkv.view(batch, sequence, HEADS, 3, hidden // HEADS).permute(3, 0, 2, 1, 4)
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return _linear(own, "self_attention.linear_proj", attended.transpose(1, 2).reshape(batch, sequence, hidden))


def _mlp_norm(own: dict[str, Tensor], x: Tensor) -> Tensor:
    return _norm(x, own["mlp.linear_fc1.layer_norm_weight"], own["mlp.linear_fc1.layer_norm_bias"])


def _experts(weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = "decoder.layers.mlp.experts.experts."
    return {name.removeprefix(prefix): stacked[layer] for name, stacked in weights.items() if name.startswith(prefix)}


def _mixture(own: dict[str, Tensor], experts: dict[str, Tensor], x: Tensor) -> Tensor:
    """Top-2 of the experts, weighted by the softmax over those two."""
    x = _mlp_norm(own, x)
    logits = _linear(own, "mlp.router", x)
    scores, chosen = torch.topk(logits, k=2, dim=-1)
    shares = torch.zeros_like(logits).scatter(-1, chosen, scores.softmax(-1))
    outputs = []
    for expert in range(len(own["mlp.router.weight"])):
        inner = functional.gelu(x @ experts["linear_fc1.weight"][expert].T + experts["linear_fc1.bias"][expert])
        outputs.append(inner @ experts["linear_fc2.weight"][expert].T + experts["linear_fc2.bias"][expert])
    return sum(shares[..., [expert]] * output for expert, output in enumerate(outputs))
