"""Islands that are jobs, without Megatron: a real lighthouse, real processes, and what a simulation makes of their membership.

Each island is a process that stands for its launcher, with a rank for each part of the model below it. Each rank writes down
every outer step: who met, what they said of themselves, and the anchor that came of it.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import forked_ranks
import psutil
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

import pier_megatron.exchange.membership as memberships
from pier_megatron import PierConfig
from pier_megatron.commands import lighthouse
from pier_megatron.exchange.collectives import GroupExchange, Sum
from pier_megatron.outer import OuterLoop, Shards
from pier_megatron.outer.gathering import Islands
from pier_megatron.outer.verdicts import ABSENT, GOOD

INTERVAL, MU, ETA = 5, 0.9, 0.7
PARTS = 2
HEARTBEAT_TIMEOUT, ISLAND_TIMEOUT, PATIENCE = 1, 4, 3
"""Seconds: the lighthouse's, the islands', and what they give a new lighthouse to hear of all of them."""

LIMIT = HEARTBEAT_TIMEOUT + ISLAND_TIMEOUT + PATIENCE + 5
"""Seconds within which islands go on after anything: all time-outs, and time for a busy machine."""

START_SECONDS = 60
"""Within which whatever is started is there, on a busy machine."""

_ENDLESS = 1_000_000
_INNER_LR, _INNER_MOMENTUM = 0.05, 0.5

ROUNDING = 2e-5
"""How far sums in another order may take parameters of about 2 from each other."""

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
        dies_after: Outer steps after which it kills itself in the middle of the next one.
        bad_at: Iteration in which its first rank's parameters become nan.
        rests_after: Iterations of an interval after which it rests.
        seed: Of its parameters.
        layout: What it says of itself to the others.
        fails_alone_in: Its meeting, from 1, in which its first rank fails and the others do not.
    """

    index: int
    train_iters: int = _ENDLESS
    seconds: float = 0.01
    islands: int = 3
    wait_seconds: float = 60.0
    dies_after: int | None = None
    bad_at: int | None = None
    rests_after: int = INTERVAL
    seed: int = 0
    layout: int = PARTS
    fails_alone_in: int | None = None

    def config(self) -> PierConfig:
        return PierConfig(
            groups=self.islands,
            train_iters=self.train_iters,
            sync_interval=INTERVAL,
            lazy_start_iters=0,
            outer_lr=ETA,
            outer_momentum=MU,
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

    def inner_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"moment": next(m for p, m in zip(self.parameters, self.moments, strict=True) if p is parameter)}

    def flat(self) -> Tensor:
        return torch.cat([parameter.reshape(-1) for parameter in self.parameters])

    def set(self, flat: Tensor) -> None:
        for parameter, values in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))


def rests(iteration: int, rests_after: int) -> bool:
    """Whether an island rests in an iteration, if it does so after some of an interval; never when an outer step is due."""
    return rests_after < iteration % INTERVAL


