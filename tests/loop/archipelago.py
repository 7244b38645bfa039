"""Islands that are jobs, without Megatron: a real lighthouse, real processes, and what a simulation makes of their membership.

Each island is a process that stands for its launcher, with a rank for each part of the model below it. Each rank writes down
every outer step: who met, what they said of themselves, and the anchor that came of it.
"""

import contextlib
import dataclasses
import datetime
import json
import multiprocessing
import os
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron import PierConfig
from pier_megatron.commands import lighthouse
from pier_megatron.exchange.collectives import GroupExchange, Sum
from pier_megatron.exchange.membership import Membership
from pier_megatron.outer import OuterLoop, Shards
from pier_megatron.outer.gathering import Islands
from pier_megatron.outer.verdicts import ABSENT, GOOD

INTERVAL, MU, ETA = 5, 0.9, 0.7
PARTS = 2
HEARTBEAT_TIMEOUT, ISLAND_TIMEOUT = 1, 4
"""Seconds, of the lighthouse and of the islands."""

LIMIT = HEARTBEAT_TIMEOUT + ISLAND_TIMEOUT + 5
"""Seconds within which islands go on after anything: both time-outs, and time for a busy machine."""

_ENDLESS = 1_000_000
_INNER_LR, _INNER_MOMENTUM = 0.05, 0.5

Step = dict[str, Any]
"""What a rank wrote down of an outer step."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an island does.

    Attributes:
        index: Its number.
        train_iters: Iterations after which it ends.
        seconds: That an iteration takes.
        islands: Most that there may be.
        wait_seconds: How long it waits for enough others.
        dies_at: Iteration after which it kills itself in the middle of the exchange.
        bad_at: Iteration in which its first rank's parameters become nan.
        seed: Of its parameters.
        codec: What sums look like on the wire.
        sabotage: Name of a bug planted in it, see :data:`BUGS`.
    """

    index: int
    train_iters: int = _ENDLESS
    seconds: float = 0.01
    islands: int = 3
    wait_seconds: float = 60.0
    dies_at: int | None = None
    bad_at: int | None = None
    seed: int = 0
    codec: str = "fp32"
    sabotage: str | None = None

    def config(self) -> PierConfig:
        return PierConfig(
            groups=self.islands,
            train_iters=self.train_iters,
            sync_interval=INTERVAL,
            lazy_start_iters=0,
            outer_lr=ETA,
            outer_momentum=MU,
            exchange_dtype=self.codec,
            no_error_feedback=True,
        )


class Model:
    """The part of an island's model that a rank owns, and its inner optimizer: gradient descent with momentum."""

    def __init__(self, index: int, part: int, seed: int = 0) -> None:
        self._index, self._part = index, part
        self.parameters = [parameter + seed for parameter in ranks.initial(part)[: len(ranks.SPLIT)]]
        self.moments = [torch.zeros_like(parameter) for parameter in self.parameters]

    def step(self, iteration: int) -> None:
        copied = [torch.zeros(shape) for shape in ranks.COPIED]
        grads = ranks.gradient([*self.parameters, *copied], self._part, self._index, iteration)
        for parameter, moment, grad in zip(self.parameters, self.moments, grads, strict=False):
            moment.mul_(_INNER_MOMENTUM).add_(grad)
            parameter.sub_(moment, alpha=_INNER_LR)

    def flat(self) -> Tensor:
        return torch.cat([parameter.reshape(-1) for parameter in self.parameters])

    def set(self, flat: Tensor) -> None:
        for parameter, values in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))


def simulate(steps: Sequence[Step], parts: int = PARTS) -> dict[int, Tensor]:
    """What the outer steps that were written down have to come to.

    Args:
        steps: One of each iteration, in order; of each, who met and who counted.
        parts: Ranks of an island.

    Returns:
        The anchor after each of these iterations, of all parts; float32 by iteration.
    """
    anchors: list[dict[int, Tensor]] = []
    for part in range(parts):
        anchor = Model(0, part).flat()
        momentum, models, before, found = torch.zeros_like(anchor), {}, 0, {}
        for step in steps:
            joined = [island for island, said in zip(step["islands"], step["verdicts"], strict=True) if said == ABSENT]
            for island in step["islands"]:
                if island in joined or island not in models:
                    models[island] = Model(island, part)
                for iteration in range(before + 1, step["iteration"] + 1) if island not in joined else ():
                    models[island].step(iteration)
            counted = [island for island, said in zip(step["islands"], step["verdicts"], strict=True) if said == GOOD]
            delta = sum(((anchor - models[island].flat()).double() for island in counted), torch.zeros(())).float() / len(counted)
            momentum = MU * momentum + delta
            anchor = anchor - ETA * (delta + MU * momentum)
            for island, said in zip(step["islands"], step["verdicts"], strict=True):
                models[island].set(anchor)
                if said not in (GOOD, ABSENT):
                    for moment, other in zip(models[island].moments, models[counted[0]].moments, strict=True):
                        moment.copy_(other)
            before = step["iteration"]
            found[before] = anchor
        anchors.append(found)
    return {iteration: torch.cat([found[iteration] for found in anchors]) for iteration in anchors[0]}


