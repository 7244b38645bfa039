"""Routes past skipped stages: ``python benchmarks/skip_routes.py measured|simulated``.

``measured``, on Linux, as root or where user namespaces are allowed: real Megatron on the CPU and gloo, a pipeline over four
emulated nodes of one rank each, one of them behind a slow link. Iterations with all stages, with stages that hand on what skips
them, and by routes that go past them. Compare numbers of one run only, as ratios.

``simulated``: the setting of SkipPipe's authors, 20 nodes in 12 regions of a cloud, six stages, as in create_schedule.py and
communication_costs.py of github.com/gensyn-ai/skippipe at 7f20d8a.
"""

import argparse
import csv
import json
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path

from interconnect import run

from pier_megatron.commands.demo import corpus
from pier_megatron.cpu.nodes import EmulatedNodes
from pier_megatron.experiments.skipping.pipeline.routes import Routes, plain

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from route_search.play import Grid, Link, play
from route_search.search import Wishes, search

_STAGES, _MICRO_BATCHES, _SEQUENCES, _HIDDEN, _TOKENS = 4, 8, 16, 128, 128
_TRAINING = (
    f"--num-layers {_STAGES} --pipeline-model-parallel-size {_STAGES} --hidden-size {_HIDDEN} --train-iters 6 "
    f"--micro-batch-size {_SEQUENCES} --global-batch-size {_SEQUENCES * _MICRO_BATCHES}"
)
_MESSAGE = _SEQUENCES * _TOKENS * _HIDDEN * 4
_SLOW = 2
# The first iterations set things up; the last one has no next.
_MEASURED = range(2, 6)

_REGIONS = Path(__file__).with_name("skippipe_regions.csv")
_REGION_OF_NODE = (
    "Australia Belgium Canada Germany Iowa Japan LA NL Oregon Singapore Taiwan London "
    "Australia Belgium Canada Germany Iowa Japan LA NL"
).split()
# Seconds of a forward pass and bytes of an activation of the schedule that the authors ship, and what they add to a message.
_PASS, _ACTIVATION, _OVERHEAD = 0.44, 8 * 4 * 1024 * 1024, 0.35
_FULL, _AUTHORS = [3, 3, 3, 3, 3, 3], [5, 3, 3, 3, 3, 3]