def simulate(steps: Sequence[Step], rests_after: Mapping[int, int], parts: int = PARTS) -> dict[int, Tensor]:
    """What the outer steps that were written down have to come to.

    Args:
        steps: One of each iteration, in order; of each, who met and who counted.
        rests_after: See :class:`Plan`, by island.
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
                    if not rests(iteration, rests_after[island]):
                        models[island].step(iteration)
            counted = [island for island, said in zip(step["islands"], step["verdicts"], strict=True) if said == GOOD]
            weights = torch.tensor([min(rests_after[island] + 1.0, INTERVAL) for island in counted])
            deltas = torch.stack([anchor - models[island].flat() for island in counted])
            delta = (deltas * weights[:, None]).sum(0) / weights.sum()
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


def _die_in_the_exchange(loop: OuterLoop, steps: int) -> Callable[..., Sum]:
    """In place of a sum: the second one of an outer step is where its island ends."""
    asked: list[int] = []
    begin = GroupExchange.sum

    def sum_(exchange: GroupExchange, *args: Any, **kwargs: Any) -> Sum:
        asked.append(loop.iteration)
        if len(set(asked)) > steps and asked.count(loop.iteration) == 2:
            os.killpg(0, signal.SIGKILL)
        return begin(exchange, *args, **kwargs)

    return sum_


def _fail_in(number: int, meet: Callable[..., GroupExchange]) -> Callable[..., GroupExchange]:
    """In place of a meeting: one of them comes about, and this rank does not go on."""
    meetings: list[GroupExchange] = []

    def meet_or_fail(within: datetime.timedelta) -> GroupExchange:
        meetings.append(meet(within))
        if len(meetings) == number:
            raise RuntimeError("fails alone")
        return meetings[-1]

    return meet_or_fail


def _be_rank(plan: Plan, part: int, url: str, store: str, diary: _Diary) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=part, world_size=PARTS, timeout=datetime.timedelta(seconds=30)
    )
    world, model, config = dist.group.WORLD, Model(plan.index, part, plan.seed), plan.config()
    assert world is not None
    # Seconds for which a test would wait.
    memberships._CONNECT = datetime.timedelta(seconds=PATIENCE)
    timeout = datetime.timedelta(seconds=ISLAND_TIMEOUT)
    run = {"--tensor-model-parallel-size": plan.layout}
    membership = memberships.Membership(plan.index, url, "127.0.0.1", world, config.codec, timeout, run)
    if plan.fails_alone_in is not None and part == 0:
        membership.meet = _fail_in(plan.fails_alone_in, membership.meet)  # type: ignore[method-assign]
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=ranks.CHUNK_NUMEL):
        loop = OuterLoop(
            [[Shards(model.parameters)]],
            config,
            GroupExchange(None, config.codec),
            group=world,
            inner_state=model.inner_state,
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

    with mock.patch.object(loop.reports, "add", note), mock.patch.object(loop.reports, "write_arrived"):
        loop.join()
        diary.write(joined=loop.iteration)
        if plan.dies_after is not None:
            GroupExchange.sum = _die_in_the_exchange(loop, plan.dies_after)  # type: ignore[method-assign]
        while loop.iteration < plan.train_iters and not loop.is_deserted:
            loop.begin_iteration(loop.iteration + 1)
            if rests(loop.iteration, plan.rests_after):
                loop.end_iteration(has_rested=True)
                continue
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
    faulthandler.register(signal.SIGUSR1)
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


def _shine(port: int, least: int, heartbeat_timeout: int, log: Path) -> None:
    _log_to(log)
    lighthouse.run(
        Namespace(
            islands=3,
            min_islands=least,
            address="127.0.0.1",
            port=port,
            join_timeout=100,
            heartbeat_timeout=heartbeat_timeout,
        )
    )


class Island:
    """An island that has been started.

    Attributes:
        plan: What it does.
        index: Its number.
    """

    def __init__(self, plan: Plan, url: str, folder: Path, name: str, context: Any) -> None:
        self.plan, self.index = plan, plan.index
        self._paths = [folder / f"{name}.{part}" for part in range(PARTS)]
        self._read, self._entries = [0] * PARTS, [[] for _ in range(PARTS)]
        self._process = context.Process(target=_launch, args=(plan, url, folder, name))
        self._process.start()
        while os.getsid(self.session) != self.session:
            # Until then no signal reaches all of it.
            time.sleep(0.01)

    def entries(self, part: int = 0) -> list[Step]:
        """What one of its ranks wrote down."""
        if self._paths[part].exists():
            with self._paths[part].open() as file:
                file.seek(self._read[part])
                # The last line may not be whole.
                lines = [line for line in file.readlines() if line.endswith("\n")]
            self._read[part] += sum(map(len, lines))
            self._entries[part] += map(json.loads, lines)
        return self._entries[part]

    def steps(self, part: int = 0) -> dict[int, Step]:
        """Its outer steps by iteration."""
        return {entry["iteration"]: entry for entry in self.entries(part) if "iteration" in entry}

    def last_step(self) -> int:
        """Iteration of its last outer step that all its ranks have taken."""
        return min(max(self.steps(part), default=0) for part in range(PARTS))

    def taken(self) -> int:
        """Outer steps that all its ranks have taken."""
        return min(len(self.steps(part)) for part in range(PARTS))

    def state(self) -> str:
        """Where it is, for messages."""
        return f"island {self.index}, alive: {self.is_alive}, last outer step {self.last_step()}, ends: {self.ends()}"

    def ends(self) -> list[str]:
        """How each of its ranks ended that has."""
        return [entry["ended"] for part in range(PARTS) for entry in self.entries(part) if "ended" in entry]

    @property
    def session(self) -> int:
        """Of all its processes."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Sends a signal to all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.session, number)

    def kill(self) -> None:
        """Ends it as a power cut does."""
        self.send(signal.SIGKILL)
        self._process.join()

    def wait(self, seconds: float = LIMIT) -> list[str]:
        """Waits until it has ended; returns how each of its ranks did."""
        self._process.join(seconds)
        assert not self.is_alive, f"hangs: {self.state()}"
        return self.ends()