class _Diary:
    """What a rank writes down, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry | {"at": time.time()}) + "\n")
        self._file.flush()


def _die_in_the_exchange(loop: OuterLoop, iteration: int) -> Callable[..., Sum]:
    asked, begin = [0], GroupExchange.sum

    def sum_(exchange: GroupExchange, *args: Any, **kwargs: Any) -> Sum:
        asked[0] += loop.iteration == iteration
        if asked[0] == 2:
            os.killpg(0, signal.SIGKILL)
        return begin(exchange, *args, **kwargs)

    return sum_


def _be_rank(plan: Plan, part: int, url: str, store: str, diary: _Diary) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=part, world_size=PARTS, timeout=datetime.timedelta(seconds=30)
    )
    world, model, config = dist.group.WORLD, Model(plan.index, part, plan.seed), plan.config()
    assert world is not None
    membership = Membership(plan.index, url, "127.0.0.1", world, config.codec, datetime.timedelta(seconds=ISLAND_TIMEOUT))
    loop = OuterLoop(
        [[Shards(model.parameters)]],
        config,
        GroupExchange(None, config.codec),
        group=world,
        inner_state=lambda parameter: {
            "moment": next(m for p, m in zip(model.parameters, model.moments, strict=True) if p is parameter)
        },
        islands=Islands(membership, plan.index, plan.wait_seconds),
    )

    def note(round_: Any, sums: Any, restarted: Sequence[int]) -> None:
        diary.write(
            iteration=round_.begun,
            islands=round_.meeting.groups,
            verdicts=round_.verdicts.all(),
            anchor=loop.states[0].anchor.tolist(),
            momentum=loop.states[0].momentum.tolist(),
            parameters=model.flat().tolist(),
        )

    diary.write(built=True)
    with mock.patch.object(loop.reports, "add", note), mock.patch.object(loop.reports, "write_arrived"):
        loop.join()
        diary.write(joined=loop.iteration)
        patch = contextlib.ExitStack()
        if plan.dies_at is not None:
            patch.enter_context(mock.patch.object(GroupExchange, "sum", _die_in_the_exchange(loop, plan.dies_at)))
        while loop.iteration < plan.train_iters and not loop.is_deserted:
            loop.begin_iteration(loop.iteration + 1)
            model.step(loop.iteration)
            if loop.iteration == plan.bad_at and part == 0:
                model.parameters[0].view(-1)[3] = float("nan")
            time.sleep(plan.seconds)
            loop.end_iteration()
    diary.write(ended="deserted" if loop.is_deserted else "done")


def _log_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _rank(plan: Plan, part: int, url: str, store: str, folder: Path, name: str) -> None:
    diary = _Diary(folder / f"{name}.{part}")
    _log_to(folder / f"{name}.{part}.log")
    try:
        _be_rank(plan, part, url, store, diary)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        diary.write(ended=f"{type(error).__name__}: {error} {notes}")
        raise


def _launch(plan: Plan, url: str, folder: Path, name: str) -> None:
    """Stands for the island's launcher: has a session of its own, as a node of its own would."""
    os.setsid()
    context, store = multiprocessing.get_context("fork"), str(folder / f"{name}.store")
    started = [context.Process(target=_rank, args=(plan, part, url, store, folder, name)) for part in range(PARTS)]
    for process in started:
        process.start()
    for process in started:
        process.join()


