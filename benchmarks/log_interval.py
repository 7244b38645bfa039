"""What a log line costs a group whose neighbour is unsteady: ``--log-interval`` 1 and 100 side by side on emulated nodes.

``python benchmarks/log_interval.py``, on Linux, as root or where user namespaces are allowed. Real Megatron on the CPU and
gloo, two nodes with one group each. Group 1 sleeps in each iteration, a fifth of an iteration on average. Group 0 must not
notice before the next outer step. Compare numbers of one run only, as ratios.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

from interconnect import launch

from pier_megatron.commands.demo import corpus
from pier_megatron.cpu.nodes import EmulatedNodes

_INTERVAL = 25
_TRAINING = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --hidden-dropout 0 "
    "--attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 16 --lr 1e-3 "
    "--lr-decay-style constant --eval-interval 1000 --eval-iters 0 --micro-batch-size 4 --global-batch-size 8 --train-iters 76 "
    f"--optimizer pier --pier-groups 2 --pier-lazy-start-iters 0 --pier-sync-interval {_INTERVAL}"
)


def main() -> None:
    """Trains and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000, help="rate of the links, Mbit/s (%(default)g)")
    parser.add_argument("--repetitions", type=int, default=3, help="trainings of each kind, in turn (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, EmulatedNodes(2) as cluster:
        cluster.set_rate(options.rate)
        train_data, validation_data = corpus.write(Path(scratch) / "corpus")
        data = ["--train-data-path", str(train_data), "--valid-data-path", str(validation_data)]
        argv = [*_TRAINING.split(), *data]

        def train(jitter: float) -> dict[int, list[float]]:
            trainings = [
                {"name": f"{interval} {index}", "argv": [*argv, "--log-interval", str(interval)], "jitter": jitter}
                for index in range(options.repetitions)
                for interval in (1, 100)
            ]
            launch(cluster, Path(scratch), trainings)
            found = json.loads((Path(scratch) / "results.json").read_text())
            return {
                interval: [
                    after - before
                    for index in range(options.repetitions)
                    for iteration, (before, after) in enumerate(
                        itertools.pairwise(found[f"{interval} {index}"]["iterations began"][0]), start=1
                    )
                    # Between outer steps, without the first iterations.
                    if iteration > 3 and iteration % _INTERVAL
                ]
                for interval in (1, 100)
            }

        steady = train(0.0)
        unsteady = train(0.4 * statistics.median(steady[100]))
    print("| group 1 | group 0, log interval 1, ms | log interval 100, ms | ratio of means |")
    print("|---|---|---|---|")
    for name, found in (("steady", steady), ("sleeps a fifth", unsteady)):
        one, hundred = (1e3 * statistics.mean(found[interval]) for interval in (1, 100))
        print(f"| {name} | {one:.1f} | {hundred:.1f} | {one / hundred:.2f} |")


if __name__ == "__main__":
    main()
