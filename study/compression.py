"""What compression inside a group costs in loss: ``python study/compression.py``.

Two pipeline stages, two replicas, bf16, the study's model, text and learning rate, paired seeds. A run that is complete is not
trained again. Prints a table.
"""

import argparse
import dataclasses
import itertools
import shutil
import statistics
from pathlib import Path

from rows import BATCH, ITERATIONS
from run import SET_UP, VALIDATION, run_worker
from text import VALIDATION_SEQUENCES, data_arguments

from pier_megatron.commands.tensorboard_log import TensorBoardLog

# Activations and parameters in as few bits as gradients.
_ALL_INT4 = "dp=int4,pp=int4,gather=int4"
_POLICIES = ("none", "hybrid", "hybrid,pp=int12", "hybrid,pp=int8", "aggressive,pp=int8", "naive", _ALL_INT4)
_RATE = 8e-3
_RANKS, _MICRO_BATCHES = 4, 4


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        policy: Value of ``--pier-compress``.
        seed: Seed of weights and data order.
    """

    policy: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.policy.replace(',', '-').replace('=', '-')}-seed{self.seed}"

    def arguments(self, iterations: int) -> str:
        """Its command line, without model and data."""
        compress = "" if self.policy == "none" else f"--pier-compress {self.policy}"
        micro_batch = BATCH // (2 * _MICRO_BATCHES)
        return (
            "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 "
            f"--train-iters {iterations} --global-batch-size {BATCH} --micro-batch-size {micro_batch} --seed {self.seed} "
            f"--lr {_RATE} --min-lr {_RATE / 10} --eval-interval {iterations} "
            f"--eval-iters {VALIDATION_SEQUENCES // BATCH} {compress}"
        )


def main() -> None:
    """Trains what is missing and prints what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="paired seeds of every row (%(default)s)")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="length of every training (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/compression"), help="folder for the runs (%(default)s)")
    options = parser.parse_args()
    folder = options.output.resolve()
    data = data_arguments(folder / "corpus")
    seeds = range(1, options.seeds + 1)
    runs = [Run(policy, seed) for seed, policy in itertools.product(seeds, _POLICIES)]
    specification = []
    for run in runs:
        place = folder / run.name
        if (place / "done").exists():
            continue
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        places = f"{data} --tensorboard-dir {place / 'tensorboard'}"
        argv = f"--num-layers 2 {SET_UP} {run.arguments(options.iterations)} {places}".split()
        entry = {"name": run.name, "groups": _RANKS, "argv": argv}
        specification.append(entry | {"done": str(place / "done"), "log": str(place / "log.txt")})
    run_worker(specification)
    ends = {run: TensorBoardLog(folder / run.name).scalars[VALIDATION].values[0] for run in runs}
    print("| policy | validation loss, nats per byte | against none, mean | by seed |\n|---|---|---|---|")
    for policy in _POLICIES:
        losses = [ends[Run(policy, seed)] for seed in seeds]
        gaps = [loss - ends[Run("none", seed)] for loss, seed in zip(losses, seeds, strict=True)]
        by_seed = ", ".join(f"{gap:+.4f}" for gap in gaps)
        print(f"| {policy} | {statistics.mean(losses):.4f} | {statistics.mean(gaps):+.4f} | {by_seed} |")


if __name__ == "__main__":
    main()
