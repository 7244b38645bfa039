"""The simulation of ``pier-megatron plan --mtbf --spread`` against what was measured: ``python benchmarks/rounds.py``.

Prints the tables of docs/planner.md: the error on each set of measurements, published figures, and groups up to 10,000.
``--measure`` takes the first set again (Linux, root: it makes network namespaces; some 20 minutes): the real outer loop, the
real lighthouse and real kills, around iterations that sleep, so that cores do not count.

What the simulation is given is named beside each set: times of a row without a network, bytes, rates and when islands die. No
constant of it was chosen on these points, except the share of a link that TCP achieves (``TCP_EFFICIENCY``), which is the
median of the blocking FP32 rows of docs/interconnect.json.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import interconnect
import numpy as np

from pier_megatron.commands.plan.cluster import TCP_EFFICIENCY
from pier_megatron.commands.plan.rounds import (
    Faults,
    Groups,
    Islands,
    Membership,
    Outcome,
    elastic,
    kept_share,
    one_launch,
    young_interval,
)
from pier_megatron.cpu.nodes import EmulatedNodes
from pier_megatron.exchange.codecs import BLOCK, CODECS

_FOLDER = Path(__file__).resolve().parent
_DOCS = _FOLDER.parent / "docs"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_PORT = 29600


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured figure and the simulated one.

    Attributes:
        name: What was measured.
        measured: Measured figure.
        simulated: Simulated figure.
    """

    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Error of the simulation as a share of what was measured."""
        return self.simulated / self.measured - 1


@dataclasses.dataclass(frozen=True)
class Training:
    """A training of six groups whose iterations sleep.

    Attributes:
        spread: Standard deviation of the groups' seconds per iteration.
        jitter: Standard deviation of one group's iterations.
        interval: Iterations between outer steps.
        iterations: Iterations of the run; an elastic run is ended before.
        preset: Preset of the outer step.
        overlap: Iterations behind which an exchange is hidden.
        dtype: Codec.
        rate: Rate of all links in Mbit/s; None for no limit.
        slow: Multiple of the rate of the last group's link.
        parameters: Number of parameters.
        least: Fewest islands of a quorum; 0 for one launch.
        rest_after: Seconds of training after which an island rests.
        mtbf: Mean seconds between kills of an island.
        heartbeat_timeout: The lighthouse's.
        alone: Whether the groups do not know of each other.
    """

    spread: float = 0.0
    jitter: float = 0.0
    interval: int = 10
    iterations: int = 150
    preset: str = "diloco"
    overlap: int = 0
    dtype: str = "fp32"
    rate: float | None = 40.0
    slow: float = 1.0
    parameters: int = 500_000
    least: int = 0
    rest_after: float | None = None
    mtbf: float | None = None
    heartbeat_timeout: int = 5
    alone: bool = False

    def groups(self, overhead: float = 0.0) -> Groups:
        """Groups of the simulation, with so many seconds of an iteration beside its sleep."""
        in_pairs = self.preset == "noloco"
        sent = CODECS[self.dtype].nbytes(BLOCK) / BLOCK * self.parameters * (1 if in_pairs else 2 * (_GROUPS - 1) / _GROUPS)
        far = 1 / self.slow
        return Groups(
            _GROUPS,
            self.interval,
            _SLEPT + overhead,
            exchange=8 * sent / (self.rate * 1e6 * TCP_EFFICIENCY) if self.rate else 0.0,
            overlap=self.overlap,
            in_pairs=in_pairs,
            spread=self.spread,
            jitter=self.jitter,
            # The last group is a site of its own.
            slowness=tuple(
                tuple(far if _GROUPS - 1 in (one, other) else 1.0 for other in range(_GROUPS)) for one in range(_GROUPS)
            ),
        )

    def simulated(self, overhead: float, restart: float) -> float:
        """Simulated seconds of a group for each iteration that counts."""
        groups = self.groups(overhead)
        if not self.least:
            return one_launch(groups, Faults()).cost * groups.iteration
        # Processes are killed: their connections close at once.
        membership = Membership(self.least, self.rest_after, heartbeat_timeout=self.heartbeat_timeout, island_timeout=0.0)
        # Nothing is saved here; what would be lost if all islands died at once was not seen.
        faults = Faults() if self.mtbf is None else Faults(self.mtbf, restart, save_every=0.0)
        return elastic(groups, faults, membership, rounds=2000).cost * groups.iteration


# Groups of the trainings that are measured here, and seconds for which they sleep in an iteration.
_GROUPS, _SLEPT = 6, 0.06

_ELASTIC = Training(jitter=0.1, interval=20, iterations=1_000_000, rate=None, parameters=10_000, least=2)
_KILLED = dataclasses.replace(_ELASTIC, mtbf=30.0)
_ALONE = "each group alone"
TRAININGS = {
    _ALONE: Training(rate=None, alone=True),
    "all groups": Training(),
    "all groups, jitter 40 %": Training(jitter=0.4),
    "all groups, speeds spread by 15 %": Training(spread=0.15, jitter=0.1),
    "all groups, jitter 40 %, overlapped by 5": Training(jitter=0.4, overlap=5),
    "all groups, jitter 40 %, overlapped by 10": Training(jitter=0.4, overlap=10),
    "all groups, int8": Training(dtype="int8"),
    "all groups, one link at a quarter": Training(slow=0.25),
    "pairs": Training(preset="noloco"),
    "pairs, jitter 40 %": Training(jitter=0.4, preset="noloco"),
    "pairs, speeds spread by 15 %": Training(spread=0.15, jitter=0.1, preset="noloco"),
    "pairs, one link at a quarter": Training(slow=0.25, preset="noloco"),
    "elastic islands": _ELASTIC,
    "elastic islands, speeds spread by 15 %": dataclasses.replace(_ELASTIC, spread=0.15),
    "elastic islands, speeds spread by 15 %, rest after 1 s": dataclasses.replace(_ELASTIC, spread=0.15, rest_after=1.0),
    "elastic islands, each killed every 60 s": dataclasses.replace(_KILLED, mtbf=60.0),
    "elastic islands, each killed every 30 s": _KILLED,
    "elastic islands, each killed every 30 s, heartbeat time-out 2 s": dataclasses.replace(_KILLED, heartbeat_timeout=2),
    "elastic islands, each killed every 60 s, at least 5 in a quorum": dataclasses.replace(_KILLED, mtbf=60.0, least=5),
    "elastic islands, each killed every 30 s, speeds spread by 15 %, rest after 1 s": dataclasses.replace(
        _KILLED, spread=0.15, rest_after=1.0
    ),
}

# Seconds from a kill to the start of another process.
_REPLACED = 5.0

# Seconds for which elastic islands are watched.
_WATCHED = 120.0


def measure(training: Training) -> dict[str, float]:
    """Runs a training; returns its seconds, the iterations that counted, and the mean seconds of a restart."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        return _Run(training, Path(folder), stack).measured()


