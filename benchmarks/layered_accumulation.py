"""Layered gradient accumulation over slow links: ``python benchmarks/layered_accumulation.py``.

On Linux, as root or where user namespaces are allowed. Real Megatron on the CPU and gloo, two emulated nodes of one rank each.
Iterations in Megatron's order and layer by layer, for several numbers of micro-batches, against the longer one of what one node
takes alone and what the bytes of an iteration take on the link: where all is hidden, an iteration takes no longer. Compare
numbers of one run only, as ratios.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from interconnect import run

from pier_megatron.commands.demo import corpus
from pier_megatron.cpu.nodes import EmulatedNodes

# Many tokens, and a bucket of gradients for each of many layers: almost all time goes into the two that are compared.
_SEQUENCES = 64
_TRAINING = (
    "--num-layers 16 --hidden-size 128 --train-iters 7 --use-distributed-optimizer --overlap-grad-reduce "
    f"--overlap-param-gather --ddp-bucket-size 190000 --untie-embeddings-and-output-weights --micro-batch-size {_SEQUENCES}"
)
_ORDERS = {"Megatron's order": "", "layered": " --pier-layered", "layered, 4 at a time": " --pier-layered 4"}

# The first iterations set things up; the last one has no next.
_MEASURED = range(3, 7)

type Times = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[120, 60, 30], help="rates of the links, Mbit/s")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="number in a step, per node")
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved repetitions (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder for what it writes (%(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    alone: dict[int, Times] = {count: {} for count in options.micro_batches}
    together: dict[tuple[float, int], Times] = {at: {} for at in itertools.product(options.rates, options.micro_batches)}
    with tempfile.TemporaryDirectory() as scratch, EmulatedNodes(2) as cluster:
        data = corpus.write(Path(scratch) / "corpus")
        for repetition, count in itertools.product(range(options.repetitions), options.micro_batches):
            print(f"repetition {repetition + 1} of {options.repetitions}, {count} micro-batches", flush=True)
            one = {"alone": f"{_TRAINING} --global-batch-size {count * _SEQUENCES}"}
            _keep(alone[count], run(cluster, Path(scratch), data, one, together=False))
            for rate in options.rates:
                cluster.set_rate(rate)
                both = {
                    name: f"{_TRAINING} --global-batch-size {2 * count * _SEQUENCES}{flag}" for name, flag in _ORDERS.items()
                }
                _keep(together[rate, count], run(cluster, Path(scratch), data, both, together=True))
    rates, counts = (" ".join(f"{value:g}" for value in values) for values in (options.rates, options.micro_batches))
    command = f"benchmarks/layered_accumulation.py --rates {rates} --micro-batches {counts} --repetitions {options.repetitions}"
    tables = "\n\n".join(
        _table(rate, {count: alone[count] | together[rate, count] for count in options.micro_batches}) for rate in options.rates
    )
    (options.output / "layered_accumulation.md").write_text(f"`python {command}`, {date.today().isoformat()}\n\n{tables}\n")
    measured = {"alone": alone, **{f"{rate:g} Mbit/s, {count}": times for (rate, count), times in together.items()}}
    (options.output / "layered_accumulation.json").write_text(json.dumps(measured))
    print(f"\n{tables}\n\nWritten to {options.output}")


def _keep(times: Times, results: dict[str, Any]) -> None:
    for name, result in results.items():
        times.setdefault(name, []).append(result)


def _table(rate: float, measured: dict[int, Times]) -> str:
    lines = [
        f"### {rate:g} Mbit/s",
        "",
        f"| micro-batches | alone, ms | wire, ms | limit, ms | {' | '.join(f'{name}: ms | x limit' for name in _ORDERS)} |",
        "|---" * (4 + 2 * len(_ORDERS)) + "|",
    ]
    for count, times in measured.items():
        alone = min(_seconds(result) for result in times["alone"])
        sent = statistics.median(_bytes(result) for result in times["Megatron's order"])
        wire = sent * 8 / (rate * 1e6)
        limit = max(alone, wire)
        best = [min(_seconds(result) for result in times[name]) for name in _ORDERS]
        cells = " | ".join(f"{seconds * 1e3:.0f} | {seconds / limit:.2f}" for seconds in best)
        lines.append(f"| {count} | {alone * 1e3:.0f} | {wire * 1e3:.0f} | {limit * 1e3:.0f} | {cells} |")
    return "\n".join(lines)


def _seconds(result: dict[str, Any]) -> float:
    """Median iteration of a training; noise of a shared machine only adds, so that the best training counts."""
    return statistics.median(result["seconds"][str(iteration)] for iteration in _MEASURED)


def _bytes(result: dict[str, Any]) -> float:
    return statistics.mean(result["bytes"][str(iteration)] for iteration in _MEASURED)


if __name__ == "__main__":
    main()
