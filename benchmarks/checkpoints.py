"""Time and size of saving and loading a checkpoint: a Pier run against a stock run of the same model.

``python benchmarks/checkpoints.py [--repetitions N]``. Real Megatron on the CPU, four processes, two groups of two. Ratios of
one run count; times do not.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from pier_megatron.commands.demo import corpus

_SCRIPT = Path(corpus.__file__).with_name("pretrain_bytes.py")

# 13 million parameters: large enough for the files to cost more than the fixed work of a checkpoint.
_MODEL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 8 --bf16 --tokenizer-type NullTokenizer --vocab-size 257 "
    "--make-vocab-size-divisible-by 16 --lr 1e-3 --lr-decay-style constant --log-interval 100 "
    "--eval-interval 1000 --eval-iters 1 --train-iters 12"
)
_PIER = "--optimizer pier --pier-groups 2 --pier-sync-interval 3 --pier-lazy-start-iters 3"
_STOCK = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"

# Name, arguments, iteration at which the run is saved and ends.
_CONFIGURATIONS = {
    "stock, 2 instances (group 0's state mixed with group 1's)": (_STOCK, 9),
    "Pier, lazy start": (_PIER, 3),
    "Pier, on an outer step": (_PIER, 9),
    "Pier, on an outer step, first group only": (f"{_PIER} --pier-save-inner-state first", 9),
    "Pier, between outer steps": (_PIER, 8),
}


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved repetitions; medians count (%(default)s)")
    options = parser.parse_args()
    saves: dict[str, list[float]] = {}
    loads: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        train, validation = corpus.write(Path(scratch) / "corpus")
        data = f"--train-data-path {train} --valid-data-path {validation} --test-data-path {validation}"
        for repetition in range(options.repetitions):
            for name, (flags, stop) in _CONFIGURATIONS.items():
                folder = Path(scratch) / f"{name} {repetition}".replace(" ", "-").replace("'", "").replace(",", "")
                arguments = f"{_MODEL} {data} {flags}"
                saves.setdefault(name, []).append(
                    _milliseconds("save", f"{arguments} --save {folder} --save-interval 1000 --exit-interval {stop}")
                )
                loads.setdefault(name, []).append(_milliseconds("load", f"{arguments} --load {folder} --exit-interval 10"))
                sizes[name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    first = next(iter(_CONFIGURATIONS))
    print(f"`python benchmarks/checkpoints.py --repetitions {options.repetitions}`, {date.today().isoformat()}\n")
    print("| | MB | x stock | save, ms | x stock | load, ms | x stock |\n|---|---|---|---|---|---|---|")
    for name, size in sizes.items():
        cells = [f"{size / 1e6:.1f} | {size / sizes[first]:.2f}"]
        for times in (saves, loads):
            typical = statistics.median(times[name])
            cells.append(f"{typical:.0f} | {typical / statistics.median(times[first]):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


def _milliseconds(timer: str, arguments: str) -> float:
    """Runs a training; returns what the slowest rank took for its checkpoint, by Megatron's own timers."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, "-m", "pier_megatron", "--device", "cpu", str(_SCRIPT), *arguments.split()]
    process = subprocess.run(command, capture_output=True, text=True)
    found = re.search(rf"{timer}-checkpoint\s*\.+: \(([\d.]+), ([\d.]+)\)", process.stdout)
    if process.returncode or found is None:
        print(process.stdout[-3000:], process.stderr[-3000:], file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, " ".join(command))
    return float(found.group(2))


if __name__ == "__main__":
    main()
