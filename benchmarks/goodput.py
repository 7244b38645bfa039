"""Goodput of elastic islands under faults: how much of what the islands present could train reached an outer step.

``python benchmarks/goodput.py``: 15 minutes of faults behind 3 quiet ones, on Linux, as root or where user namespaces are
allowed. ``--minutes 2 --quiet-minutes 1`` tries it out. Two cores suffice; what else runs on them lowers the result.

Eight islands of plain PyTorch, each on an emulated node, train a small model: an iteration every tenth of a second, an outer
step every 20 iterations. A random fault comes every 29 s on average:

- kill: SIGKILL. The launcher on that node starts the island again five seconds later.
- pause: SIGSTOP for one to ten seconds.
- cut: for one to ten seconds nothing that the node sends arrives; it still hears the others.

A sample counts if its outer step was applied. The quiet minutes give the samples that an island trains in a second. An island
is present from when it has joined the others until a fault, and after a pause or a cut unless the others have left it behind
meanwhile. So these count as lost: what an island has trained since the last outer step before a fault, and all waiting for a
dead or silent island and for connections. A second figure also counts as lost what an island could have trained from its
start, or the end of a fault, until it has joined again; the start forks a process which has PyTorch already, as a launcher may.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pier_megatron import PierConfig
from pier_megatron.cpu.nodes import INTERFACE, EmulatedNodes
from pier_megatron.exchange.authentication import new_secret
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.membership import Membership
from pier_megatron.outer import OuterLoop, Shards
from pier_megatron.outer.elastic import ElasticMembership
from pier_megatron.outer.standings import LeftBehindError

_ISLANDS, _INTERVAL, _BATCH, _ITERATION_SECONDS, _PORT = 8, 20, 8, 0.1, 29510
_DEAD_SECONDS, _AWAY_SECONDS, _START_SECONDS = 5.0, (1.0, 10.0), 120.0
_TIMEOUT = datetime.timedelta(seconds=60)

# An address of no card: what a node sends there is lost.
_NOBODY = "02:00:00:00:00:01"


class Node:
    """A node with its launcher and its island, from outside.

    Attributes:
        index: Number of the island.
        away: Pairs of times between which a fault kept the island away.
    """

    def __init__(self, index: int, nodes: EmulatedNodes, folder: Path) -> None:
        """Begins with an island that is not ready."""
        self.index, self.away, self._diary = index, list[tuple[float, float]](), folder / f"island-{index}"
        self._nodes, self._log = nodes, folder / "tools.log"

    def entries(self) -> list[dict[str, Any]]:
        """Entries of the island's log, over all its restarts."""
        return [json.loads(line) for line in self._diary.read_text().splitlines()] if self._diary.exists() else []

    def lives(self) -> list[tuple[float, float]]:
        """Begin and end of each membership of the island; faults that kept it away are not subtracted."""
        found, joined = [], None
        for entry in [*self.entries(), {"pid": 0, "at": float("inf")}]:
            if joined is not None and ("ended" in entry or "pid" in entry):
                # The others left it behind in the last fault before it ended.
                faults = [begin for begin, _ in self.away if begin < entry["at"]] if "ended" in entry else []
                found.append((joined, max([*faults, joined]) if faults else entry["at"]))
            joined = entry["at"] if "joined" in entry else None if "samples" not in entry else joined
        return found

    def steps(self) -> list[tuple[float, int]]:
        """Time of each outer step of the island, and its samples in it."""
        return [(entry["at"], entry["samples"]) for entry in self.entries() if "samples" in entry]

    def is_ready(self) -> bool:
        """Whether the island has joined the others since its last start."""
        return "samples" in self.entries()[-1]

    def kill(self, _seconds: float) -> None:
        """Kills the island; it counts as away until its next process has started."""
        killed = time.monotonic()
        os.kill(self._pid(), signal.SIGKILL)

        def has_started() -> bool:
            return any(entry["at"] > killed for entry in self.entries() if "pid" in entry)

        _until(has_started)
        self.away.append((killed, next(entry["at"] for entry in self.entries() if "pid" in entry and entry["at"] > killed)))

    def pause(self, seconds: float) -> None:
        """Stops the island for a time."""
        with self._kept_away(seconds):
            os.kill(self._pid(), signal.SIGSTOP)
        os.kill(self._pid(), signal.SIGCONT)

    def cut(self, seconds: float) -> None:
        """Drops everything that the node sends, for a time."""
        others = [self._nodes.address(node) for node in range(self._nodes.size) if node != self.index]
        with self._kept_away(seconds):
            self._run("; ".join(f"ip neigh replace {to} lladdr {_NOBODY} nud permanent dev {INTERFACE}" for to in others))
        self._run("; ".join(f"ip neigh del {to} dev {INTERFACE}" for to in others))

    @contextlib.contextmanager
    def _kept_away(self, seconds: float) -> Iterator[None]:
        begun = time.monotonic()
        yield
        time.sleep(seconds)
        self.away.append((begun, time.monotonic()))

    def _pid(self) -> int:
        return int(next(entry["pid"] for entry in reversed(self.entries()) if "pid" in entry))

    def _run(self, command: str) -> None:
        with self._log.open("a") as log, self._nodes.running_on(self.index)(["sh", "-ec", command], log, {}) as process:
            assert process.wait() == 0, self._log.read_text()


