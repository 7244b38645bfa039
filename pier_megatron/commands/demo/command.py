"""``pier-megatron demo``: trains the same small GPT with synchronous AdamW and with Pier, and shows what Pier is for."""

import argparse
import importlib.util
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from pier_megatron.commands.demo import comparison, corpus
from pier_megatron.commands.demo.machine import this_machine
from pier_megatron.config import PierConfig
from pier_megatron.cpu.preparations import silence_missing_extensions
from pier_megatron.errors import PierConfigError
from pier_megatron.flags import add_pier_arguments, check_words
from pier_megatron.processes import INTERRUPTED
from pier_megatron.values import folder_to_write, positive, whole

# A GPT-2 in miniature. Small enough for two CPU cores, large enough to learn something about Python in two minutes.
_MODEL = (
    "--num-layers 4 --hidden-size 96 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--hidden-dropout 0 --attention-dropout 0 --bf16 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 16"
).split()
_TRAINING = (
    "--micro-batch-size 4 --global-batch-size 8 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.02 --adam-beta2 0.99 --weight-decay 0.1 --clip-grad 1.0 --eval-iters 16 "
    "--log-interval 10 --tensorboard-log-interval 1"
).split()

# Steps of a matrix ten times those of AdamW: the rate of https://kellerjordan.github.io/posts/muon/. A CPU without bf16 units
# would take minutes for an iteration in Megatron's default precision.
_MUON = (
    "--muon-momentum 0.95 --muon-scale-mode shape_scaling --muon-extra-scale-factor 10 --muon-fp32-matmul-prec high"
).split()

# Baselines. With AdamW the fastest configuration of stock Megatron on such links: docs/performance.md.
_SYNCHRONOUS = "--optimizer adam --use-distributed-optimizer --num-distributed-optimizer-instances 2".split()
_SYNCHRONOUS_MUON = ["--optimizer", "muon", *_MUON]

_EVALUATIONS = 8

# In each folder that the demo may delete.
_MARKER = ".pier-megatron-demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's own flags."""
    parser.add_argument(
        "--output", type=folder_to_write, default=Path("runs/demo"), help="folder for its results (%(default)s)"
    )
    parser.add_argument("--iterations", type=whole(2), default=264, help="length of each training (%(default)s)")
    parser.add_argument("--sync-interval", type=whole(1), default=8, help="iterations between outer steps (%(default)s)")
    parser.add_argument("--seed", type=whole(1), default=1234, help="seed of weights and data order (%(default)s)")
    parser.add_argument(
        "--rate", type=positive(1e6), default=100, metavar="MBIT", help="rate of the emulated link, Mbit/s (%(default)s)"
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="-- ARGUMENTS", help="further arguments for Megatron, such as -- --lr 1e-3"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status."""
    if any(word.partition("=")[0] == "--train-iters" for word in options.arguments):
        raise PierConfigError("-- --train-iters: the demo passes it to all trainings. Give --iterations instead.")
    output: Path = options.output.resolve()
    pier = ["--optimizer", "pier", "--pier-groups", "2", "--pier-sync-interval", str(options.sync_interval)]
    saving = ["--save-interval", str(options.iterations), "--save", str(output / "pier" / "checkpoint")]
    runs = {"synchronous": _SYNCHRONOUS, "pier": [*pier, *saving]}
    if importlib.util.find_spec("emerging_optimizers"):
        inside = ["--pier-inner-optimizer", "muon"]
        runs |= {"synchronous-muon": _SYNCHRONOUS_MUON, "pier-muon": [*pier, *inside, *_MUON]}
    configs = {
        name: _config([*optimizer, *options.arguments], options.iterations) if name.startswith("pier") else None
        for name, optimizer in runs.items()
    }
    for name in runs:
        _check_own(output / name)
    # Asked to end in either way, and also in the background of a shell, which ignores the first: clean up.
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.default_int_handler)
    try:
        print("Writing the sources of Python's standard library as bytes into Megatron's dataset format ...", flush=True)
        silence_missing_extensions()
        data = corpus.write(output / "corpus")
        with this_machine(options.rate) as machine:
            print(machine.description, flush=True)
            for name, optimizer in runs.items():
                print(f"\n{name}: {' '.join(optimizer)}", flush=True)
                folder = output / name
                make_empty(folder)
                given = options.arguments if name.startswith("pier") else _without_pier(options.arguments)
                status = machine.train([*_arguments(options, data, folder), *optimizer, *given], folder)
                if status:
                    return status
        print(comparison.summarise(output, configs, options.rate if machine.nodes else None))
    except KeyboardInterrupt:
        print("\nInterrupted: all processes and emulated links are gone.")
        return INTERRUPTED
    return 0


def _config(words: Sequence[str], iterations: int) -> PierConfig:
    """Settings of Pier in a training; refuses before anything is trained what Pier would refuse when its turn comes."""
    from pier_megatron.integration.arguments import config_from_args

    return config_from_args(argparse.Namespace(**vars(check_words(words)), train_iters=iterations))


def _check_own(folder: Path) -> None:
    """Refuses to delete what the demo has not written."""
    if folder.exists() and not (folder / _MARKER).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PierConfigError(
            f"--output {folder.parent}: the demo would replace {folder}, which is not its own (it has no {_MARKER}). Choose "
            "another folder, or remove this one."
        )


def make_empty(folder: Path) -> None:
    """Empties the demo's folder, or creates it, and marks it as its own."""
    _check_own(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / _MARKER).touch()


def _without_pier(arguments: Sequence[str]) -> list[str]:
    """Arguments without the flags of Pier and their values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_pier_arguments(parser)
    return parser.parse_known_args(arguments)[1]


def _arguments(options: argparse.Namespace, data: tuple[Path, Path], folder: Path) -> list[str]:
    train, validation = data
    # After an outer step, where evaluation sees what is trained.
    interval = max(round(options.iterations / options.sync_interval / _EVALUATIONS), 1) * options.sync_interval
    return [
        *_MODEL,
        *_TRAINING,
        *("--vocab-size", str(corpus.VOCABULARY), "--train-iters", str(options.iterations), "--seed", str(options.seed)),
        *("--eval-interval", str(interval), "--tensorboard-dir", str(folder / "tensorboard")),
        *("--train-data-path", str(train), "--valid-data-path", str(validation), "--test-data-path", str(validation)),
    ]
