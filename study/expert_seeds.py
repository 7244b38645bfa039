"""From how long a seed on experts beat one dense model, at equal operations: ``python study/expert_seeds.py``.

Four domains of real text that have little in common, from the packages installed here: tables, code, prose and translations
into many languages; headers of C and C++ are only scored. One seed model per seed, on all domains, at a constant learning
rate. From several of its iterations branch, with a learning rate that falls: one expert per domain, and one dense model that
takes the operations of all of them. Both begin from the same model, so their operations are equal with it, too. A mixture runs
all experts on every token, so long seeds are also compared with a dense model of as many parameters. It begins from random
weights and takes the same operations, those of the seed included.

``--unequal`` adds experts of unequal sizes and iterations, from 2,000 iterations of their seeds. What the seeds of their sizes
cost is counted, so experts of one size train longer. An interrupted study resumes.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from experts import installed_files

from pier_megatron.commands.demo.corpus import VOCABULARY, write_documents
from pier_megatron.megatron_api.tracker import stored_checkpoint, tracker_of

_SCRIPT = Path(__file__).resolve().parents[1] / "pier_megatron" / "commands" / "demo" / "pretrain_bytes.py"
_COMMAND = [sys.executable, "-m", "pier_megatron.cli", "experts"]
_SEQUENCE = 128
_MODEL = (
    f"--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length {_SEQUENCE} --max-position-embeddings {_SEQUENCE} "
    f"--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
    "--make-vocab-size-divisible-by 1 --micro-batch-size 16 --global-batch-size 16 --lr 4e-3 --adam-beta2 0.99 "
    "--weight-decay 0.1 --clip-grad 1.0 --log-interval 100 --eval-interval 100000 --eval-iters 1"
)
_SEED_SCHEDULE = "--lr-decay-style constant --lr-warmup-iters 50"
_BRANCH_SCHEDULE = "--lr-decay-style cosine --lr-warmup-iters 20 --min-lr 4e-4"
_LENGTHS = (500, 2000, 8000)
_ITERATIONS = 400
_LENGTH_OF_MORE = 2000
# A hundred thousand parameters, as many as four experts of medium size.
_WHOLE = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 160"
_WHOLE_NAME = "dense, as large as all"
_FEED_FORWARD = {"small": 64, "medium": 128, "large": 192}
# By what a domain was guessed to need, before any result: tables repeat themselves most, translations least.
_DOMAINS = {"tables": ("small", 3), "code": ("medium", 4), "prose": ("medium", 4), "translations": ("large", 5)}
_SUFFIXES = {
    "tables": (".csv", ".arff", ".afm"),
    "code": (".py",),
    "prose": (".md", ".rst", ".txt", "LICENSE", "METADATA"),
    "translations": (".po",),
    "headers": (".h", ".hpp"),
}
# Bytes of a domain's text, and of the largest file in it, so that none dominates.
_VALIDATION, _TRAIN = (100_000, 25_000), (2_000_000, 100_000)


def main() -> None:
    """Trains what is missing and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    parser.add_argument("--unequal", action="store_true", help="also experts of unequal sizes and iterations")
    parser.add_argument("--output", type=Path, default=Path("runs/expert-seeds"), help="folder for the runs (%(default)s)")
    options = parser.parse_args()
    output = options.output.resolve()
    data = {name: _texts(output / "data", name) for name in _SUFFIXES}
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    for seed in range(1, options.seeds + 1):
        folder = output / f"seed{seed}"
        _train_seed(folder, "medium", max(_LENGTHS), seed, data)
        for length in _LENGTHS:
            found.setdefault(str(length), []).append(_branches(folder, length, seed, data))
        if options.unequal:
            for size in _FEED_FORWARD:
                _train_seed(folder, size, _LENGTH_OF_MORE, seed, data)
            found.setdefault("unequal", []).append(_branches(folder, _LENGTH_OF_MORE, seed, data, is_unequal=True))
    for what, of_seeds in found.items():
        print(f"\n{what}: {len(of_seeds)} seeds")
        print("\n".join(table(of_seeds)))
    (output / "perplexities.json").write_text(json.dumps(found, indent=1))


def _texts(folder: Path, name: str) -> tuple[Path, Path]:
    """Writes a domain's train and validation dataset, of different files, and returns their prefixes."""
    files = installed_files(_SUFFIXES[name])
    prefixes = []
    for part, (size, largest) in (("validation", _VALIDATION), ("train", _TRAIN)):
        chosen, total = [], 0
        for path in [*files]:
            length = path.stat().st_size
            if total < size and 0 < length <= largest:
                chosen.append(path)
                files.remove(path)
                total += length
        prefixes.append(write_documents(folder / f"{name}-{part}", chosen))
    return prefixes[1], prefixes[0]


def _train_seed(folder: Path, size: str, iterations: int, seed: int, data: Mapping[str, tuple[Path, Path]]) -> None:
    """Trains a seed model on all domains in equal parts, unless it is there, and makes its shorter lengths seeds as well."""
    whole = folder / "seeds" / size / "whole"
    blend = [" ".join(f"1 {data[name][part]}" for name in _DOMAINS) for part in (0, 1)]
    tracker = tracker_of(whole)
    if not tracker.exists() or int(tracker.read_text()) < iterations:
        arguments = (
            f"{_MODEL} {_size(size)} {_SEED_SCHEDULE} --seed {seed} --train-iters {iterations} --train-data-path {blend[0]} "
            f"--valid-data-path {blend[1]} --save {whole} --load {whole} --save-interval {min(_LENGTHS)} --no-save-optim"
        )
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command = [*launcher, "-m", "pier_megatron", "--device", "cpu", str(_SCRIPT), *arguments.split()]
        subprocess.run(command, check=True)
    for length in _LENGTHS:
        stored = stored_checkpoint(whole, length)
        at_length = folder / "seeds" / size / str(length)
        if length <= iterations and stored and not at_length.exists():
            at_length.mkdir()
            (at_length / stored.name).symlink_to(stored)
            tracker_of(at_length).write_text(str(length))