def main() -> None:
    """Measures or simulates, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measured", "simulated"], help="see above")
    parser.add_argument("--rates", type=float, nargs=2, default=[200, 20], help="rates of the links and the slow one, Mbit/s")
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved repetitions (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of the search (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder for what it writes (%(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.what == "measured":
        command = f"measured --rates {options.rates[0]:g} {options.rates[1]:g} --repetitions {options.repetitions}"
        table = measured(options.rates, options.repetitions, options.output)
    else:
        command, table = f"simulated --seeds {options.seeds}", simulated(options.seeds)
    heading = f"`python benchmarks/skip_routes.py {command}`, {date.today().isoformat()}"
    (options.output / f"skip_routes_{options.what}.md").write_text(f"{heading}\n\n{table}\n")
    print(f"\n{table}\n\nWritten to {options.output}")


def measured(rates: list[float], repetitions: int, output: Path) -> str:
    """Trains on emulated nodes; returns a table."""
    results: dict[str, list[dict[str, dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as scratch, EmulatedNodes(_STAGES) as cluster:
        data = corpus.write(Path(scratch) / "corpus")
        cluster.set_rate(rates[0])
        cluster.set_rate(rates[1], [_SLOW])
        file = Path(scratch) / "routes.json"
        file.write_text(routes(rates).text())
        ways = {
            "full": _TRAINING,
            "passed on (--pier-skip-fraction 0.25)": f"{_TRAINING} --pier-skip-fraction 0.25",
            "by routes, 25 % skipped": f"{_TRAINING} --pier-skip-routes {file}",
        }
        for repetition in range(repetitions):
            print(f"repetition {repetition + 1} of {repetitions}", flush=True)
            for way, result in run(cluster, Path(scratch), data, ways, together=True).items():
                results.setdefault(way, []).append(result)
    (output / "skip_routes_measured.json").write_text(json.dumps(results))
    # Noise of a shared machine only adds, so that the best training counts.
    seconds = {way: min(_median(result["seconds"]) for result in found) for way, found in results.items()}
    lines = ["| way | messages of a step | seconds of an iteration | x full |", "|---|---|---|---|"]
    full = 2 * (_STAGES - 1) * _MICRO_BATCHES
    messages = [full, full, routes(rates).messages]
    for (way, each), count in zip(seconds.items(), messages, strict=True):
        lines.append(f"| {way} | {count} | {each:.2f} | {each / seconds['full']:.2f} |")
    return "\n".join(lines)


def _median(by_iteration: dict[str, float]) -> float:
    return statistics.median(by_iteration[str(iteration)] for iteration in _MEASURED)


def routes(rates: list[float]) -> Routes:
    """Routes for the emulated nodes."""
    nodes = range(_STAGES)
    of_node = [rates[1] if node == _SLOW else rates[0] for node in nodes]
    links = [[Link(_MESSAGE * 8 / (min(of_node[one], of_node[other]) * 1e6)) for other in nodes] for one in nodes]
    devices = tuple((node,) for node in nodes)
    grid = Grid(devices, (0.03,) * _STAGES, (0.06,) * _STAGES, tuple(nodes), (1.0,) * _STAGES, links)
    found = search(grid, _MICRO_BATCHES, [[0]], Wishes(0.25, most_held=_STAGES))
    return Routes(_STAGES, 1, _MICRO_BATCHES, found.played.held, found.paths, found.played.order)


def simulated(seeds: int) -> str:
    """Searches in the authors' setting; returns a table."""
    links = _links()
    # Two of six stages are skipped; the seventh is the head, on the nodes of the first.
    skipping = 2 / 7
    authors = [[0, 3, 4, 10, 11], [15, 8, 14], [1, 9, 6], [16, 12, 13], [5, 18, 7], [17, 2, 19]]
    lines = ["| way | held | seconds of a step | shorter than full |", "|---|---|---|---|"]
    for held in (3, 6):
        rows: dict[str, list[float]] = {}
        for seed in range(seeds):
            full, partial = _grid(_FULL, [nodes[:3] for nodes in authors], links), _grid(_AUTHORS, authors, links)
            found = {
                "full, on the authors' placement": play(full, plain(7, 3, 10), held).seconds,
                "full, placed": search(full, 10, [range(3)], Wishes(0.0, held, seed, may_swap=False, may_move=True)),
                "2 of 6 skipped, drawn": search(partial, 6, [range(5)], Wishes(skipping, held, seed, is_searched=False)),
                "2 of 6 skipped, searched without TC2": search(
                    partial, 6, [range(5)], Wishes(skipping, held, seed, avoids_collisions=False)
                ),
                "2 of 6 skipped, searched": search(partial, 6, [range(5)], Wishes(skipping, held, seed)),
                "2 of 6 skipped, searched without swaps": search(
                    partial, 6, [range(5)], Wishes(skipping, held, seed, may_swap=False)
                ),
                "2 of 6 skipped, searched and placed": search(
                    partial, 6, [range(5)], Wishes(skipping, held, seed, may_move=True)
                ),
            }
            for way, result in found.items():
                rows.setdefault(way, []).append(result if isinstance(result, float) else result.played.seconds)
        full_seconds = statistics.mean(rows["full, on the authors' placement"])
        for way, seconds in rows.items():
            mean, spread = statistics.mean(seconds), statistics.stdev(seconds) if seeds > 1 else 0.0
            lines.append(f"| {way} | {held} | {mean:.1f} ± {spread:.1f} | {1 - mean / full_seconds:.0%} |")
    return "\n".join(lines)


def _grid(sizes: list[int], placed: list[list[int]], links: list[list[Link]]) -> Grid:
    hosts = [node for nodes in placed for node in nodes]
    numbers = iter(range(len(hosts)))
    devices = [tuple(next(numbers) for _ in range(size)) for size in sizes]
    stages = len(sizes)
    forward = (*[_PASS] * stages, _PASS / 4)
    backward = (*[1.5 * _PASS] * stages, 0.0)
    return Grid((*devices, devices[0]), forward, backward, tuple(hosts), (1.0,) * len(links), links)


def _links() -> list[list[Link]]:
    with _REGIONS.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    known = {frozenset((row["one"], row["other"])): (float(row["ms"]), float(row["GiB/s"])) for row in rows}

    def link(one: str, other: str) -> Link:
        # Nodes of one region: 1 ms and 2 GiB/s in the authors' script.
        latency, bandwidth = known.get(frozenset((one, other)), (1.0, 2.0))
        return Link(_ACTIVATION / (bandwidth * 2**30), latency * 1e-3 + _OVERHEAD)

    return [[link(one, other) for other in _REGION_OF_NODE] for one in _REGION_OF_NODE]


if __name__ == "__main__":
    main()