class _Run:
    def __init__(self, training: Training, folder: Path, stack: contextlib.ExitStack) -> None:
        self._training, self._folder, self._stack = training, folder, stack
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._nodes: EmulatedNodes | None = None
        lighthouse = None
        if training.least:
            lighthouse = f"http://127.0.0.1:{_PORT}"
            words = f"lighthouse --islands {_GROUPS} --min-islands {training.least} --port {_PORT}"
            words += f" --heartbeat-timeout {training.heartbeat_timeout}"
            self._start(-1, [sys.executable, "-m", "pier_megatron.commands.cli", *words.split()], {})
            time.sleep(10)
        elif training.rate is not None:
            self._nodes = stack.enter_context(EmulatedNodes(_GROUPS))
            self._nodes.set_rate(training.rate)
            self._nodes.set_rate(training.rate * training.slow, [_GROUPS - 1])
        specification = dataclasses.asdict(training) | {
            "groups": 1 if training.alone else _GROUPS,
            "lighthouse": lighthouse,
            "seconds": training.groups().speeds.tolist(),
        }
        (folder / "specification").write_text(json.dumps(specification))

    def _start(self, group: int, command: Sequence[str], environment: dict[str, str]) -> None:
        log = self._stack.enter_context((self._folder / f"{group}.txt").open("a"))
        if self._nodes is not None:
            context = self._nodes.running_on(group)(command, log, _ENVIRONMENT | environment)
            self._processes[group] = self._stack.enter_context(context)
            return
        variables = os.environ | _ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"} | environment
        self._processes[group] = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
        self._stack.callback(self._end, self._processes[group])

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        process.wait()

    def _start_group(self, group: int) -> None:
        first = "127.0.0.1" if self._nodes is None else self._nodes.address(0)
        place = {"RANK": str(group), "WORLD_SIZE": str(_GROUPS)}
        if self._training.alone:
            place = {"RANK": "0", "WORLD_SIZE": "1"}
        port = str(_PORT + 1 + (group if self._training.alone else 0))
        command = [sys.executable, str(_FOLDER / "rounds_worker.py"), str(self._folder / "specification"), str(group)]
        command.append(str(self._folder / f"{group}.log"))
        self._start(group, command, place | {"MASTER_ADDR": first, "MASTER_PORT": port})

    def measured(self) -> dict[str, float]:
        groups = range(_GROUPS)
        for group in groups:
            self._start_group(group)
        if not self._training.least:
            for group in groups:
                if self._processes[group].wait():
                    raise RuntimeError((self._folder / f"{group}.txt").read_text()[-3000:])
            return self._of_groups()
        while not all(sum("iteration" in entry for entry in self._entries(group)) >= 3 for group in groups):
            time.sleep(0.5)
        begun = time.time()
        killed = self._kill_until(begun + _WATCHED)
        restarts = [seconds for group in groups for seconds in self._restarts(group, killed[group])]
        return self._watched(begun) | {
            "failures": len(restarts),
            "restart": statistics.mean(restarts) if restarts else 0.0,
        }

    def _kill_until(self, end: float) -> list[list[float]]:
        """Kills islands at random times, and starts them again; returns when, for each of them."""
        chance, killed = random.Random(0), [[] for _ in range(_GROUPS)]  # type: tuple[random.Random, list[list[float]]]

        def next_kill() -> float:
            return time.time() + (math.inf if self._training.mtbf is None else chance.expovariate(1 / self._training.mtbf))

        due = [(next_kill(), group, True) for group in range(_GROUPS)]
        while (earliest := min(due))[0] < end:
            due.remove(earliest)
            at, group, kills = earliest
            time.sleep(max(at - time.time(), 0.0))
            if kills:
                self._end(self._processes[group])
                killed[group].append(time.time())
                due.append((time.time() + _REPLACED, group, False))
            else:
                self._start_group(group)
                due.append((next_kill(), group, True))
        time.sleep(max(end - time.time(), 0.0))
        return killed

    def _restarts(self, group: int, killed: Sequence[float]) -> Iterator[float]:
        """Seconds of each of an island's restarts: from a kill to where it asks to join; kills between belong to it."""
        asked = sorted(entry["at"] for entry in self._entries(group) if "asks" in entry)
        before = -math.inf
        for at in asked:
            between = [kill for kill in killed if before < kill < at]
            if between:
                yield at - between[0]
            before = at

    def _entries(self, group: int) -> list[dict[str, Any]]:
        path = self._folder / f"{group}.log"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def _steps(self, group: int) -> list[dict[str, Any]]:
        # Groups in pairs agree on a mean after the last iteration.
        return [entry for entry in self._entries(group) if entry.get("iteration", math.inf) < self._training.iterations]

    def _of_groups(self) -> dict[str, float]:
        """Mean seconds of a group from its first outer step to its last, and iterations that count there, of all groups."""
        of_groups = [self._steps(group) for group in range(_GROUPS)]
        seconds = statistics.mean(steps[-1]["at"] - steps[0]["at"] for steps in of_groups)
        return {"seconds": seconds, "counted": sum(entry["trained"] for steps in of_groups for entry in steps[1:])}

    def _watched(self, begin: float) -> dict[str, float]:
        """Seconds from the first outer step in a span of time to the last, and iterations that count there, of all islands."""
        steps = [entry for group in range(_GROUPS) for entry in self._steps(group) if entry["at"] >= begin]
        first = min(steps, key=lambda entry: entry["at"])["iteration"]
        begun = max(entry["at"] for entry in steps if entry["iteration"] == first)
        counted = sum(entry["trained"] for entry in steps if entry["iteration"] > first)
        return {"seconds": max(entry["at"] for entry in steps) - begun, "counted": counted}


