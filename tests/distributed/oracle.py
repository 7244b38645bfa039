"""Trains with ``pier_megatron.reference`` on the samples that a distributed run recorded."""

import json
import os
from collections.abc import Collection, Sequence

import gpt_reference
import muon_reference
import pytest
import torch
from launch import REPOSITORY, Recorded
from torch import Tensor

from pier_megatron import PierConfig, reference

LEARNING_RATE, ADAM_EPS, WEIGHT_DECAY, CLIP_GRAD = 2e-3, 1e-4, 0.01, 1.0
_GOLDEN = REPOSITORY / "tests" / "golden"


def train(
    recorded: Recorded,
    config: PierConfig,
    skipped: Collection[int] = (),
    layers: Sequence[Sequence[int]] | None = None,
    muon_blocks: int = 1,
) -> dict[str, Tensor]:
    """Trains a model on the samples of a run.

    Args:
        recorded: The run.
        config: Its own.
        skipped: Iterations in which nobody trains.
        layers: Layers that each micro-batch of a group's step passes, in order, replica by replica; the first samples of a rank
            must be those of its first stage then, in order.
        muon_blocks: Number of parts in which tensor-parallel ranks orthogonalize a matrix, with Muon inside.

    Returns:
        The weights after the last iteration, float64, by their names in the checkpoint.
    """
    initial = gpt_reference.trainable(recorded.weights("initial"))
    names = list(initial)
    samples = [_samples_of_group(recorded, group, layers and len(layers)) for group in range(config.groups)]

    def gradient(parameters: Sequence[Tensor], group: int, iteration: int) -> Sequence[Tensor]:
        weights = {name: parameter.detach().requires_grad_() for name, parameter in zip(names, parameters, strict=True)}
        batches = samples[group][iteration]
        paths = zip(batches, layers or [None] * len(batches), strict=True)
        losses = [gpt_reference.loss(weights, *batch, path) for batch, path in paths]
        return torch.autograd.grad(torch.stack(losses).mean(), list(weights.values()))

    def adamw(parameters: list[Tensor], names: list[str]) -> torch.optim.Optimizer:
        # Like Megatron: no weight decay on biases and norms.
        decays = [not name.endswith(("bias", "norm_weight", "layernorm.weight")) for name in names]
        groups = [
            {"params": [p for p, d in zip(parameters, decays, strict=True) if d is decay], "weight_decay": weight_decay}
            for decay, weight_decay in ((True, WEIGHT_DECAY), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=ADAM_EPS)

    inner_optimizer = {
        "adam": lambda parameters: adamw(parameters, names),
        "muon": muon_reference.muon(names, adamw, LEARNING_RATE, WEIGHT_DECAY, muon_blocks),
    }[config.inner_optimizer]
    block_of = gpt_reference.trainable(recorded.weights("matrices")) if config.outer_rule == "muon" else {}
    masks = None
    if config.fragments > 1:
        fragment_of = gpt_reference.trainable(recorded.weights("fragments"))
        masks = [[fragment_of[name] == fragment for name in names] for fragment in range(config.fragments)]
    final = reference.train(
        list(initial.values()),
        gradient,
        inner_optimizer,
        config,
        CLIP_GRAD,
        masks,
        skipped=skipped,
        matrices=lambda index, tensor: _blocks(tensor, block_of[names[index]]) if block_of else [],
    )
    return dict(zip(names, final, strict=True))


def blocks_of(recorded: Recorded) -> dict[str, list[Tensor]]:
    """What the ranks of a run took for matrices, by the name of a parameter: the numbers of the blocks, as they lie in it."""
    return {name: _blocks(numbers, numbers) for name, numbers in gpt_reference.trainable(recorded.weights("matrices")).items()}


def _blocks(tensor: Tensor, numbers: Tensor) -> list[Tensor]:
    """The parts of a tensor, or of a stack of matrices, in which ``numbers`` are the same, each a view of a rectangle."""
    found = []
    for number in numbers.unique().tolist():
        if number < 0:
            continue
        places = (numbers == number).nonzero()
        low, high = places.amin(0), places.amax(0) + 1
        view = tensor[tuple(slice(*ends) for ends in zip(low.tolist(), high.tolist(), strict=True))]
        assert view.numel() == len(places)
        found.append(view[(0,) * (view.dim() - 2)])
    return found


def check_golden(name: str, run: Recorded, argv: str) -> None:
    """Compares losses with ``tests/golden``; ``UPDATE_GOLDEN=1`` writes them, which belongs into the changelog."""
    path, arguments = _GOLDEN / f"{name}.json", " ".join(argv.split())
    losses = {str(iteration): loss for iteration, loss in sorted(run.losses.items())}
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps({"arguments": arguments, "losses": losses}, indent=1) + "\n")
    golden = json.loads(path.read_text())
    assert golden["arguments"] == arguments
    # Another processor orders its sums differently.
    assert losses == pytest.approx(golden["losses"], rel=2e-4)


def _samples_of_group(recorded: Recorded, group: int, count: int | None) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """Micro-batches by iteration, those of each data-parallel rank of the group once; if asked, ``count`` in a step."""
    # The first rank of a pipeline takes micro-batches in the order of the data, whatever their routes.
    in_reverse = reversed(recorded.of_group(group))
    found = {rank["data_parallel_rank"]: rank["samples"] for rank in in_reverse if "samples" in rank}
    ranks = dict(sorted(found.items()))
    first = None if count is None else count // len(ranks)
    return {
        iteration: [batch for samples in ranks.values() for batch in samples[iteration][:first]]
        for iteration in next(iter(ranks.values()))
    }


def largest_error(distributed: dict[str, object], single: dict[str, Tensor]) -> float:
    """Largest difference of any weight."""
    return max((gpt_reference.trainable(distributed)[name] - weight).abs().max().item() for name, weight in single.items())
