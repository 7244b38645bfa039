"""124 million parameters on real text in eight groups, next to synchronous AdamW: the study's runs, on the card."""

import contextlib
import sys
import tempfile
import time
from pathlib import Path

import limits
import one_gpu
import torch
from measuring import is_gpu
from table import Row, Rows

NEEDS = ("megatron.core", "emerging_optimizers")
"""Modules without which nothing here is trained: the first writes the text, the second has Muon."""

_METHODS = ("pier", "pier-annealed", "diloco")
_GROUPS, _INTERVAL, _TRIED = 8, 20, 10


def compare() -> Rows:
    """Final losses by method, after as many iterations as there is time for."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "study"))
    from rows import SYNCHRONOUS
    from simulation import Run
    from small_gpt import Text
    from text import data_arguments
    from together import train_together

    model = {"layers": 17, "width": 768, "learning_rate": 6e-4} if is_gpu() else {"layers": 1, "width": 16, "batch": 8}
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        data_arguments(Path(folder))
        stack.enter_context(torch.device(one_gpu.device()))
        text = Text(Path(folder))

        def train(method: str, iterations: int) -> float:
            trained = Run(method, groups=_GROUPS, interval=_INTERVAL, iterations=iterations, **model)
            [outcome] = train_together([trained], text)
            return outcome.final

        begin = time.monotonic()
        train(SYNCHRONOUS, _TRIED)
        per_iteration = (time.monotonic() - begin) / _TRIED
        affordable = 0.8 * limits.left() / (len(_METHODS) + 1) / per_iteration if is_gpu() else 2 * _INTERVAL
        iterations = max(round(affordable / _INTERVAL), 2) * _INTERVAL
        synchronous = train(SYNCHRONOUS, iterations)
        yield Row(f"synchronous AdamW, {iterations} iterations", f"{synchronous:.4f} nats per byte")
        for method in _METHODS:
            loss = train(method, iterations)
            yield Row(f"{method}, {_GROUPS} groups, H = {_INTERVAL}", f"{loss:.4f}, {loss - synchronous:+.4f}")