def _branches(
    folder: Path, length: int, seed: int, data: Mapping[str, tuple[Path, Path]], is_unequal: bool = False
) -> dict[str, dict[str, float]]:
    """Perplexities of all models that branch from one length of the seed, by model and domain."""
    name = f"{length}-unequal" if is_unequal else str(length)
    sizes = _FEED_FORWARD if is_unequal else ["medium"]
    changes = {
        "sizes": {size: {"arguments": _size(size), "seed": f"seeds/{size}/{length}"} for size in sizes},
        "count-seeds": is_unequal,
        "variants": ["MHo-IHo", "MHe-IHo", "MHe-IHe"] if is_unequal else ["MHo-IHo", "dense"],
    }
    print(f"Seed {seed}, {name}", flush=True)
    found = _mixed(folder, name, _description(seed, data, is_unequal) | changes)
    if length >= _LENGTH_OF_MORE and not is_unequal:
        found[_WHOLE_NAME] = _large(folder, name, seed, data)
    return found


def _large(folder: Path, branches: str, seed: int, data: Mapping[str, tuple[Path, Path]]) -> dict[str, float]:
    """Perplexities of one dense model as large as all experts, at the operations of the experts and their seed."""
    plan = json.loads((folder / branches / "plan.json").read_text())
    total = sum(expert["operations"] for expert in plan["experts"] if expert["name"].startswith("MHo-IHo/"))
    total += plan["seeds"]["medium"]
    changes = {"sizes": {"medium": {"arguments": _WHOLE}}, "variants": ["dense"]}
    one = _planned(folder, f"{branches}-large-one", _description(seed, data) | changes | {"iterations": 1})
    of_one = one["experts"][0]["operations"] / one["experts"][0]["iterations"]
    changes["iterations"] = round(total / of_one / len(_DOMAINS))
    return _mixed(folder, f"{branches}-large", _description(seed, data) | changes)["dense/dense"]


def _description(seed: int, data: Mapping[str, tuple[Path, Path]], is_unequal: bool = False) -> dict[str, Any]:
    return {
        "script": str(_SCRIPT),
        "device": "cpu",
        "arguments": f"{_MODEL} {_BRANCH_SCHEDULE} --seed {seed} --no-save-optim --save-interval 100000",
        "domains": {
            domain: {
                "train": str(data[domain][0]),
                "validation": str(data[domain][1]),
                "size": size if is_unequal else "medium",
                "difficulty": difficulty,
            }
            for domain, (size, difficulty) in _DOMAINS.items()
        },
        "held-out": {"headers": str(data["headers"][1])},
        "homogeneous": "medium",
        "iterations": _ITERATIONS,
        "machines": {"gpus-per-node": 1, "ranks-per-expert": 1},
    }


def _planned(folder: Path, name: str, description: Mapping[str, Any]) -> dict[str, Any]:
    """Plans, and returns the plan."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(dict(description), sort_keys=False))
    subprocess.run([*_COMMAND, "plan", str(file), "--output", str(folder / name)], check=True)
    found: dict[str, Any] = json.loads((folder / name / "plan.json").read_text())
    return found


def _mixed(folder: Path, name: str, description: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Plans, trains, scores and mixes what is missing; perplexities by model and domain."""
    if not (folder / name / "mixture.png").exists():
        _planned(folder, name, description)
        subprocess.run([folder / name / "train.sh"], check=True)
        for step in ("score", "mix"):
            subprocess.run([*_COMMAND, step, str(folder / name)], check=True)
    found: dict[str, dict[str, float]] = json.loads((folder / name / "mixture.json").read_text())
    return found


def _size(name: str) -> str:
    return f"--ffn-hidden-size {_FEED_FORWARD[name]}"


def table(found: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Perplexities per byte, and how far each is from the reference of its seed; means over seeds with deviations."""
    domains = list(next(iter(found[0].values())))
    reference = "dense/dense" if "dense/dense" in found[0] else "MHo-IHo, uniform prior"
    lines = [f"{'against ' + reference:30}" + "".join(f"{name:>18}" for name in [*domains, "trained on"])]
    for name in found[0]:
        columns = [[of_seed[name][domain] for of_seed in found] for domain in domains]
        whole = [_geometric_mean(of_seed[name]) for of_seed in found]
        cells = [_with_deviation(column, 3) for column in [*columns, whole]]
        against = [100 * (own / _geometric_mean(of_seed[reference]) - 1) for own, of_seed in zip(whole, found, strict=True)]
        lines.append(f"{name:30}" + "".join(f"{cell:>18}" for cell in cells) + f"{_with_deviation(against, 1) + ' %':>18}")
    return lines


def _geometric_mean(of_model: Mapping[str, float]) -> float:
    """Mean over the domains that are trained on."""
    return math.exp(statistics.mean(math.log(of_model[domain]) for domain in _DOMAINS))


def _with_deviation(values: Sequence[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0
    return f"{statistics.mean(values):.{digits}f} +- {deviation:.{digits}f}"


if __name__ == "__main__":
    main()
