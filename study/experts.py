"""Unequal experts against equal ones and one dense model, at equal operations: ``python study/experts.py``.

Three domains of real text, from the packages installed here: code, prose and structured data; headers of C and C++ are only
scored. For each seed: seed models of three sizes on all domains, then ``pier-megatron experts`` from plan to table. An
interrupted study resumes, also with variants that are added at the end. Sizes and shares of the iterations were assigned to
domains before any result: structured data repeats itself most, prose least.
"""

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import yaml

from pier_megatron.commands.demo.corpus import VOCABULARY, write_documents
from pier_megatron.megatron_api.tracker import tracker_of

_SCRIPT = Path(__file__).resolve().parents[1] / "pier_megatron" / "commands" / "demo" / "pretrain_bytes.py"
_SEQUENCE = 128
_ITERATIONS, _ITERATIONS_OF_SEEDS = 200, 200
_MODEL = (
    f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {_SEQUENCE} --max-position-embeddings {_SEQUENCE} "
    f"--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
    "--make-vocab-size-divisible-by 1 --micro-batch-size 16 --global-batch-size 16 --lr 4e-3 --min-lr 4e-4 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --adam-beta2 0.99 --weight-decay 0.1 --clip-grad 1.0 --log-interval 20 "
    "--eval-interval 100000 --eval-iters 1"
)
_FEED_FORWARD = {"small": 128, "medium": 256, "large": 384}
_DOMAINS = {"structured": ("small", 3), "code": ("medium", 4), "prose": ("large", 5)}
_VARIANTS = ["MHo-IHo", "MHe-IHo", "dense", "MHo-IHe"]
_SUFFIXES = {
    "structured": (".json", ".csv", ".xml", ".yaml", ".yml", ".toml"),
    "code": (".py",),
    "prose": (".md", ".rst", ".txt", "LICENSE", "METADATA"),
    "headers": (".h", ".hpp"),
}

# Bytes of a domain's text; no file gives more than a twentieth of it, so that none dominates.
_TRAIN, _VALIDATION = 2_000_000, 40_000


def main() -> None:
    """Trains what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/experts-study"), help="folder for the runs (%(default)s)")
    options = parser.parse_args()
    output = options.output.resolve()
    data = {name: _texts(output / "data", name) for name in _SUFFIXES}
    found = [_seed(output / f"seed{seed}", seed, data) for seed in range(1, options.seeds + 1)]
    print("\n".join(table(found)))
    (output / "perplexities.json").write_text(json.dumps(found, indent=1))


def installed_files(suffixes: tuple[str, ...]) -> list[Path]:
    """Files of installed packages whose names end so, in an order that does not depend on their paths."""
    packages = Path(sysconfig.get_path("purelib"))
    files = [path for path in packages.rglob("*") if path.name.endswith(suffixes) and path.is_file()]
    return sorted(files, key=lambda path: hashlib.sha256(str(path.relative_to(packages)).encode()).digest())


def _texts(folder: Path, name: str) -> tuple[Path, Path]:
    """Writes a domain's train and validation dataset, of different files, and returns their prefixes."""
    files = installed_files(_SUFFIXES[name])
    prefixes = []
    for part, size in (("validation", _VALIDATION), ("train", _TRAIN)):
        chosen, total = [], 0
        while files and total < size:
            path = files.pop()
            length = path.stat().st_size
            if 0 < length <= size / 20:
                chosen.append(path)
                total += length
        prefixes.append(write_documents(folder / f"{name}-{part}", chosen))
    return prefixes[1], prefixes[0]


def _seed(folder: Path, seed: int, data: Mapping[str, tuple[Path, Path]]) -> dict[str, dict[str, float]]:
    """Perplexities of all models of one seed, by model and domain."""
    runs, file = folder / "experts", folder / "experts.yaml"
    description = {
        "script": str(_SCRIPT),
        "device": "cpu",
        "arguments": f"{_MODEL} --seed {seed}",
        "sizes": {size: {"arguments": _size(size), "seed": f"seeds/{size}"} for size in _FEED_FORWARD},
        "domains": {
            name: {"train": str(data[name][0]), "validation": str(data[name][1]), "size": size, "difficulty": difficulty}
            for name, (size, difficulty) in _DOMAINS.items()
        },
        "held-out": {"headers": str(data["headers"][1])},
        "homogeneous": "medium",
        "iterations": _ITERATIONS,
        "variants": _VARIANTS,
        "machines": {"gpus-per-node": 2, "ranks-per-expert": 1},
    }
    print(f"Seed {seed}", flush=True)
    _train_seeds(folder, seed, data)
    file.write_text(yaml.safe_dump(description, sort_keys=False))
    command = [sys.executable, "-m", "pier_megatron.cli", "experts"]
    subprocess.run([*command, "plan", str(file), "--output", str(runs)], check=True)
    subprocess.run([runs / "train.sh"], check=True)
    for step in ("score", "mix"):
        subprocess.run([*command, step, str(runs)], check=True)
    found: dict[str, dict[str, float]] = json.loads((runs / "mixture.json").read_text())
    return found


def _size(name: str) -> str:
    return f"--ffn-hidden-size {_FEED_FORWARD[name]}"


def _train_seeds(folder: Path, seed: int, data: Mapping[str, tuple[Path, Path]]) -> None:
    """Trains the seed models that are missing, on all domains in equal parts."""
    blend = [" ".join(f"1 {data[name][part]}" for name in _DOMAINS) for part in (0, 1)]
    for size in _FEED_FORWARD:
        checkpoints = folder / "seeds" / size
        if tracker_of(checkpoints).exists():
            continue
        arguments = (
            f"{_MODEL} {_size(size)} --seed {seed} --train-iters {_ITERATIONS_OF_SEEDS} --train-data-path {blend[0]} "
            f"--valid-data-path {blend[1]} --save {checkpoints} --save-interval {_ITERATIONS_OF_SEEDS}"
        )
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command = [*launcher, "-m", "pier_megatron", "--device", "cpu", str(_SCRIPT), *arguments.split()]
        subprocess.run(command, check=True)


def table(found: list[dict[str, dict[str, float]]]) -> list[str]:
    """Mean perplexity per byte over seeds, with the standard deviation, and geometric means over the domains trained on."""
    domains = list(next(iter(found[0].values())))
    lines = [
        f"{'perplexity per byte, ' + str(len(found)) + ' seeds':28}"
        + "".join(f"{name:>18}" for name in [*domains, "trained on"])
    ]
    for name in found[0]:
        columns = [[of_seed[name][domain] for of_seed in found] for domain in domains]
        columns.append([math.exp(statistics.mean(math.log(of_seed[name][domain]) for domain in _DOMAINS)) for of_seed in found])
        cells = [f"{statistics.mean(c):.3f} +- {statistics.stdev(c) if len(c) > 1 else 0:.3f}" for c in columns]
        lines.append(f"{name:28}" + "".join(f"{cell:>18}" for cell in cells))
    return lines


if __name__ == "__main__":
    main()
