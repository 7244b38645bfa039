"""Holds two checkouts against each other: ``python tools/golden.py OTHER [--runs N] [--trainings N] [--seed S]``.

Draws settings of the outer loop, with faults, stops and evaluations on the way, and trains each in both checkouts, by the
ranks of their own ``tests/loop/ranks.py``; compares parameters, anchor and momentum. Then draws trainings with Megatron, each
with a save and a resume, launches them by the checkouts' own ``tests/distributed/launch.py``, and compares the losses and the
gradient norms of all iterations, and the final weights. Prints which are the same to the last bit, which are not, and which
only one of the two accepts. A change that takes code away is to leave all of them as they were.
"""

import argparse
import collections
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Not the package's own: both checkouts draw the same.
_CODECS = ("fp32", "bf16", "int12", "int8", "int4", "int2", "int1")
_LOSSLESS, _MOST_BITS_LOST = ("fp32",), ("int2", "int1")

_LENGTH = 10
_TRAINING = f"--optimizer pier --pier-groups 2 --pier-sync-interval 2 --pier-lazy-start-iters 4 --train-iters {_LENGTH}"


def draw(seed: int) -> dict[str, Any]:
    """Draws a run as plain data: what ``ranks.Settings`` takes, and commands with their arguments."""
    chance = random.Random(seed)
    in_sites = chance.random() < 0.2
    groups, ranks_in_group = (4, 1) if in_sites else chance.choice([(2, 1), (3, 1), (4, 1), (2, 2), (1, 2)])
    interval = chance.randint(1, 5)
    lazy_start, length = interval * chance.randint(0, 2), chance.randint(5, 18)
    dtype = chance.choice(_CODECS)
    config: dict[str, Any] = {
        "sync_interval": interval,
        "lazy_start_iters": lazy_start,
        "train_iters": lazy_start + length,
        "fragments": 1 if in_sites else chance.randint(1, min(interval, 3)),
        "overlap": chance.choice([0, chance.randint(0, interval)]),
        "exchange_dtype": dtype,
        "offload": chance.random() < 0.5,
        "no_error_feedback": dtype not in _MOST_BITS_LOST and dtype not in _LOSSLESS and chance.random() < 0.5,
        "preset": chance.choice(["pier", "pier-rising", "pier-annealed", "diloco", "local-sgd", "pier-frequent"]),
    }
    if in_sites:
        divisors = [divisor for divisor in range(1, interval + 1) if interval % divisor == 0]
        config |= {"sites": 2, "site_interval": chance.choice(divisors)}
    elif groups > 1 and chance.random() < 0.25:
        config |= {"preset": "noloco", "subgroup_size": chance.randint(2, groups), "subgroup_seed": chance.randint(0, 3)}
        config |= {"exchange_dtype": "fp32", "no_error_feedback": False}
    commands: list[tuple[str, dict[str, Any]]] = [("rehearse", {})] if chance.random() < 0.5 else []
    diverged = False
    for iteration in range(1, config["train_iters"] + 1):
        happens: dict[str, Any] = {}
        if chance.random() < 0.08:
            happens = {"skip": True}
        elif chance.random() < 0.08:
            happens = {"overflow": [chance.randrange(groups)]}
        elif groups > 2 and not diverged and iteration > lazy_start and chance.random() < 0.1:
            happens, diverged = {"bad": [1]}, True
        commands.append(("iterate", happens))
        if chance.random() < 0.1:
            commands.append(("stop_and_resume", {}))
        if chance.random() < 0.1:
            commands.append(("evaluate", {"as_mean": "subgroup_size" in config}))
    return {"settings": {"groups": groups, "ranks_in_group": ranks_in_group, "config": config}, "commands": commands}


def draw_training(seed: int) -> dict[str, Any]:
    """Draws a training of Megatron on four ranks in two groups as plain data: its flags, and where it is stopped."""
    chance = random.Random(seed)
    layout = chance.choice(
        [
            "--tensor-model-parallel-size 2 --global-batch-size 4",
            "--pipeline-model-parallel-size 2 --global-batch-size 8",
            "--expert-model-parallel-size 2 --num-experts 4 --moe-router-load-balancing-type none --global-batch-size 8",
            "--global-batch-size 8",
            "--overlap-grad-reduce --overlap-param-gather --global-batch-size 8",
        ]
    )
    flags = [layout, chance.choice(["", "--bf16", "--fp16 --initial-loss-scale 1024"])]
    if chance.random() < 0.25 and "overlap" not in layout and "--fp16" not in flags[1]:
        flags.append("--pier-inner-optimizer muon --muon-fp32-matmul-prec high")
    if chance.random() < 0.25:
        flags.append("--hidden-dropout 0.1")
    if chance.random() < 0.25:
        flags.append("--calculate-per-token-loss")
    preset = chance.choice(["pier", "pier-rising", "diloco", "local-sgd", "noloco"])
    flags.append(f"--pier-preset {preset}")
    if preset != "noloco":
        if chance.random() < 0.5:
            flags.append(f"--pier-overlap {chance.randint(1, 2)}")
        if chance.random() < 0.4:
            flags.append("--pier-fragments 2")
        flags.append(f"--pier-exchange-dtype {chance.choice(_CODECS)}")
    if chance.random() < 0.4:
        flags.append("--pier-offload")
    return {"argv": " ".join([_TRAINING, *filter(None, flags)]), "stop": chance.randint(1, _LENGTH - 1)}


