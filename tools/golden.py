"""Holds two checkouts against each other: ``python tools/golden.py OTHER [--runs N] [--seed S]``.

Draws settings of the outer loop, with faults, stops and evaluations on the way, and trains each in both checkouts, by the
ranks of their own ``tests/loop/ranks.py``. Prints which runs end with the same bits in parameters, anchor and momentum, which
do not, and which only one of the two accepts. A change that takes code away is to leave all of them as they were.
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


def main() -> int:
    """Trains in both checkouts, compares, and returns 1 if they are not alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, such as one of git worktree")
    parser.add_argument("--runs", type=int, default=200, help="number of runs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; the others count on (%(default)s)")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.runs)
    if options.write is not None:
        _train(options.other.resolve(), seeds, options.write)
        return 0
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("here", "there")]
        for checkout, file in zip((here, options.other), files, strict=True):
            words = [str(checkout), "--seed", str(options.seed), "--runs", str(options.runs), "--write", str(file)]
            environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
            subprocess.run([sys.executable, __file__, *words], env=environment, check=True)
        here, there = (torch.load(file) for file in files)
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for seed in seeds:
        one, other = here[seed], there[seed]
        if isinstance(one, str) or isinstance(other, str):
            kinds["refused by both" if isinstance(one, str) and isinstance(other, str) else "accepted by one"].append(f"{seed}")
        elif torch.equal(one.view(torch.int32), other.view(torch.int32)):
            kinds["same"].append(f"{seed}")
        else:
            kinds["different"].append(f"{seed} by {(one - other).abs().max().item():.1e}")
    for kind, which in kinds.items():
        print(f"{kind}: {len(which)}{'' if kind == 'same' else f', seeds {which}'}")
    return int("different" in kinds or "accepted by one" in kinds or "same" not in kinds)


def _train(checkout: Path, seeds: range, file: Path) -> None:
    """Trains runs with the ranks of a checkout; writes how each ended, by seed: numbers, or why it was refused."""
    sys.path[:0] = [str(checkout / folder) for folder in ("tests/loop", "tools", "tests")]
    import programs
    import ranks as processes

    from pier_megatron import PierConfig

    assert Path(sys.modules["pier_megatron"].__file__ or "").is_relative_to(checkout)
    ends: dict[int, str | Tensor] = {}
    with processes.running() as ranks:
        for seed in seeds:
            run = draw(seed)
            try:
                settings = processes.Settings(**run["settings"])
                PierConfig(groups=settings.groups, **settings.config)
                ends[seed] = _end_of(programs.Program(settings, run["commands"]).run(ranks))
            except (ValueError, TypeError, processes.FailedError) as error:
                ends[seed] = str(error)
    torch.save(ends, file)


def _end_of(results: list[dict[str, Any]]) -> Tensor:
    """Parameters, anchor and momentum of all ranks after the last iteration; float32, flat."""
    last = [result["history"][-1] for result in results]
    tensors = [tensor for of_rank in last for tensor in (*of_rank["parameters"], of_rank["anchor"], of_rank["momentum"])]
    return torch.cat([tensor.flatten() for tensor in tensors])


if __name__ == "__main__":
    sys.exit(main())
