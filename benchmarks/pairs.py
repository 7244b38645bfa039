"""Outer steps of all groups against those in pairs, where one link is slow or unsteady: ``python benchmarks/pairs.py``.

On Linux, as root or where user namespaces are allowed. Real Megatron on the CPU and gloo, four emulated nodes with one group
each. All groups at once wait for the slowest link in every outer step; pairs hold up each other only. How far that carries
depends on what is slow: a link that is always slow holds up whoever meets its group, and so before long everybody; stalls that
come and go hit a pair instead of all. Compare numbers of one run only, as ratios.
"""

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import threading
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from interconnect import run

from pier_megatron.commands.demo import corpus
from pier_megatron.cpu.nodes import EmulatedNodes

_NODES, _INTERVAL, _ITERATIONS, _RATE = 4, 10, 120, 400

# Behind the first outer step, to before the last, after which all groups agree.
_MEASURED = slice(_INTERVAL, _ITERATIONS - _INTERVAL)

_PIER = (
    f"--global-batch-size {6 * _NODES} --train-iters {_ITERATIONS} --optimizer pier --pier-groups {_NODES} "
    f"--pier-lazy-start-iters 0 --pier-sync-interval {_INTERVAL}"
)
_RULES = {
    "all groups": f"{_PIER} --pier-preset diloco",
    "pairs": f"{_PIER} --pier-preset noloco",
}

# Rates of the last node's link, in shares of the others' rate; stalls come at random.
_SLOW, _STALLED = 0.25, 0.05
_STALL_SECONDS, _CALM_SECONDS = 0.5, 2.0


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved repetitions (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder for what it writes (%(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    measured: dict[str, dict[str, list[float]]] = {link: {rule: [] for rule in _RULES} for link in _LINKS}
    with tempfile.TemporaryDirectory() as scratch, EmulatedNodes(_NODES) as cluster:
        data = corpus.write(Path(scratch) / "corpus")
        for repetition in range(options.repetitions):
            for link, condition in _LINKS.items():
                print(f"repetition {repetition + 1} of {options.repetitions}, {link}", flush=True)
                for rule in _RULES:
                    cluster.set_rate(_RATE)
                    with condition(cluster, repetition):
                        found = run(cluster, Path(scratch), data, {rule: _RULES[rule]}, together=True)
                    measured[link][rule].append(_mean_iteration(found[rule]))
    heading = f"`python benchmarks/pairs.py --repetitions {options.repetitions}`, {date.today().isoformat()}\n\n"
    table = _table(measured)
    (options.output / "pairs.json").write_text(json.dumps(measured))
    (options.output / "pairs.md").write_text(heading + table + "\n")
    print(f"\n{table}\n\nWritten to {options.output}")


@contextlib.contextmanager
def _alike(cluster: EmulatedNodes, seed: int) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _one_slow(cluster: EmulatedNodes, seed: int) -> Iterator[None]:
    cluster.set_rate(_RATE * _SLOW, [_NODES - 1])
    yield


@contextlib.contextmanager
def _stalls(cluster: EmulatedNodes, seed: int) -> Iterator[None]:
    """A link at a time, of any node, carries next to nothing for a while: the same times and nodes for every rule."""
    ended, drawn = threading.Event(), random.Random(seed)

    def disturb() -> None:
        while not ended.wait(drawn.expovariate(1 / _CALM_SECONDS)):
            node = [drawn.randrange(_NODES)]
            cluster.set_rate(_RATE * _STALLED, node)
            ended.wait(_STALL_SECONDS)
            cluster.set_rate(_RATE, node)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


_LINKS = {
    "all links alike": _alike,
    f"one link at {_SLOW:.0%}": _one_slow,
    f"stalls of {_STALL_SECONDS:g} s, one link at a time": _stalls,
}


def _mean_iteration(result: dict[str, Any]) -> float:
    """Seconds of an iteration, outer steps included, in the mean over the groups."""
    spans = [began[_MEASURED] for began in result["iterations began"]]
    return statistics.mean((span[-1] - span[0]) / (len(span) - 1) for span in spans)


def _table(measured: dict[str, dict[str, list[float]]]) -> str:
    lines = ["| | outer steps | mean iteration, ms: median | best | x all groups |", "|---|---|---|---|---|"]
    for link, of_rules in measured.items():
        for rule, seconds in of_rules.items():
            ratio = statistics.median(map(float.__truediv__, seconds, of_rules["all groups"]))
            lines.append(
                f"| {link} | {rule} | {statistics.median(seconds) * 1e3:.0f} | {min(seconds) * 1e3:.0f} | {ratio:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