def main() -> int:
    """Trains in both checkouts, compares, and returns 1 if they are not alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, such as one of git worktree")
    parser.add_argument("--runs", type=int, default=200, help="number of runs of the loop (%(default)s)")
    parser.add_argument("--trainings", type=int, default=0, help="number of trainings with Megatron (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; the others count on (%(default)s)")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    runs = range(options.seed, options.seed + options.runs)
    trainings = range(options.seed, options.seed + options.trainings)
    if options.write is not None:
        checkout = options.other.resolve()
        torch.save({**_loops(checkout, runs), **_trainings(checkout, trainings)}, options.write)
        return 0
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("here", "there")]
        for checkout, file in zip((here, options.other), files, strict=True):
            words = [str(checkout), *sys.argv[2:], "--write", str(file)]
            environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
            subprocess.run([sys.executable, __file__, *words], env=environment, check=True)
        here, there = (torch.load(file) for file in files)
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for key, one in here.items():
        other = there[key]
        if isinstance(one, str) or isinstance(other, str):
            kinds["refused by both" if isinstance(one, str) and isinstance(other, str) else "accepted by one"].append(key)
        elif one.shape == other.shape and torch.equal(one.view(torch.int64), other.view(torch.int64)):
            kinds["same"].append(key)
        else:
            kinds["different"].append(f"{key} by {(one - other).abs().max().item():.1e}" if one.shape == other.shape else key)
    for kind, which in kinds.items():
        print(f"{kind}: {len(which)}{'' if kind == 'same' else f', {which}'}")
    for key in (*kinds["accepted by one"], *kinds["refused by both"]):
        print(f"{key}: {next(end for end in (here[key], there[key]) if isinstance(end, str))}")
    return int("different" in kinds or bool(kinds["accepted by one"]) or "same" not in kinds)


def _loops(checkout: Path, seeds: range) -> dict[str, str | Tensor]:
    """Trains runs with the ranks of a checkout: how each ended, by seed, in numbers, or why it was refused."""
    if not seeds:
        return {}
    sys.path[:0] = [str(checkout / folder) for folder in ("tests/loop", "tools", "tests")]
    import programs
    import ranks as processes

    from pier_megatron import PierConfig

    assert Path(sys.modules["pier_megatron"].__file__ or "").is_relative_to(checkout)
    ends: dict[str, str | Tensor] = {}
    with processes.running() as ranks:
        for seed in seeds:
            run = draw(seed)
            try:
                settings = processes.Settings(**run["settings"])
                PierConfig(groups=settings.groups, **settings.config)
                ends[f"run {seed}"] = _end_of(programs.Program(settings, run["commands"]).run(ranks))
            except (ValueError, TypeError, processes.FailedError) as error:
                ends[f"run {seed}"] = str(error)
    return ends


def _trainings(checkout: Path, seeds: range) -> dict[str, str | Tensor]:
    """Trains with Megatron, each run with its resume: how each ended, by seed."""
    if not seeds:
        return {}
    sys.path[:0] = [str(checkout / folder) for folder in ("tests/distributed", "tools", "tests")]
    from launch import Run, launch

    from pier_megatron.commands.demo.corpus import write_documents

    ends: dict[str, str | Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(__file__).parents[1] / "LICENSE"
        prefixes = [write_documents(Path(folder) / name, [text]) for name in ("train", "validation")]
        for seed in seeds:
            drawn, directory = draw_training(seed), Path(folder) / str(seed)
            directory.mkdir()
            saved = f"{drawn['argv']} --save {{directory}}/saved --save-interval {_LENGTH}"
            loaded = f"{drawn['argv']} --load {{directory}}/saved --ckpt-step {drawn['stop']} --exit-on-missing-checkpoint"
            runs = [Run("whole", saved, ["weights"], saves=[drawn["stop"]]), Run("resumed", loaded, ["weights"])]
            try:
                recorded = launch(directory, prefixes, runs)
            except AssertionError as error:
                ends[f"training {seed}"] = f"{drawn['argv']}: {error}"
                continue
            ends[f"training {seed}"] = torch.cat([_end_of_training(run) for run in recorded.values()])
    return ends


def _end_of_training(run: Any) -> Tensor:
    """Losses and gradient norms of all iterations, and the final weights, of what a launch recorded; float64, flat."""
    logged = torch.tensor([*run.losses.values(), *run.grad_norms.values()], dtype=torch.float64)
    weights = [value for _, value in sorted(run.weights("final").items()) if isinstance(value, Tensor)]
    return torch.cat([logged, *(value.double().flatten() for value in weights if value.is_floating_point())])


def _end_of(results: list[dict[str, Any]]) -> Tensor:
    """Parameters, anchor and momentum of all ranks after the last iteration; float64, flat."""
    last = [result["history"][-1] for result in results]
    tensors = [tensor for of_rank in last for tensor in (*of_rank["parameters"], of_rank["anchor"], of_rank["momentum"])]
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


if __name__ == "__main__":
    sys.exit(main())
