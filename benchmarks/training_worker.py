"""One process of the benchmark: runs trainings one after the other and notes when each iteration ends and what it sent.

``torchrun training_worker.py SPECIFICATION FILE``: a JSON list of ``{"name", "argv"}``; writes a JSON object by name. With
``"jitter"`` the last rank sleeps in each iteration, for a random time up to that many seconds.
"""

import functools
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from pier_megatron.cpu import emulation
from pier_megatron.cpu.nodes import sent_bytes
from pier_megatron.cpu.preparations import missing_cpu_flags

emulation.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.training import training as megatron_training  # noqa: E402

from pier_megatron import register  # noqa: E402
from pier_megatron.commands.demo import pretrain_bytes  # noqa: E402
from pier_megatron.integration import current, seams  # noqa: E402
from pier_megatron.megatron_api.seam import install  # noqa: E402

jitter = {"seconds": 0.0}
marks: list[tuple[int, float, int]] = []
reports: list[dict[str, float]] = []


def mark_iterations() -> None:
    """Notes the time and the bytes sent at the beginning of every iteration, and what each outer step reports."""
    train_step = megatron_training.train_step

    @functools.wraps(train_step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        marks.append((kwargs["iteration"], time.perf_counter(), sent_bytes()))
        optimizer = current.pier_optimizer()
        if optimizer is not None and kwargs["iteration"] == 0:
            optimizer.loop.reports.write = lambda report: reports.append(
                # Where it was applied, which with --pier-overlap is later than where it began.
                {"iteration": optimizer.loop.iteration, "seconds": report.seconds, "bytes": report.bytes_sent}
            )
        if jitter["seconds"] and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(random.Random(kwargs["iteration"]).uniform(0, jitter["seconds"]))
        return train_step(*args, **kwargs)

    megatron_training.train_step = marked


def main() -> None:
    """Runs what the command line says, each training in a process of its own.

    A process grows slower with every training that it has behind it, by up to a tenth, which would be charged to the later
    ones. Forking keeps the start short: everything is imported once.
    """
    specification, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    install(seams.WITHOUT_PIER)
    register()
    mark_iterations()
    results = {}
    for index, run in enumerate(specification):
        part = output.with_name(f"{output.name}.{index}")
        child = os.fork()
        if child == 0:
            # Each training meets at a store of its own.
            port = int(os.environ["MASTER_PORT"]) + 1 + index
            os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
            jitter["seconds"] = run.get("jitter", 0.0)
            train(run["argv"], part)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{run['name']} failed")
        if part.exists():
            results[run["name"]] = json.loads(part.read_text())
    if results:
        output.write_text(json.dumps(results))


def touch_memory() -> None:
    """Leaves a gigabyte of free memory in the heap that the kernel has paged in.

    Otherwise chance decides whether a tensor the size of the gradients reuses memory or is paged in again in every iteration,
    at a cost of up to a twelfth of the iteration.
    """
    blocks = [torch.ones(2**22) for _ in range(64)]
    del blocks


def train(argv: list[str], output: Path) -> None:
    """Runs one training; rank 0 writes what was measured."""
    touch_memory()
    sys.argv = [pretrain_bytes.__file__, *argv, *missing_cpu_flags(argv)]
    pretrain_bytes.main()
    optimizer = current.pier_optimizer()
    # Where groups do not wait for each other, none speaks for all.
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [seconds for _, seconds, _ in marks])
    if dist.get_rank() == 0:
        result = {
            # From the beginning of an iteration to that of the next; the last one has no next.
            "seconds": {i + 1: after - before for (i, before, _), (_, after, _) in itertools.pairwise(marks)},
            "bytes": {i + 1: after - before for (i, _, before), (_, _, after) in itertools.pairwise(marks)},
            "outer steps": list(reports),
            "iterations began": of_ranks,
            "parameters": sum(state.numel for state in optimizer.loop.states) if optimizer else None,
        }
        output.write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
