"""What crosses the network between nodes, and what it costs: stock Megatron and Pier side by side on emulated nodes.

``make bench``, on Linux, as root or where user namespaces are allowed. Real Megatron on the CPU and gloo, one process per
node; the links are emulated, see ``pier_megatron/cpu/nodes.py``. Prints a table and leaves it, the raw numbers and a plot in
the output folder. Compare numbers of one run only, as ratios. On a shared machine noise only ever adds time, so take ratios of
the fastest tenth of all iterations or of the best interval, not of the medians.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence, Set
from datetime import date
from pathlib import Path
from typing import Any

from pier_megatron.commands.demo import corpus
from pier_megatron.cpu.nodes import EmulatedNodes

_FOLDER = Path(__file__).resolve().parent

# Keeps freed memory in the process, where the worker has touched it before: see training_worker.touch_memory.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_ARENA_MAX": "1",
}

# 3.2 million parameters on few tokens: an exchange that is large against its compute, as between real nodes. At 1000 Mbit/s
# synchronous training takes about as many times as long as one node alone as published (2.0 to 3.7, arXiv 2511.17849).
_MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 6 --hidden-dropout 0 --attention-dropout 0 --bf16 --tokenizer-type NullTokenizer --vocab-size 257 "
    "--make-vocab-size-divisible-by 16 --lr 1e-3 --lr-decay-style constant --log-interval 1000 --eval-interval 1000 "
    "--eval-iters 0"
)
_STOCK = "--global-batch-size 12 --train-iters 13 --use-distributed-optimizer"
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_INTERVAL = 50
_PIER = (
    "--global-batch-size 12 --train-iters 102 --optimizer pier --pier-groups 2 --pier-lazy-start-iters 0 "
    f"--pier-sync-interval {_INTERVAL}"
)

# Name, arguments, iterations that are measured. An interval of Pier begins behind an outer step and ends with the next.
_SYNCHRONOUS, _LOCAL = range(3, 13), range(_INTERVAL + 1, 2 * _INTERVAL + 1)
_ALONE = {
    "one group alone": (f"{_STOCK} --train-iters 102 --global-batch-size 6", _LOCAL),
    "one group alone, overlap flags": (f"{_STOCK} --train-iters 102 --global-batch-size 6 {_OVERLAP}", _LOCAL),
    "one group alone, under Pier": (f"{_PIER} --global-batch-size 6 --pier-groups 1", _LOCAL),
}
_TOGETHER = {
    "stock": (_STOCK, _SYNCHRONOUS),
    "stock, overlap flags": (f"{_STOCK} {_OVERLAP}", _SYNCHRONOUS),
    "stock, 2 instances": (f"{_STOCK} --num-distributed-optimizer-instances 2", _SYNCHRONOUS),
    "Pier, lazy start": (
        "--global-batch-size 12 --train-iters 14 --optimizer pier --pier-groups 2 --pier-lazy-start-iters 13 "
        "--pier-sync-interval 13",
        _SYNCHRONOUS,
    ),
    "Pier, blocking": (_PIER, _LOCAL),
    "Pier, blocking, overlap flags": (f"{_PIER} {_OVERLAP}", _LOCAL),
    "Pier, overlapped by 25": (f"{_PIER} --pier-overlap 25", _LOCAL),
    "Pier, 5 fragments": (f"{_PIER} --pier-fragments 5", _LOCAL),
    "Pier, 5 fragments, overlapped by 10": (f"{_PIER} --pier-fragments 5 --pier-overlap 10", _LOCAL),
    "Pier, blocking, bf16": (f"{_PIER} --pier-exchange-dtype bf16", _LOCAL),
    "Pier, blocking, int8": (f"{_PIER} --pier-exchange-dtype int8", _LOCAL),
    "Pier, blocking, int4": (f"{_PIER} --pier-exchange-dtype int4", _LOCAL),
}

_CONFIGURATIONS = _ALONE | _TOGETHER

# What the others are compared with.
_LIMIT, _SYNCHRONISED = "one group alone", "stock, 2 instances"


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1000, 200, 80], help="rates of the links, Mbit/s")
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved repetitions (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows, and the baselines of all rows")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder for what it writes (%(default)s)")
    parser.add_argument(
        "--from", dest="measured", type=Path, metavar="JSON", help="only print and draw what docs/interconnect.json holds"
    )
    options = parser.parse_args()
    if options.measured:
        for series, found in json.loads(options.measured.read_text()).items():
            tables = (_table(rate, rows(found, rate)) for rate in rates(found))
            print(f"## {series}\n\n{summary(found)}\n\n" + "\n\n".join(tables) + "\n")
        options.output.mkdir(parents=True, exist_ok=True)
        whole = next(iter(json.loads(options.measured.read_text()).values()))
        _plot(options.output / "interconnect.png", {rate: rows(whole, rate) for rate in rates(whole)})
        return
    options.output.mkdir(parents=True, exist_ok=True)
    unknown = set(options.only) - _CONFIGURATIONS.keys()
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: not among {', '.join(_CONFIGURATIONS)}")
    chosen = {_LIMIT, _SYNCHRONISED, *options.only} if options.only else _CONFIGURATIONS.keys()
    with tempfile.TemporaryDirectory() as scratch, EmulatedNodes(2) as cluster:
        data = corpus.write(Path(scratch) / "corpus")
        measured: dict[str, list[dict[str, Any]]] = {}
        for repetition in range(options.repetitions):
            for rate in options.rates:
                print(f"repetition {repetition + 1} of {options.repetitions}, {rate:g} Mbit/s", flush=True)
                cluster.set_rate(rate)
                for results in (
                    run(cluster, Path(scratch), data, _arguments(chosen & _ALONE.keys()), together=False),
                    run(cluster, Path(scratch), data, _arguments(chosen & _TOGETHER.keys()), together=True),
                ):
                    for name, result in results.items():
                        measured.setdefault(f"{rate:g} {name}", []).append(result)
                # Not only at the end: hours may have gone into it.
                (options.output / "interconnect.json").write_text(json.dumps(measured))
    found_at = {rate: rows(measured, rate) for rate in options.rates}
    table = "\n\n".join(_table(rate, found) for rate, found in found_at.items())
    command = f"python benchmarks/interconnect.py --rates {' '.join(f'{rate:g}' for rate in options.rates)}"
    if options.only:
        command += " --only " + " ".join(map(repr, options.only))
    heading = f"`{command} --repetitions {options.repetitions}`, {date.today().isoformat()}\n\n"
    (options.output / "interconnect.md").write_text(heading + table + "\n")
    _plot(options.output / "interconnect.png", found_at)
    print(f"\n{table}\n\nWritten to {options.output}")


def _arguments(chosen: Set[str]) -> dict[str, str]:
    return {name: arguments for name, (arguments, _) in _CONFIGURATIONS.items() if name in chosen}


def run(
    cluster: EmulatedNodes, scratch: Path, data: tuple[Path, Path], trainings: Mapping[str, str], together: bool
) -> dict[str, Any]:
    """Runs trainings, arguments by name, on all nodes: as one job or as one job per node at the same time."""
    train, validation = data
    paths = f"--train-data-path {train} --valid-data-path {validation} --test-data-path {validation}"
    specification = [{"name": name, "argv": f"{_MODEL} {paths} {arguments}".split()} for name, arguments in trainings.items()]
    launch(cluster, scratch, specification, together)
    if together:
        return json.loads((scratch / "results.json").read_text())
    # Nodes that do not know of each other: the slower one counts, as it would in a job.
    alone = [json.loads((scratch / f"results{node}.json").read_text()) for node in range(cluster.size)]
    return {name: max((result[name] for result in alone), key=lambda run: sum(run["seconds"].values())) for name in alone[0]}


def launch(cluster: EmulatedNodes, scratch: Path, trainings: Sequence[Mapping[str, Any]], together: bool = True) -> None:
    """Runs trainings, each with a name and its ``argv``, on all nodes; results are in the scratch folder, see the worker.

    Raises:
        subprocess.CalledProcessError: If one failed; the end of its log has been printed.
    """
    (scratch / "specification.json").write_text(json.dumps(trainings))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "29600"]
    with contextlib.ExitStack() as stack:
        processes = []
        for node in range(cluster.size):
            place = ["--nnodes", str(cluster.size), "--node-rank", str(node), "--master-addr", cluster.address(0)]
            place = place if together else ["--nnodes", "1", "--master-addr", "127.0.0.1"]
            output = scratch / ("results.json" if together else f"results{node}.json")
            command = [*launcher, *place, str(_FOLDER / "training_worker.py"), str(scratch / "specification.json"), str(output)]
            log = stack.enter_context((scratch / f"log{node}.txt").open("w"))
            processes.append(stack.enter_context(cluster.running_on(node)(command, log, _ENVIRONMENT)))
        for node, process in enumerate(processes):
            if process.wait() != 0:
                print((scratch / f"log{node}.txt").read_text()[-5000:], file=sys.stderr)
                raise subprocess.CalledProcessError(process.returncode, f"the trainings on node {node}")


def rates(measured: dict[str, list[dict[str, Any]]]) -> list[float]:
    """The rates of the links in Mbit/s that were measured, the highest first."""
    return sorted({float(name.split()[0]) for name in measured}, reverse=True)


def times_wire(row: dict[str, Any], rate: float) -> float | None:
    """Outer steps of an interval, in the time that their bytes take at the link's rate; None for a row without any."""
    wire = row["outer bytes"] * 8 / (rate * 1e6)
    return row["outer seconds"] / wire if row["outer steps"] and wire else None