def _shine(port: int, least: int, log: Path) -> None:
    _log_to(log)
    lighthouse.run(
        Namespace(
            islands=3,
            min_islands=least,
            address="127.0.0.1",
            port=port,
            join_timeout=100,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
    )


class Island:
    """An island that has been started.

    Attributes:
        index: Its number.
        started_at: When it was, in seconds since the epoch.
    """

    def __init__(self, plan: Plan, url: str, folder: Path, name: str, context: Any) -> None:
        self.index, self.started_at = plan.index, time.time()
        self._paths = [folder / f"{name}.{part}" for part in range(PARTS)]
        self._process = context.Process(target=_launch, args=(plan, url, folder, name))
        self._process.start()

    def entries(self, part: int = 0) -> list[Step]:
        """What one of its ranks wrote down."""
        path = self._paths[part]
        # The last line may not be whole.
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"] if path.exists() else []

    def steps(self, part: int = 0) -> dict[int, Step]:
        """Its outer steps by iteration."""
        return {entry["iteration"]: entry for entry in self.entries(part) if "iteration" in entry}

    def last_step(self) -> int:
        """Iteration of its last outer step that all its ranks have taken."""
        return min(max(self.steps(part), default=0) for part in range(PARTS))

    def ends(self) -> list[str]:
        """How each of its ranks ended that has."""
        return [entry["ended"] for part in range(PARTS) for entry in self.entries(part) if "ended" in entry]

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Sends a signal to all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Ends it as a power cut does."""
        self.send(signal.SIGKILL)
        self._process.join()

    def wait(self, seconds: float = LIMIT) -> list[str]:
        """Waits until it has ended; returns how each of its ranks did."""
        self._process.join(seconds)
        assert not self.is_alive, f"island {self.index} hangs: {self.entries()[-1:]}"
        return self.ends()


class Archipelago:
    """A lighthouse and islands, to which things are done."""

    def __init__(self, folder: Path, least: int = 2) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["warm"])
        self._folder, self._least = folder, least
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]
        self.islands: list[Island] = []
        self._lighthouse: Any = None
        self.light()

    def light(self) -> None:
        """Starts the lighthouse."""
        self._lighthouse = self._context.Process(target=_shine, args=(self._port, self._least, self._folder / "lighthouse.log"))
        self._lighthouse.start()
        self.until(self._answers, 10)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False

    def darken(self) -> None:
        """Kills the lighthouse."""
        self._lighthouse.kill()
        self._lighthouse.join()

    def start(self, plan: Plan) -> Island:
        """Starts an island."""
        url = f"http://127.0.0.1:{self._port}"
        island = Island(plan, url, self._folder, f"{len(self.islands)}-island-{plan.index}", self._context)
        self.islands.append(island)
        return island

    def until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> float:
        """Waits for a condition; returns how many seconds."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < seconds, f"hangs: {[island.entries()[-1:] for island in self.islands]}"
            time.sleep(0.02)
        return time.monotonic() - begun

    def go_on(self, islands: Sequence[Island], steps: int = 1, seconds: float = LIMIT) -> float:
        """Waits until islands have taken outer steps that they had not begun; returns how many seconds."""
        # That of now may have been under way.
        wanted = max((island.last_step() for island in islands), default=0) + (steps + 1) * INTERVAL
        return self.until(lambda: all(island.last_step() >= wanted for island in islands), seconds)

    def check(self) -> dict[int, Step]:
        """Holds all that was written down against each other and against the simulation; returns each outer step."""
        taken: dict[int, list[tuple[list[Step], Island]]] = {}
        for island in self.islands:
            parts = [island.steps(part) for part in range(PARTS)]
            for iteration in sorted(set.intersection(*map(set, parts))):
                taken.setdefault(iteration, []).append(([part[iteration] for part in parts], island))
        assert taken, "nobody has taken an outer step"
        found = {}
        for iteration, together in sorted(taken.items()):
            first, _ = together[0]
            for of_parts, island in together:
                for part, one in zip(of_parts, first, strict=True):
                    where = (iteration, island.index)
                    assert (part["islands"], part["verdicts"]) == (first[0]["islands"], first[0]["verdicts"]), where
                    assert (part["anchor"], part["momentum"]) == (one["anchor"], one["momentum"]), where
                    assert part["parameters"] == part["anchor"], where
            found[iteration] = first[0] | {"all": torch.tensor([number for part in first for number in part["anchor"]])}
        assert list(found) == list(range(INTERVAL, max(found) + 1, INTERVAL))
        for iteration, anchor in simulate(list(found.values())).items():
            torch.testing.assert_close(found[iteration]["all"], anchor, rtol=0, atol=2e-5, msg=lambda text, t=iteration: f"{t}: {text}")
        return found

    def end(self) -> None:
        """Ends everything."""
        for island in self.islands:
            island.kill()
        self.darken()


@contextlib.contextmanager
def archipelago(folder: Path, least: int = 2) -> Iterator[Archipelago]:
    """A lighthouse while the ``with`` block lasts; nothing that was started there stays behind."""
    sea = Archipelago(folder, least)
    try:
        yield sea
    finally:
        sea.end()