def of_loop(path: Path) -> list[Point]:
    """The real outer loop, real kills and the real lighthouse around iterations that sleep; milliseconds."""
    measured = json.loads(path.read_text())
    of_iteration = {
        name: statistics.median(_GROUPS * found["seconds"] / found["counted"] for found in runs)
        for name, runs in measured.items()
    }
    overhead = of_iteration[_ALONE] - _SLEPT
    restarts = {name: statistics.median(found.get("restart", 0.0) for found in runs) for name, runs in measured.items()}
    return [
        Point(name, 1e3 * of_iteration[name], 1e3 * TRAININGS[name].simulated(overhead, restarts[name]))
        for name in measured
        if name != _ALONE
    ]


# Rows of docs/interconnect.json: overlap, fragments and codec; None for an exchange of gradients in every iteration.
_ROWS: dict[str, tuple[int, int, str] | None] = {
    "stock, 2 instances": None,
    "Pier, lazy start": None,
    "Pier, blocking": (0, 1, "fp32"),
    "Pier, blocking, overlap flags": (0, 1, "fp32"),
    "Pier, overlapped by 25": (25, 1, "fp32"),
    "Pier, 5 fragments": (0, 5, "fp32"),
    "Pier, 5 fragments, overlapped by 10": (10, 5, "fp32"),
    "Pier, blocking, bf16": (0, 1, "bf16"),
    "Pier, blocking, int8": (0, 1, "int8"),
    "Pier, blocking, int4": (0, 1, "int4"),
}
_FITTED = ("Pier, blocking", "Pier, blocking, overlap flags")
_BENCH_INTERVAL, _BENCH_PARAMETERS = 50, 3_245_568