def _is_of(process: psutil.Process, sessions: set[int]) -> bool:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        return os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE
    return False


class Archipelago:
    """A lighthouse and islands, to which things are done."""

    def __init__(self, folder: Path, least: int = 2) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["warm"])
        self._folder, self._least = folder, least
        # While the lighthouse is away nobody else takes its port.
        self._port = forked_ranks.free_port()
        self.islands: list[Island] = []
        self._lighthouse: Any = None
        self.light()

    def light(self) -> None:
        """Starts the lighthouse."""
        self._lighthouse = self._context.Process(
            target=_shine, args=(self._port, self._least, HEARTBEAT_TIMEOUT, self._folder / "lighthouse.log")
        )
        self._lighthouse.start()
        self.until(self._answers, START_SECONDS)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False

    def processes(self) -> list[psutil.Process]:
        """Those of all islands that are still there."""
        sessions = {island.session for island in self.islands}
        return [process for process in psutil.process_iter() if _is_of(process, sessions)]

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
            if time.monotonic() - begun > seconds:
                states = [island.state() for island in self.islands]
                for island in self.islands:
                    # Where its ranks are, into their logs; it ends what stands for their launcher.
                    island.send(signal.SIGUSR1)
                raise AssertionError(f"hangs: {states}, logs in {self._folder}")
            time.sleep(0.02)
        return time.monotonic() - begun

    def go_on(self, islands: Sequence[Island], steps: int = 1, seconds: float = LIMIT) -> float:
        """Waits until islands have taken outer steps that they had not begun; returns how many seconds."""
        # That of now may have been under way.
        wanted = {island: island.taken() + steps + 1 for island in islands}
        return self.until(lambda: all(island.taken() >= number for island, number in wanted.items()), seconds)

    def check(self) -> dict[int, Step]:
        """Holds all that was written down against each other and against the simulation; returns each outer step."""
        taken: dict[int, dict[Island, list[Step]]] = {}
        for island in self.islands:
            parts = [island.steps(part) for part in range(PARTS)]
            for iteration in set.intersection(*map(set, parts)):
                taken.setdefault(iteration, {})[island] = [part[iteration] for part in parts]
        assert taken, "nobody has taken an outer step"
        found = {}
        for iteration, by_island in sorted(taken.items()):
            first = by_island[max(by_island, key=Island.last_step)]
            for island, of_parts in by_island.items():
                if of_parts[0]["islands"] != first[0]["islands"]:
                    # The others have taken this step again without it, since it died before they had it.
                    assert island.last_step() == iteration, (iteration, island.index)
                    continue
                for part, one in zip(of_parts, first, strict=True):
                    where = (iteration, island.index)
                    assert (part["islands"], part["verdicts"]) == (first[0]["islands"], first[0]["verdicts"]), where
                    assert (part["anchor"], part["momentum"]) == (one["anchor"], one["momentum"]), where
                    assert part["parameters"] == part["anchor"], where
            found[iteration] = first[0] | {"all": torch.tensor([number for part in first for number in part["anchor"]])}
        assert list(found) == list(range(INTERVAL, max(found) + 1, INTERVAL))
        rests_after = {island.index: island.plan.rests_after for island in self.islands}
        for iteration, anchor in simulate(list(found.values()), rests_after).items():
            furthest = (found[iteration]["all"] - anchor).abs().max().item()
            assert furthest < ROUNDING, f"after iteration {iteration} the anchor is {furthest} from that of the simulation"
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
