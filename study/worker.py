"""Trains rows of the study one after the other through Megatron's own loop, each in processes of its own.

``python worker.py SPECIFICATION``, a JSON list of ``{"name", "groups", "argv", "log", "done"}``.
"""

import functools
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pier_megatron.cpu import emulation
from pier_megatron.cpu.preparations import missing_cpu_flags

emulation.install()

import forked_ranks  # noqa: E402
import torch  # noqa: E402
from megatron.training import get_args  # noqa: E402
from rows import ABLATIONS  # noqa: E402

from pier_megatron import register  # noqa: E402
from pier_megatron.commands.demo import pretrain_bytes  # noqa: E402
from pier_megatron.integration import seams  # noqa: E402
from pier_megatron.megatron_api.seam import install  # noqa: E402
from pier_megatron.schedules import PRESETS  # noqa: E402

# What Megatron imports when it trains, which takes each process seconds; here all share it.
_IMPORTED_ONCE = (
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.libraries",
    "pier_megatron.integration.optimizer",
    "tensorboard",
)


def main() -> None:
    """Trains what the command line says and marks each row that is done with its seconds."""
    specification = json.loads(Path(sys.argv[1]).read_text())
    PRESETS.update(ABLATIONS)
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    install(seams.WITHOUT_PIER)
    register()
    for row in specification:
        begin = time.perf_counter()
        forked_ranks.run(row["groups"], functools.partial(_train, row["argv"], Path(row["log"])))
        seconds = time.perf_counter() - begin
        Path(row["done"]).write_text(f"{seconds}\n")
        print(f"{row['name']}: {seconds:.0f} s", flush=True)


def _with_equal_validations(build_datasets: Callable[[list[int | None]], Any]) -> Callable[..., Any]:
    """Makes all evaluations read the same data: one epoch of it, again and again, not shuffled together."""

    def build(sizes: list[int], vp_stage: int | None = None) -> Any:
        train, validation, test = build_datasets([sizes[0], None, sizes[2]])
        epochs = math.ceil(sizes[1] / len(validation))
        assert len(validation) == get_args().eval_iters * get_args().global_batch_size, "an evaluation is one epoch"
        return train, torch.utils.data.ConcatDataset([validation] * epochs), test

    build.is_distributed = True  # type: ignore[attr-defined]
    return build


def _with_equal_weights(build_model: Callable[..., Any]) -> Callable[..., Any]:
    """Makes runs of one seed begin alike with any number of groups.

    Megatron warms its fused functions up with random inputs as large as a micro-batch. Emulated, they come from the generator
    that the position embeddings are drawn from.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(get_args().seed)
        return build_model(*args, **kwargs)

    return build


def _train(argv: list[str], log: Path) -> None:
    """Runs one rank of a training."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    sys.argv = [pretrain_bytes.__file__, *argv, *missing_cpu_flags(argv)]
    pretrain_bytes.build_datasets = _with_equal_validations(pretrain_bytes.build_datasets)
    pretrain_bytes.build_model = _with_equal_weights(pretrain_bytes.build_model)
    pretrain_bytes.main()


if __name__ == "__main__":
    main()