def of_links() -> list[Point]:
    """docs/interconnect.json: two emulated nodes, mean iteration in milliseconds."""
    found = []
    for measured in json.loads((_DOCS / "interconnect.json").read_text()).values():
        for rate in interconnect.rates(measured):
            rows = {row["name"]: row["mean"] for row in interconnect.rows(measured, rate)}
            alone = rows["one group alone"]
            for name in _ROWS.keys() & rows.keys():
                simulated = one_launch(_bench_groups(_ROWS[name], alone, rate), Faults()).cost * alone
                found.append(Point(f"{name}, {rate:g} Mbit/s", 1e3 * rows[name], 1e3 * simulated))
    return sorted(found, key=lambda point: point.name)


def _bench_groups(row: tuple[int, int, str] | None, alone: float, rate: float) -> Groups:
    overlap, fragments, dtype = row or (0, 1, "fp32")
    interval = (_BENCH_INTERVAL if row else 1) / fragments
    sent = CODECS[dtype].nbytes(BLOCK) / BLOCK * _BENCH_PARAMETERS / fragments
    return Groups(2, interval, alone, exchange=_seconds(sent, rate), overlap=overlap, jitter=0.04)


def _seconds(nbytes: float, megabits: float) -> float:
    return 8 * nbytes / (megabits * 1e6 * TCP_EFFICIENCY)


