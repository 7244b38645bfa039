"""How long a loss takes over a slow link: synchronous Muon and Pier side by side on emulated nodes.

``python benchmarks/time_to_loss.py``, on Linux, as root or where user namespaces are allowed. Real Megatron on the CPU and
gloo, one process per node, each row a whole training. Times are sums of Megatron's own iteration times, which leave evaluations
out. Compare numbers of one run only, as ratios.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
sys.path += [str(_FOLDER), str(_FOLDER.parent / "study")]

from interconnect import launch  # noqa: E402
from run import validation_curve  # noqa: E402
from text import VALIDATION_SEQUENCES, data_arguments  # noqa: E402

from pier_megatron.commands.tensorboard_log import TensorBoardLog  # noqa: E402
from pier_megatron.cpu.nodes import EmulatedNodes  # noqa: E402

# Small enough for its exchange to be most of a synchronous iteration, as between sites: Newton-Schulz grows with the cube of
# the width, the exchange with its square.
_BATCH = 8
_LOGGED = 10
_MODEL = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --hidden-dropout 0 "
    "--attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 1 --lr 8e-3 "
    "--min-lr 8e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --adam-beta2 0.99 --weight-decay 0.1 --clip-grad 1.0 "
    "--muon-momentum 0.95 --muon-nesterov --muon-scale-mode shape_scaling --muon-fp32-matmul-prec high "
    f"--muon-extra-scale-factor 5 --global-batch-size {_BATCH} --log-interval {_LOGGED} --log-timers-to-tensorboard "
    f"--eval-iters {VALIDATION_SEQUENCES // _BATCH}"
)
_PIER = "--optimizer pier --pier-inner-optimizer muon --pier-lazy-start-iters 0"

SYNCHRONOUS = "synchronous Muon"
ROWS = {
    SYNCHRONOUS: "--optimizer muon --overlap-grad-reduce",
    "Pier, 1 bit, H = 1, hidden": f"{_PIER} --pier-exchange-dtype int1 --pier-sync-interval 1 --pier-overlap 1",
    "Pier, 2 bits, H = 2, hidden": f"{_PIER} --pier-exchange-dtype int2 --pier-sync-interval 2 --pier-overlap 2",
}


def main() -> None:
    """Trains the rows and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100, help="rate of the links, Mbit/s (%(default)g)")
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes, each a group (%(default)s)")
    parser.add_argument("--iterations", type=int, default=600, help="length of each training (%(default)s)")
    parser.add_argument("--above", type=float, default=0.04, help="target: synchronous Muon's final loss and so much")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data order (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, EmulatedNodes(options.nodes) as cluster:
        cluster.set_rate(options.rate)
        # Times are logged every ten iterations, and groups agree then in every row.
        evaluated = max(options.iterations // 300, 1) * _LOGGED
        trainings = []
        for index, (name, arguments) in enumerate(ROWS.items()):
            log = Path(scratch) / f"log{index}"
            argv = (
                f"{_MODEL} {data_arguments(Path(scratch) / 'corpus')} --micro-batch-size {_BATCH // options.nodes} "
                f"--train-iters {options.iterations} --eval-interval {evaluated} --seed {options.seed} "
                f"--tensorboard-dir {log} {arguments}"
            )
            argv += f" --pier-groups {options.nodes}" if "--optimizer pier" in arguments else ""
            trainings.append({"name": name, "argv": argv.split()})
        launch(cluster, Path(scratch), trainings)
        curves = {name: curve(TensorBoardLog(Path(scratch) / f"log{index}")) for index, name in enumerate(ROWS)}
    print(table(curves, options.above))
    print(json.dumps(curves))


Curve = list[tuple[float, float]]
"""Seconds of training and loss, after each evaluation."""


def curve(log: TensorBoardLog) -> Curve:
    """Reads a run's curve."""
    times = log.scalars["iteration-time"]
    every = times.steps[1] - times.steps[0]
    until = dict(zip(times.steps, itertools.accumulate(every * seconds for seconds in times.values), strict=True))
    return [(until[step], loss) for step, loss in validation_curve(log).items()]


def seconds_to(curve: Curve, target: float) -> float:
    """Seconds until a loss is reached, between two evaluations in proportion; infinite if it never is."""
    for (before, worse), (after, better) in itertools.pairwise(curve):
        if better <= target:
            return before + (after - before) * min(max((worse - target) / (worse - better), 0.0), 1.0)
    return math.inf


def table(curves: dict[str, Curve], above: float) -> str:
    """The rows against synchronous training."""
    target = curves[SYNCHRONOUS][-1][1] + above
    lines = [f"| | final loss | s in all | s to {target:.3f} | x as fast |", "|---|---|---|---|---|"]
    reference = seconds_to(curves[SYNCHRONOUS], target)
    for name, found in curves.items():
        seconds = seconds_to(found, target)
        lines.append(f"| {name} | {found[-1][1]:.4f} | {found[-1][0]:.0f} | {seconds:.0f} | {reference / seconds:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