FAULTS: dict[str, Callable[[Node, float], None]] = {"kill": Node.kill, "pause": Node.pause, "cut": Node.cut}
"""What happens to a node, by name; waits until it is over."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """Samples of some time.

    Attributes:
        samples: Samples in outer steps.
        present: Seconds in which islands were present, of all of them together.
        possible: The same, and the seconds in which no fault kept them from it.
    """

    samples: int
    present: float
    possible: float

    @classmethod
    def between(cls, nodes: Sequence[Node], begin: float, end: float) -> "Counted":
        """Counts from one time to another."""
        samples = sum(samples for node in nodes for at, samples in node.steps() if begin < at <= end)
        present = possible = 0.0
        for node in nodes:
            possible += _seconds([(begin, end)]) - _seconds(_both([(begin, end)], node.away))
            lives = _both([(begin, end)], node.lives())
            present += _seconds(lives) - _seconds(_both(lives, node.away))
        return cls(samples, present, possible)


Times = Sequence[tuple[float, float]]


def _both(some: Times, others: Times) -> Times:
    """Pairs of times between which both are."""
    pairs = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return [(begin, end) for begin, end in pairs if begin < end]


def _seconds(times: Times) -> float:
    return sum(end - begin for begin, end in times)


def main() -> None:
    """Runs islands and faults, and prints the goodput; with ``--island``, is the launcher of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15, help="minutes with faults (%(default)s)")
    parser.add_argument("--quiet-minutes", type=float, default=3, help="minutes before them, without faults (%(default)s)")
    parser.add_argument("--every", type=float, default=29, help="seconds from fault to fault, on average (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults (%(default)s)")
    parser.add_argument("--keep", type=Path, help="new folder to keep the logs in")
    parser.add_argument("--island", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.island is not None:
        _launch(options.island, options.lighthouse, options.keep)
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        emulated = stack.enter_context(EmulatedNodes(_ISLANDS + 1))
        nodes = _start(emulated, folder, stack)
        begun = time.monotonic()
        time.sleep(60 * options.quiet_minutes)
        ended = time.monotonic()
        faults = _cause_faults(nodes, ended + 60 * options.minutes, options)
        quiet = Counted.between(nodes, begun, ended)
        found = Counted.between(nodes, ended, ended + 60 * options.minutes)
    each = quiet.samples / quiet.possible
    happened = ", ".join(f"{faults[name]} {name}s" for name in FAULTS)
    print(
        f"goodput {100 * found.samples / (each * found.present):.1f} % of what the islands present could have done "
        f"({100 * found.samples / (each * found.possible):.1f} % with restarting and joining counted as lost): "
        f"{found.samples:,} samples of {each * found.present:,.0f}; {happened} in {options.minutes:g} minutes; "
        f"python {' '.join(sys.argv)}"
    )


def _start(emulated: EmulatedNodes, folder: Path, stack: contextlib.ExitStack) -> list[Node]:
    """Starts the nodes; returns them once all islands have taken two outer steps."""
    new_secret(folder / "secret")
    address = emulated.address(_ISLANDS)
    lighthouse = f"lighthouse --islands {_ISLANDS} --address {address} --port {_PORT} --heartbeat-timeout 1 --join-timeout 60"
    island = f"--lighthouse http://{address}:{_PORT} --keep {folder} --island"
    commands = [[__file__, *island.split(), str(index)] for index in range(_ISLANDS)]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "RUST_LOG": "error"}
    for place, command in enumerate([*commands, ["-m", "pier_megatron.cli", *lighthouse.split()]]):
        log = stack.enter_context((folder / f"node-{place}.log").open("w"))
        stack.enter_context(emulated.running_on(place)([sys.executable, *command], log, environment))
    nodes = [Node(index, emulated, folder) for index in range(_ISLANDS)]
    _until(lambda: all(len(node.steps()) > 1 for node in nodes))
    return nodes