# docs/performance.md, "Pairs, and one bad link": milliseconds of an iteration with all groups and in pairs.
_PAIRS = {"all links alike": (193.0, 208.0), "one link at a quarter": (309.0, 282.0), "stalls": (209.0, 198.0)}


def of_pairs() -> list[Point]:
    """docs/performance.md: four emulated nodes; compute is known from the first row, and stalls are not modelled."""
    all_groups, in_pairs = (_seconds(factor * 4 * _BENCH_PARAMETERS, 400) for factor in (2 * 3 / 4, 1))
    compute = _PAIRS["all links alike"][0] / 1e3 - all_groups / 10
    found = []
    for link, measured in _PAIRS.items():
        far = 4.0 if "quarter" in link else 1.0
        slowness = tuple(tuple(far if 3 in (one, other) else 1.0 for other in range(4)) for one in range(4))
        for pairs, seconds in enumerate((all_groups, in_pairs)):
            groups = Groups(4, 10, compute, exchange=seconds, in_pairs=bool(pairs), jitter=0.04, slowness=slowness)
            simulated = one_launch(groups, Faults()).cost * compute
            found.append(Point(f"{link}, {'pairs' if pairs else 'all groups'}", measured[pairs], 1e3 * simulated))
    return found[1:]


# docs/reliability.md, "How long it takes": seconds on two days.
_ISLANDS = {"none": (2.0, 2.5), "killed": (5.7, 5.6), "stops": (6.3, 7.2), "counts again": (2.2, 2.3)}


def of_islands() -> list[Point]:
    """docs/reliability.md: three islands with real Megatron; the row without a fault is what an iteration is known from."""
    found = []
    for day in range(2):
        # Until the second outer step from a moment between two, and an iteration that logs it.
        iteration = _ISLANDS["none"][day] / statistics.mean(range(12, 22))
        expected = statistics.mean(_until_second_step(iteration, phase) for phase in range(10))
        for name in ("killed", "stops"):
            found.append(Point(f"{name}, day {day + 1}", _ISLANDS[name][day], expected))
        found.append(Point(f"counts again, day {day + 1}", _ISLANDS["counts again"][day], 20 * iteration))
    return found


def _until_second_step(iteration: float, phase: int) -> float:
    """Seconds until two outer steps are taken and an iteration is logged, where an island dies after some of an interval."""
    islands = Islands(Groups(3, 10, iteration), Faults(), Membership(2), seed=0)
    left = np.full(3, (10 - phase) * iteration)
    return islands.quorum(left, np.array([np.inf, np.inf, 0.0])) + 11 * iteration


# Megabits per second, thousand tokens per second with outer steps every 100 iterations, and with gradients in every iteration:
# torchft on two machines, 51 million parameters, from the charts of nicholi.ai (13 June 2026, "Machines That Keep Dying").
_THIRD_PARTY = ((1000, 37.4, 5.29), (100, 32.0, 1.58), (50, 27.4, 0.86))


def of_third_party() -> list[Point]:
    """Another implementation over shaped links, in thousand tokens per second.

    Compute and tokens of an iteration are known from its fastest and slowest link with outer steps.
    """
    nbytes = 4 * 51e6
    (fast, high, _), _, (slow, low, _) = _THIRD_PARTY
    # 100 iterations take 100 K / high and 100 K / low seconds; they differ by the two exchanges.
    tokens = (_seconds(nbytes, slow) - _seconds(nbytes, fast)) / 100 / (1 / low - 1 / high)
    compute = tokens / high - _seconds(nbytes, fast) / 100
    found = []
    for rate, local, synchronous in _THIRD_PARTY:
        for name, interval, measured in (("H = 100", 100, local), ("synchronous", 1, synchronous)):
            groups = Groups(2, interval, compute, exchange=_seconds(nbytes, rate))
            simulated = tokens / (one_launch(groups, Faults()).cost * compute)
            found.append(Point(f"{name}, {rate} Mbit/s", measured, simulated))
    return [point for point in found if point.name not in (f"H = 100, {fast} Mbit/s", f"H = 100, {slow} Mbit/s")]


