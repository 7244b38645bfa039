"""One rank of the study: trains rows one after the other through Megatron's own loop.

``torchrun worker.py SPECIFICATION``, a JSON list of ``{"name", "argv", "log", "done"}``. Each training runs in a process of its
own; forking keeps its start short, because everything is imported once.
"""

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pier_megatron import emulation

emulation.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.training import get_args  # noqa: E402
from rows import ABLATIONS  # noqa: E402

from pier_megatron import register  # noqa: E402
from pier_megatron.demo import pretrain_bytes  # noqa: E402
from pier_megatron.integration import datasets  # noqa: E402
from pier_megatron.schedules import PRESETS  # noqa: E402

# What is otherwise imported when a training begins, by each of them anew.
_IMPORTED_ONCE = (
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.libraries",
    "pier_megatron.optimizer",
    "tensorboard",
)


def main() -> None:
    """Trains what the command line says; rank 0 marks each row that is done with its seconds."""
    specification = json.loads(Path(sys.argv[1]).read_text())
    PRESETS.update(ABLATIONS)
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    datasets.install()
    register()
    for index, row in enumerate(specification):
        begin = time.perf_counter()
        child = os.fork()
        if child == 0:
            # Each training meets at a store of its own.
            port = int(os.environ["MASTER_PORT"]) + 1 + index
            os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
            _train(row["argv"], Path(row["log"]))
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{row['name']} failed: see {row['log']}")
        if os.environ["RANK"] == "0":
            seconds = time.perf_counter() - begin
            Path(row["done"]).write_text(f"{seconds}\n")
            print(f"{row['name']}: {seconds:.0f} s", flush=True)


def _with_equal_validations(build_datasets: Callable[[list[int | None]], Any]) -> Callable[..., Any]:
    """Makes all evaluations read the same data: one epoch of it, again and again, not shuffled together."""

    def build(sizes: list[int], *_: Any, **__: Any) -> Any:
        train, validation, test = build_datasets([sizes[0], None, sizes[2]])
        epochs = math.ceil(sizes[1] / len(validation))
        assert len(validation) == get_args().eval_iters * get_args().global_batch_size, "an evaluation is one epoch"
        return train, torch.utils.data.ConcatDataset([validation] * epochs), test

    build.is_distributed = True  # type: ignore[attr-defined]
    return build


def _train(argv: list[str], log: Path) -> None:
    """Runs one training and ends the process."""
    torch.set_num_threads(1)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.argv = [pretrain_bytes.__file__, *argv, *emulation.missing_cpu_flags(argv)]
        pretrain_bytes.build_datasets = _with_equal_validations(pretrain_bytes.build_datasets)
        pretrain_bytes.main()
        dist.barrier()
        sys.stdout.flush()
    # Not through the parent's exit handlers.
    os._exit(0)


if __name__ == "__main__":
    main()
