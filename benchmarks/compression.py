"""Compression inside a group on slow links: ``python benchmarks/compression.py``.

On Linux, as root or where user namespaces are allowed. Real Megatron on the CPU and gloo, two pipeline stages x two replicas on
four emulated nodes of one rank each: a rank's neighbour in the pipeline and its replica are both behind its link. Bytes are
those of the first rank's link, packet headers included. Codecs take their time on the cores that train here, and kernels of
their own on a GPU. Compare numbers of one run only, as ratios.
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

_NODES = 4
_TRAINING = (
    "--train-iters 10 --global-batch-size 48 --pipeline-model-parallel-size 2 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather"
)
_POLICIES = ("none", "pp=int8", "gather=int8", "dp=int8", "dp=int4", "hybrid,pp=int8", "aggressive,pp=int8", "naive")

# The first iterations set things up; the last one has no next.
_MEASURED = range(3, 10)


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[400, 100], help="rates of the links, Mbit/s")
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved repetitions (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder for what it writes (%(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    trainings = {policy: _TRAINING + (f" --pier-compress {policy}" if policy != "none" else "") for policy in _POLICIES}
    measured: dict[float, dict[str, list[dict[str, Any]]]] = {rate: {name: [] for name in _POLICIES} for rate in options.rates}
    with tempfile.TemporaryDirectory() as scratch, EmulatedNodes(_NODES) as cluster:
        data = corpus.write(Path(scratch) / "corpus")
        for repetition, rate in itertools.product(range(options.repetitions), options.rates):
            print(f"repetition {repetition + 1} of {options.repetitions}, {rate:g} Mbit/s", flush=True)
            cluster.set_rate(rate)
            for policy, result in run(cluster, Path(scratch), data, trainings, together=True).items():
                measured[rate][policy].append(result)
    rates = " ".join(f"{rate:g}" for rate in options.rates)
    command = f"python benchmarks/compression.py --rates {rates} --repetitions {options.repetitions}"
    tables = "\n\n".join(_table(rate, of_policies) for rate, of_policies in measured.items())
    (options.output / "compression.json").write_text(json.dumps(measured))
    (options.output / "compression.md").write_text(f"`{command}`, {date.today().isoformat()}\n\n{tables}\n")
    print(f"\n{tables}\n\nWritten to {options.output}")


def _table(rate: float, measured: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        f"### {rate:g} Mbit/s",
        "",
        "| `--pier-compress` | iteration, ms: median | best | x none | MB on a link per iteration | x none |",
        "|---|---|---|---|---|---|",
    ]
    seconds = {policy: [_mean(result, "seconds") for result in results] for policy, results in measured.items()}
    sent = {policy: statistics.median(_mean(result, "bytes") for result in of) / 1e6 for policy, of in measured.items()}
    for policy, times in seconds.items():
        ratio = statistics.median(map(float.__truediv__, times, seconds["none"]))
        lines.append(
            f"| {policy} | {statistics.median(times) * 1e3:.0f} | {min(times) * 1e3:.0f} | {ratio:.2f} "
            f"| {sent[policy]:.2f} | {sent[policy] / sent['none']:.2f} |"
        )
    return "\n".join(lines)


def _mean(result: dict[str, Any], what: str) -> float:
    return statistics.mean(result[what][str(iteration)] for iteration in _MEASURED)


if __name__ == "__main__":
    main()