# Learners, millions of chips and goodput in percent of Decoupled DiLoCo (arXiv 2604.21428, tables 1 and 11): simulated by its
# authors, with a failure of each chip once a year, H = 24, and no learner waiting for another.
_GOODPUT = ((2, 1.2, 70.0), (4, 1.2, 82.0), (8, 1.2, 88.0), (16, 1.2, 93.0), (8, 2.4, 80.0), (16, 2.4, 86.0))
_YEAR = 365.25 * 24 * 3600
_GOODPUT_RESTART = 6.0


def of_goodput() -> list[Point]:
    """Another simulation: goodput in percent; the seconds of a restart are chosen on 8 learners of 1.2 million chips."""
    found = []
    for learners, millions, published in _GOODPUT:
        groups = Groups(learners, 24, 1.0)
        membership = Membership(1, heartbeat_timeout=0.0, tick=0.0)
        faults = Faults(_YEAR / (millions * 1e6 / learners), _GOODPUT_RESTART, save_every=0.0)
        simulated = elastic(groups, faults, membership, rounds=2000)
        found.append(Point(f"{learners} learners, {millions:g} M chips", published, 100 * simulated.trains))
    return found


# Minutes of 3,000 steps on 64 H200 with live migration, which hardly stops, and with restarts from a checkpoint of every 100
# steps; a failure every 2,700 to 4,500 s (clockwork.io, "Keeping Distributed Training Running Through Failures").
_MIGRATION, _CHECKPOINTS, _TORCHFT = 405.0, 818.0, 930.0
_BETWEEN = np.random.default_rng(0).uniform(2700, 4500, 100_000)


def minutes_with_checkpoints(restart: float) -> float:
    """Simulated minutes of that run with checkpoints, for a restart of so many minutes."""
    return _MIGRATION / kept_share(_BETWEEN, Faults(restart=60 * restart, save_every=60 * _MIGRATION / 30))


def minutes_of_islands(restart: float, interval: int) -> float:
    """Simulated minutes for as many samples with eight elastic islands of one node, for a restart of so many minutes."""
    step = 60 * _MIGRATION / 3000
    groups, faults = (
        Groups(8, interval, step),
        Faults(8 * float(_BETWEEN.mean()), 60 * restart, save_every=60 * _MIGRATION / 30),
    )
    return _MIGRATION * elastic(groups, faults, Membership(5), rounds=1000).cost


def published() -> list[str]:
    """The published run beside what the simulation makes of it."""
    lines = [
        "| minutes of a restart | restarts from checkpoints | elastic islands, H = 10 | H = 100 |",
        "|---|---|---|---|",
    ]
    for restart in (5, 10, 15, 20, 25):
        islands = (minutes_of_islands(restart, interval) for interval in (10, 100))
        lines.append(f"| {restart} | {minutes_with_checkpoints(restart):,.0f} | {' | '.join(f'{m:,.0f}' for m in islands)} |")
    return lines


# Hours between failures of a node: 419 failures in 54 days on 2,048 nodes (arXiv 2407.21783), and a tenth of it.
_NODE_HOURS = (6334.0, 633.0)
_NUMBERS = (10, 30, 100, 300, 1000, 3000, 10_000)


def of_sizes(numbers: Sequence[int] = _NUMBERS) -> list[str]:
    """Ways to train with up to 10,000 groups of one node: share of time that trains, of samples that count, and cost."""
    lines = [
        "| a node fails every | groups | synchronous | one launch | pairs | elastic islands | elastic islands that rest |",
        "|---|---|---|---|---|---|---|",
    ]
    for hours in _NODE_HOURS:
        lines += [f"| {hours:,.0f} h | {number:,} | {' | '.join(_cells(number, hours))} |" for number in numbers]
    return lines


