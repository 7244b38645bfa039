"""``pier-megatron demo``: trains a small GPT on real text with Pier, through Megatron's own loop, and shows what happened."""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pier_megatron.commands.demo import corpus, report
from pier_megatron.cpu.emulation import missing_cpu_flags

# A GPT-2 in miniature. Small enough for two CPU cores, large enough to learn something about Python in two minutes.
_MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--hidden-dropout 0 --attention-dropout 0 --bf16 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 16"
).split()
_TRAINING = (
    "--micro-batch-size 8 --global-batch-size 16 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.02 --adam-beta2 0.99 --weight-decay 0.1 --clip-grad 1.0 --log-interval 10 --eval-iters 16"
).split()

# The lines of Megatron's log that tell the story; everything is in the log file.
_SHOWN = re.compile(r"^\s*\[[-\d :.]+\] iteration|^ outer step|^\s*validation loss|saved checkpoint")
_BLOCK_BEGINS, _BLOCK_GOES_ON = "Pier: ", "  "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's own flags."""
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder for what it writes (%(default)s)")
    parser.add_argument("--iterations", type=int, default=400, help="length of the run (%(default)s)")
    parser.add_argument("--sync-interval", type=int, default=5, help="iterations between outer steps (%(default)s)")
    parser.add_argument("--preset", default="pier-rising", help="outer schedule, as --pier-preset (%(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="of weights and data order (%(default)s)")
    parser.add_argument(
        "arguments", nargs="*", metavar="-- ARGUMENTS", help="further arguments for Megatron, such as -- --lr 1e-3"
    )
    parser.add_argument(
        "--synchronous",
        action="store_true",
        help="train without Pier instead, for comparison: AdamW in every iteration",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status."""
    output: Path = options.output.resolve()
    for name in ("tensorboard", "checkpoint"):
        shutil.rmtree(output / name, ignore_errors=True)
    print("Writing the sources of Python's standard library as bytes into Megatron's dataset format ...", flush=True)
    train, validation = corpus.write(output / "corpus")

    processes, tensor_parallel, device = _resources()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *("-m", "pier_megatron", "--device", device, str(Path(__file__).with_name("pretrain_bytes.py"))),
        *_MODEL,
        *_TRAINING,
        *_optimizer(options),
        *("--tensor-model-parallel-size", str(tensor_parallel), "--vocab-size", str(corpus.VOCABULARY)),
        *("--train-iters", str(options.iterations), "--seed", str(options.seed)),
        *("--eval-interval", str(_evaluation_interval(options)), "--save-interval", str(options.iterations)),
        *("--train-data-path", str(train), "--valid-data-path", str(validation), "--test-data-path", str(validation)),
        *("--save", str(output / "checkpoint"), "--tensorboard-dir", str(output / "tensorboard")),
    ]
    command += options.arguments
    if device == "cuda" and importlib.util.find_spec("transformer_engine") is None:
        # The same plain PyTorch path as on the CPU, on NCCL.
        flags = missing_cpu_flags(["--distributed-backend", "--num-workers"])
        command += flags
    print(" ".join(command), flush=True)
    log = output / "log.txt"
    status = _show(command, log)
    if status:
        print(f"The training failed with status {status}; the whole log is {log}. Its end:\n", file=sys.stderr)
        print("\n".join(log.read_text().splitlines()[-40:]), file=sys.stderr)
        return status
    print(report.summarise(output))
    return 0


def _resources() -> tuple[int, int, str]:
    """Chooses processes, tensor-parallel size and device: TP 2 x 2 groups on 4 GPUs or the CPU, 2 groups on 2 GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus >= 4:
        return 4, 2, "cuda"
    if gpus >= 2:
        return 2, 1, "cuda"
    found = "no GPU" if gpus == 0 else "one GPU, and two groups need two"
    print(f"Found {found}: Megatron runs on the CPU and gloo, 4 processes, which is slow but the real thing.", flush=True)
    return 4, 2, "cpu"


def _optimizer(options: argparse.Namespace) -> list[str]:
    if options.synchronous:
        return "--optimizer adam --use-distributed-optimizer --num-distributed-optimizer-instances 2".split()
    return [
        *("--optimizer", "pier", "--pier-groups", "2", "--pier-preset", options.preset),
        *("--pier-sync-interval", str(options.sync_interval)),
    ]


def _evaluation_interval(options: argparse.Namespace) -> int:
    """About ten evaluations, each after an outer step."""
    interval: int = options.sync_interval
    outer_steps: int = options.iterations // interval
    return max(outer_steps // 10, 1) * interval


def _show(command: Sequence[str], log: Path) -> int:
    """Runs a command, writes its output to a file and shows the lines that matter."""
    environment = os.environ | {
        # One thread per process: the processes share the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore",
        # Megatron compiles its dataset helper with the python3 on the PATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        in_block = False
        for line in process.stdout:
            file.write(line)
            in_block = line.startswith(_BLOCK_BEGINS) or (in_block and line.startswith(_BLOCK_GOES_ON))
            if in_block or _SHOWN.search(line):
                print(line, end="", flush=True)
        return process.wait()
