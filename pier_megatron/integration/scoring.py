"""Writes what Megatron's evaluation sees and forgets: the loss of every token.

With the variable :data:`VARIABLE` set, as ``pier-megatron experts score`` does, each evaluation writes one file: the first to
the first path in it, and so on.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pier_megatron.errors import PierConfigError
from pier_megatron.integration import versions

VARIABLE = "PIER_MEGATRON_SCORES"
LOSSES, LABELS = "losses", "labels"
"""Arrays of a file, ``[sequences, tokens]``: negative log-likelihoods in nats, float32, and the tokens that they are of."""

_TRAINING = "megatron.training.training"


def install() -> None:
    """Hooks into evaluation."""
    paths = iter(map(Path, os.environ[VARIABLE].split(os.pathsep)))

    def scored(evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path = next(paths, None)
        if path is None:
            return evaluate(*args, **kwargs)
        return _write_scores(path, evaluate, *args, **kwargs)

    versions.wrap(_TRAINING, "evaluate", scored)


def _write_scores(path: Path, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    replicas = versions.megatron_args().data_parallel_size * versions.megatron_args().context_parallel_size
    if replicas != 1:
        # Each replica would see others of the sequences, or another part of each.
        raise PierConfigError(f"scoring runs on one replica of the model, and there are {replicas}: start fewer ranks.")
    chunk = versions.require("megatron.core.utils", "unwrap_model")(versions.given(evaluate, args, kwargs)["model"])[-1]
    losses: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []

    def record(_module: Any, _inputs: Any, given: dict[str, Any], output: torch.Tensor) -> None:
        # Of the last pipeline stage, and whole on all of its tensor-parallel ranks.
        losses.append(output.detach().float().cpu())
        labels.append(given["labels"].cpu())

    hook = chunk.register_forward_hook(record, with_kwargs=True) if chunk.post_process else None
    try:
        result = evaluate(*args, **kwargs)
    finally:
        if hook is not None:
            hook.remove()
    parallel_state = versions.require("megatron.core", "parallel_state")
    if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Complete or not there.
        unfinished = path.with_name(f".{path.name}")
        arrays: dict[str, Any] = {LOSSES: torch.cat(losses).numpy(), LABELS: torch.cat(labels).numpy()}
        np.savez(unfinished, **arrays)
        unfinished.rename(path)
    return result