def _cells(number: int, hours: float) -> Iterator[str]:
    mtbf, save = 3600 * hours, 30.0
    faults = Faults(mtbf, restart=600.0, save=save, save_every=young_interval(mtbf / number, save))
    groups = Groups(number, 50, 2.0, exchange=10.0, spread=0.05, jitter=0.02)
    rounds = max(100, min(2000, 1_000_000 // number))
    synchronous = dataclasses.replace(groups, interval=1, exchange=0.0)
    pairs = dataclasses.replace(groups, in_pairs=True, exchange=5.0, together_every=2)
    for way in (synchronous, groups, pairs):
        yield _cell(one_launch(way, faults, min(rounds, 400)))
    of_islands = dataclasses.replace(faults, save_every=young_interval(mtbf, save))
    for rest_after in (None, 50 * float(groups.speeds.min())):
        membership = Membership(number // 2 + 1, rest_after, takeover=10.0)
        yield _cell(elastic(groups, of_islands, membership, rounds))


def _cell(outcome: Outcome) -> str:
    if outcome.cost > 100:
        return "never ends"
    return f"{outcome.trains:.0%}, {outcome.counts:.1%}, {outcome.cost:.2f} x"


def _is_fitted(point: Point) -> bool:
    return point.name.rpartition(",")[0] in _FITTED


def summary(path: Path) -> list[str]:
    """The error on each set of measurements."""
    loop = of_loop(path)
    links = {is_fitted: [point for point in of_links() if _is_fitted(point) == is_fitted] for is_fitted in (False, True)}
    sets = {
        "outer loop around iterations that sleep, six groups of one launch": [
            point for point in loop if not point.name.startswith("elastic")
        ],
        "the same, six elastic islands, real lighthouse and kills": [
            point for point in loop if point.name.startswith("elastic")
        ],
        "two emulated nodes, real Megatron, rows not fitted": links[False],
        "the same, blocking FP32, which the efficiency of TCP is fitted to": links[True],
        "four emulated nodes, real Megatron, all groups and pairs": of_pairs(),
        "three elastic islands, real Megatron": of_islands(),
        "torchft over shaped links (another implementation)": of_third_party(),
        "Decoupled DiLoCo's own simulation": of_goodput(),
    }
    lines = ["| measured | points | median error | worst |", "|---|---|---|---|"]
    for name, points in sets.items():
        worst = max(points, key=lambda point: abs(point.error))
        median = statistics.median(abs(point.error) for point in points)
        lines.append(f"| {name} | {len(points)} | {median:.1%} | {worst.error:+.1%}: {worst.name} |")
    return lines


def table(path: Path) -> list[str]:
    """Every point."""
    points = [*of_loop(path), *of_links(), *of_pairs(), *of_islands(), *of_third_party(), *of_goodput()]
    return [
        "| | measured | simulated | error |",
        "|---|---|---|---|",
        *(f"| {point.name} | {point.measured:,.1f} | {point.simulated:,.1f} | {point.error:+.1%} |" for point in points),
    ]


def measure_all(path: Path, repetitions: int, only: Sequence[str]) -> None:
    """Runs all trainings, one after the other, and writes what was measured."""
    measured: dict[str, list[dict[str, float]]] = {}
    for _ in range(repetitions):
        for name, training in TRAININGS.items():
            if only and name not in only:
                continue
            measured.setdefault(name, []).append(found := measure(training))
            print(f"{name}: {1e3 * _GROUPS * found['seconds'] / found['counted']:.1f} ms {found}", flush=True)
            path.write_text(json.dumps(measured, indent=1) + "\n")


def main() -> None:
    """Measures, or prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="JSON", help="measure the outer loop, and write to this file")
    parser.add_argument("--repetitions", type=int, default=1, help="of what is measured (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="trainings to measure")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        default=_DOCS / "rounds.json",
        metavar="JSON",
        help="what was measured (%(default)s)",
    )
    options = parser.parse_args()
    if options.measure:
        measure_all(options.measure, options.repetitions, options.only)
        return
    print("\n".join([*summary(options.source), "", *table(options.source), "", *published(), "", *of_sizes()]))


if __name__ == "__main__":
    main()