def summary(measured: dict[str, list[dict[str, Any]]]) -> str:
    """One table of all rates: the best interval against one group alone, and outer steps against the wire."""
    columns = [f"{rate:g} Mbit/s, x alone | x wire" for rate in rates(measured)]
    lines = [f"| | MB on the link per iteration | {' | '.join(columns)} |", "|---|---" + "|---|---" * len(columns) + "|"]
    found = {rate: {row["name"]: row for row in rows(measured, rate)} for rate in rates(measured)}
    for name in next(iter(found.values())):
        cells = [f"{statistics.median(at[name]['bytes'] for at in found.values()) / 1e6:.2g}"]
        for rate, at in found.items():
            wire = times_wire(at[name], rate)
            cells += [f"{at[name]['best'] / at[_LIMIT]['best']:.2f}", "" if wire is None else f"{wire:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows(measured: dict[str, list[dict[str, Any]]], rate: float) -> list[dict[str, Any]]:
    """One row per configuration, over all repetitions."""
    found = []
    for name, (_, iterations) in _CONFIGURATIONS.items():
        runs = measured.get(f"{rate:g} {name}")
        if runs is None:
            continue
        seconds = [[run["seconds"][str(i)] for i in iterations] for run in runs]
        steps = [
            [step for step in run["outer steps"] if iterations[0] - 1 < step["iteration"] <= iterations[-1]] for run in runs
        ]
        found.append(
            {
                "name": name,
                "median": statistics.median(statistics.median(times) for times in seconds),
                "fast": statistics.quantiles(itertools.chain(*seconds), n=10)[0],
                "mean": statistics.median(statistics.mean(times) for times in seconds),
                "best": min(statistics.mean(times) for times in seconds),
                "bytes": statistics.median(sum(run["bytes"][str(i)] for i in iterations) for run in runs) / len(iterations),
                "silent bytes": statistics.median(statistics.median(run["bytes"][str(i)] for i in iterations) for run in runs),
                "outer seconds": min(sum(step["seconds"] for step in interval) for interval in steps),
                "outer bytes": statistics.median(sum(step["bytes"] for step in interval) for interval in steps),
                "outer steps": len(steps[0]),
            }
        )
    return found


def _table(rate: float, rows: list[dict[str, Any]]) -> str:
    limit = next(row for row in rows if row["name"] == _LIMIT)
    stock = next(row for row in rows if row["name"] == _SYNCHRONISED)
    lines = [
        f"### {rate:g} Mbit/s",
        "",
        "| | iteration, ms: median | fastest tenth | x alone | interval, mean ms: median | best | x alone "
        "| MB on the link per iteration | between outer steps, % of stock | outer steps of an interval, best s | MB counted "
        "| wire alone, s | x wire |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        wire = row["outer bytes"] * 8 / (rate * 1e6)
        outer = (
            f"{row['outer seconds']:.3f} | {row['outer bytes'] / 1e6:.2f} | {wire:.3f} | {times_wire(row, rate):.2f}"
            if row["outer steps"] and wire
            else " | | |"
        )
        lines.append(
            f"| {row['name']} | {row['median'] * 1e3:.0f} | {row['fast'] * 1e3:.0f} | {row['fast'] / limit['fast']:.2f} "
            f"| {row['mean'] * 1e3:.0f} | {row['best'] * 1e3:.0f} | {row['best'] / limit['best']:.2f} "
            f"| {row['bytes'] / 1e6:.3f} | {row['silent bytes'] / stock['bytes']:.2%} | {outer} |"
        )
    return "\n".join(lines)


def _plot(path: Path, rows: dict[float, list[dict[str, Any]]]) -> None:
    """Draws how many times as long as without a network an iteration takes, a panel for each rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    size = (4.6, 2.9 * len(rows) + 0.8)
    figure, panels = pyplot.subplots(len(rows), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, (rate, found) in zip(panels.flat, sorted(rows.items(), reverse=True), strict=True):
        limit = next(row["best"] for row in found if row["name"] == _LIMIT)
        shown = [row for row in found if row["name"] not in _ALONE]
        times = [row["best"] / limit for row in shown]
        synchronous = ["stock" in row["name"] or "lazy" in row["name"] for row in shown]
        names = [
            row["name"] if other else row["name"].removeprefix("Pier, ") for row, other in zip(shown, synchronous, strict=True)
        ]
        bars = axes.barh(names, times, color=["tab:gray" if other else "tab:blue" for other in synchronous])
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_title(f"{rate:g} Mbit/s", fontsize=10)
        axes.set_xlim(0, 1.25 * max(times))
        axes.tick_params(labelsize=9)
        axes.grid(axis="x", alpha=0.3)
        axes.invert_yaxis()
    kinds = [Patch(color=color, label=label) for label, color in (("synchronous", "tab:gray"), ("Pier", "tab:blue"))]
    figure.legend(handles=kinds, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.suptitle("Mean iteration, one group without a network = 1", fontsize=11)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
