"""A plain GPT on bytes for many groups at once in one process: the first dimension of every parameter is the group."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pier_megatron.commands.demo import corpus

SEQUENCE = 64
_HEAD = 16
_SPREAD = 0.02

Parameters = dict[str, Tensor]
"""Tensors by name, each of shape ``[groups, ...]`` in FP32."""

MATRIX = ".matrix"
"""What the names of those end with that are neither embeddings nor vectors: Muon's."""

VECTORS = (".bias", ".scale")
"""What the names of those end with that do not decay."""


def initial(layers: int, width: int, seed: int) -> Parameters:
    """Parameters of one group, drawn as Megatron does: as small towards the output as there are layers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        # Drawn on the CPU, so that every device begins with the same.
        drawn = torch.randn(1, *shape, generator=generator, device="cpu") * (_SPREAD * scale)
        return drawn.to(torch.get_default_device())

    parameters = {"tokens": normal(corpus.VOCABULARY, width), "positions": normal(SEQUENCE, width)}
    towards_output = 1 / math.sqrt(2 * layers)
    for layer in range(layers):
        for name, rows, columns, scale in (
            *((name, width, width, 1.0) for name in ("query", "key", "value")),
            ("projection", width, width, towards_output),
            ("up", 4 * width, width, 1.0),
            ("down", width, 4 * width, towards_output),
        ):
            parameters[f"{layer}.{name}{MATRIX}"] = normal(rows, columns, scale=scale)
            parameters[f"{layer}.{name}.bias"] = torch.zeros(1, rows)
        for norm in ("norm1", "norm2"):
            parameters |= _norm(f"{layer}.{norm}", width)
    return parameters | _norm("norm", width)


def _norm(name: str, width: int) -> Parameters:
    return {f"{name}.scale": torch.ones(1, width), f"{name}.bias": torch.zeros(1, width)}


def losses(
    parameters: Parameters,
    tokens: Tensor,
    layers: Sequence[int] | None = None,
    feed_forward: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """Mean loss of each group in nats per byte, shape ``[groups]``.

    Args:
        parameters: Parameters of all groups.
        tokens: int64 of shape ``[groups, sequences, SEQUENCE + 1]``.
        layers: Layers that are passed, in order; by default, all.
        feed_forward: What takes the place of the feed-forward part of a layer, given the layer and its input of shape
            ``[groups, tokens, width]``.
    """
    groups, sequences, _ = tokens.shape
    embedding = parameters["tokens"]
    width = embedding.shape[-1]
    offsets = torch.arange(groups).view(-1, 1, 1) * corpus.VOCABULARY
    x = functional.embedding(tokens[..., :-1] + offsets, embedding.reshape(-1, width)) + parameters["positions"].unsqueeze(1)
    x = x.reshape(groups, -1, width)

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.baddbmm(parameters[f"{name}.bias"].unsqueeze(1), x, parameters[name + MATRIX].mT)

    def norm(name: str, x: Tensor) -> Tensor:
        bias, scale = (parameters[f"{name}.{which}"].unsqueeze(1) for which in ("bias", "scale"))
        return torch.addcmul(bias, functional.layer_norm(x, (width,)), scale)

    def heads(x: Tensor) -> Tensor:
        return x.view(groups * sequences, SEQUENCE, -1, _HEAD).transpose(1, 2)

    def up_and_down(layer: int, x: Tensor) -> Tensor:
        return linear(f"{layer}.down", functional.gelu(linear(f"{layer}.up", x), approximate="tanh"))

    feed_forward = feed_forward or up_and_down
    for layer in range(sum(name.endswith("query" + MATRIX) for name in parameters)) if layers is None else layers:
        normed = norm(f"{layer}.norm1", x)
        query, key, value = (heads(linear(f"{layer}.{name}", normed)) for name in ("query", "key", "value"))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(f"{layer}.projection", mixed.transpose(1, 2).reshape(groups, -1, width))
        x = x + feed_forward(layer, norm(f"{layer}.norm2", x))
    logits = torch.bmm(norm("norm", x), embedding.mT)
    wanted = tokens[..., 1:].reshape(-1)
    return functional.cross_entropy(logits.view(-1, corpus.VOCABULARY), wanted, reduction="none").view(groups, -1).mean(1)


class Text:
    """The study's text.

    Attributes:
        validation: What is evaluated on, always the same; int64 of shape ``[1, sequences, SEQUENCE + 1]``.
    """

    def __init__(self, folder: Path) -> None:
        """Opens what ``text.data_arguments`` has written."""
        self._train = np.fromfile(folder / "train.bin", dtype=np.uint16)
        held_out = np.fromfile(folder / "excerpt.bin", dtype=np.uint16)
        pieces = np.lib.stride_tricks.sliding_window_view(held_out, SEQUENCE + 1)[::SEQUENCE]
        self.validation = _tensor(pieces.astype(np.int64)).unsqueeze(0)

    def batch(self, generator: np.random.Generator, sequences: int) -> Tensor:
        """Sequences drawn from anywhere; int64 of shape ``[sequences, SEQUENCE + 1]``."""
        at = generator.integers(0, len(self._train) - SEQUENCE - 1, sequences)
        return _tensor(self._train[at[:, None] + np.arange(SEQUENCE + 1)].astype(np.int64))


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(torch.get_default_device())