def _cause_faults(nodes: Sequence[Node], end: float, options: argparse.Namespace) -> collections.Counter[str]:
    """Causes faults until ``end``, each on an island that has joined the others; returns the number of each kind."""
    chance, happened = random.Random(options.seed), collections.Counter[str]()
    # Independent of each other: one may begin before another is over.
    begun = time.monotonic()
    times = sorted(chance.uniform(begun, end) for _ in range(round((end - begun) / options.every)))
    with futures.ThreadPoolExecutor() as pool:
        under_way: dict[futures.Future[None], Node] = {}
        for at in times:
            time.sleep(max(at - time.monotonic(), 0))
            name, seconds = chance.choice([*FAULTS]), chance.uniform(*_AWAY_SECONDS)
            busy = [node for fault, node in under_way.items() if not fault.done()]
            healthy = [node for node in nodes if node not in busy and node.is_ready()]
            if healthy:
                victim = chance.choice(healthy)
                under_way[pool.submit(FAULTS[name], victim, seconds)] = victim
                happened[name] += 1
                print(f"{time.monotonic():.1f} {name} of island {victim.index} for {seconds:.1f} s", flush=True)
        for fault in under_way:
            fault.result()
    time.sleep(max(end - time.monotonic(), 0))
    return happened


def _until(condition: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < _START_SECONDS, "an island does not start; see --keep"
        time.sleep(0.05)


def _launch(index: int, lighthouse: str, folder: Path) -> None:
    """Starts the island of a node again and again, as torchrun with ``--max-restarts`` does."""
    while True:
        island = os.fork()
        if island == 0:
            try:
                _train(index, lighthouse, folder)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        _, status = os.waitpid(island, 0)
        time.sleep(_DEAD_SECONDS if os.WIFSIGNALED(status) else 0)


def _train(index: int, lighthouse: str, folder: Path) -> None:
    """Trains as an island until the others leave it behind."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = PierConfig(groups=_ISLANDS, train_iters=10**6, sync_interval=_INTERVAL, lazy_start_iters=0)
    world, address, secret = dist.group.WORLD, EmulatedNodes.address(index), str(folder / "secret")
    with (folder / f"island-{index}").open("a", buffering=1) as diary:

        def note(**entry: Any) -> None:
            diary.write(json.dumps(entry | {"at": time.monotonic()}) + "\n")

        note(pid=os.getpid())
        assert world is not None
        membership = Membership(index, lighthouse, address, world, config.codec, _TIMEOUT, {}, _ISLANDS, secret)
        loop = OuterLoop(
            [[Shards([*model.parameters()])]],
            config,
            GroupExchange(None, config.codec),
            group=world,
            inner_state=lambda _: {},
            islands=ElasticMembership(membership, index, _TIMEOUT.total_seconds()),
        )
        loop.join()
        note(joined=loop.iteration)
        data, samples = torch.Generator().manual_seed(index), 0
        while not loop.is_deserted:
            begun = time.monotonic()
            loop.begin_iteration(loop.iteration + 1)
            inputs = torch.randn(_BATCH, 64, generator=data)
            optimizer.zero_grad()
            (model(inputs).squeeze() - inputs.sum(1)).square().mean().backward()
            optimizer.step()
            samples += _BATCH
            time.sleep(max(_ITERATION_SECONDS - (time.monotonic() - begun), 0))
            try:
                loop.end_iteration()
            except LeftBehindError:
                note(ended=loop.iteration)
                raise
            if loop.iteration % _INTERVAL == 0:
                note(samples=samples, iteration=loop.iteration)
                samples = 0


if __name__ == "__main__":
    main()
