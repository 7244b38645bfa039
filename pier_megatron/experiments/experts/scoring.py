"""Runs a training script to write what Megatron's evaluation sees and forgets: the loss of every token.

``torchrun ... -m pier_megatron.experiments.experts.scoring [--device cuda|cpu] SCRIPT ARGUMENTS...``: each evaluation writes
one file, the first to the first path in the variable :data:`VARIABLE`, and so on.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pier_megatron import launcher
from pier_megatron.errors import PierConfigError
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.seam import Seam

VARIABLE = "PIER_MEGATRON_SCORES"
LOSSES, LABELS = "losses", "labels"
"""Arrays of a file, ``[sequences, tokens]``: negative log-likelihoods in nats, float32, and the tokens that they are of."""

# Letters of layers in --pipeline-model-parallel-layout.
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def write_scores[**P, R](evaluate: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Writes the losses of an evaluation to the next path of :data:`VARIABLE`."""
    path, _, others = os.environ[VARIABLE].partition(os.pathsep)
    if not path:
        return evaluate(*args, **kwargs)
    os.environ[VARIABLE] = others
    return _write_scores(Path(path), evaluate, *args, **kwargs)


def layout_of_whole_stages(layout: str, ranks: int) -> str:
    """A ``--pipeline-model-parallel-layout`` for as many ranks, each with the layers of consecutive virtual stages."""
    parser = versions.require("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout")
    stages = parser.parse_str_to_list(layout)
    letters = ["".join(_LETTERS[layer.name] for layer in stage) for stage in stages]
    virtual = len(stages) // ranks
    return "|".join("".join(letters[first : first + virtual]) for first in range(0, len(stages), virtual))


def _write_scores[**P, R](path: Path, evaluate: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    replicas = versions.megatron_args().data_parallel_size * versions.megatron_args().context_parallel_size
    if replicas != 1:
        # Each replica would see others of the sequences, or another part of each.
        raise PierConfigError(f"scoring runs on one replica of the model, and there are {replicas}: start fewer ranks.")
    given = versions.given(evaluate, args, kwargs)
    chunk = versions.require("megatron.core.utils", "unwrap_model")(given["model"])[-1]
    losses: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []

    def record(_module: object, _inputs: object, given: dict[str, torch.Tensor], output: torch.Tensor) -> None:
        # The last pipeline stage has them, whole on all of its tensor-parallel ranks.
        losses.append(output.detach().float().cpu())
        labels.append(given["labels"].cpu())

    hook = chunk.register_forward_hook(record, with_kwargs=True) if chunk.post_process else None
    try:
        result = evaluate(*args, **kwargs)
    finally:
        if hook is not None:
            hook.remove()
    if losses and len(losses) != given["eval_iters"]:
        # Megatron counts the batches of the text, and begins the text again when they are used up.
        raise PierConfigError(
            f"{path.stem}: Megatron read {len(losses)} micro-batches of a text that has {given['eval_iters']}: it would "
            "score sequences twice or not at all. Scoring needs one micro-batch in a batch: leave out --eval-global-batch-size "
            "and --eval-micro-batch-size."
        )
    parallel_state = versions.require("megatron.core", "parallel_state")
    if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Complete or not there.
        unfinished = path.with_name(f".{path.name}")
        arrays: dict[str, Any] = {LOSSES: torch.cat(losses).numpy(), LABELS: torch.cat(labels).numpy()}
        np.savez(unfinished, **arrays)
        unfinished.rename(path)
    return result


if __name__ == "__main__":
    launcher.main(sys.argv[1:], [Seam("megatron.training.training", "evaluate", write_scores)])
