"""Elastic islands without Megatron: a real lighthouse, real processes, and a simulation that predicts their membership.

Each island is a process that stands for its launcher, with a rank for each part of the model below it. Each rank writes down
every outer step: participants, their descriptions, and the new anchor.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import functools
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import struct
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
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
from pier_megatron.exchange.authentication import island_of, new_secret
from pier_megatron.exchange.collectives import GroupExchange, Sum
from pier_megatron.exchange.membership import Outcome
from pier_megatron.outer import OuterLoop, Shards
from pier_megatron.outer.chunks import matrix_in
from pier_megatron.outer.elastic import ElasticMembership
from pier_megatron.outer.rules import orthogonalised
from pier_megatron.outer.state import REDUCED, RESIDUAL, OuterState
from pier_megatron.outer.verdicts import ABSENT, GOOD

INTERVAL, MU, ETA = 5, 0.9, 0.7
PARTS = 2
ANOTHER_SECRET = "another-secret"
HEARTBEAT_TIMEOUT, ISLAND_TIMEOUT, PATIENCE = 1, 4, 3
"""Seconds: the lighthouse's, the islands', and what they give a new lighthouse to hear of all of them."""

JOIN_TIMEOUT = 100
"""Seconds that the islands at an outer step wait for one that is alive and absent: for ever here."""

HOLD, HANG, FAIL_IN_A_THREAD, CUT_ONE_WAY, DIE_IN_A_SUM = (signal.SIGRTMIN + number for number in range(1, 6))
"""Signals to one rank: hold Python's lock for a moment, or for longer than others wait; see :func:`_break_on_demand`."""

HELD_SECONDS, HUNG_SECONDS = 2, 12

LIMIT = HEARTBEAT_TIMEOUT + ISLAND_TIMEOUT + PATIENCE + 5
"""Seconds within which islands go on after anything: all time-outs, and time for a busy machine."""

START_SECONDS = 60
"""Within which whatever is started is there, on a busy machine."""

_ENDLESS = 1_000_000
_INNER_LR, _INNER_MOMENTUM = 0.05, 0.5
_SAVES = 8

ROUNDING = 2e-5
"""How far sums in another order may take parameters of about 2 from each other."""

# The mean comes from differences of momenta, which are larger than it is.
_LOST = 2e-4

Step = dict[str, Any]
"""What a rank wrote down of an outer step."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an island does.

    Attributes:
        index: Its number.
        train_iters: Iterations after which it ends.
        seconds: Time of an iteration.
        islands: Most that there may be.
        wait_seconds: How long it waits for enough others.
        timeout: Seconds that a collective may take.
        dies_after: Outer steps after which it kills itself in the middle of the next one.
        halts_after: Numbers of outer steps after which it stops in the middle of the next one, until it is woken.
        halts_connecting: Whether it stops when it connects with the others for the first time, until it is woken.
        misses_answer_of: Island whose answer it misses when it asks all for the first time.
        bad_at: Iteration in which its first rank's parameters become nan.
        rests_after: Iterations of an interval after which it rests.
        seed: Seed of its parameters.
        layout: Its description for the others.
        fails_alone_in: Its meeting, from 1, in which its first rank fails and the others do not.
        misses_last_message_of: Its outer step, from 1, whose last message its first rank does not receive.
        skips: Iterations that nobody trains.
        loads: Iteration of the save of an island of its number that it starts from.
        secret: Name of the file with its secret.
        overlap: Iterations behind which an exchange is hidden.
        fragments: Parts of the parameters that are exchanged at different times.
        codec: What sums look like on the wire.
        rule: Outer rule.
    """

    index: int
    train_iters: int = _ENDLESS
    seconds: float = 0.02
    islands: int = 3
    wait_seconds: float = 300.0
    timeout: float = ISLAND_TIMEOUT
    dies_after: int | None = None
    halts_after: tuple[int, ...] = ()
    halts_connecting: bool = False
    misses_answer_of: int | None = None
    bad_at: int | None = None
    rests_after: int = INTERVAL
    seed: int = 0
    layout: int = PARTS
    fails_alone_in: int | None = None
    misses_last_message_of: int | None = None
    skips: tuple[int, ...] = ()
    loads: int | None = None
    secret: str = "secret"
    overlap: int = 0
    fragments: int = 1
    codec: str = "fp32"
    rule: str = "nesterov"

    def trains(self, iteration: int) -> bool:
        """Whether it reads samples in an iteration."""
        return iteration not in self.skips and not rests(iteration, self.rests_after)

    def config(self) -> PierConfig:
        return PierConfig(
            groups=self.islands,
            train_iters=self.train_iters,
            sync_interval=INTERVAL,
            lazy_start_iters=0,
            outer_lr=ETA,
            outer_momentum=MU,
            overlap=self.overlap,
            fragments=self.fragments,
            exchange_dtype=self.codec,
            outer_rule=self.rule,
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

    def shards(self) -> Shards:
        matrices = [matrix_in(parameter, slice(0, parameter.numel())) for parameter in self.parameters]
        return Shards(self.parameters, matrices=matrices)

    def set(self, flat: Tensor) -> None:
        for parameter, values in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))


def rests(iteration: int, rests_after: int) -> bool:
    """Whether an island rests in an iteration, if it does so after some of an interval; never when an outer step is due."""
    return rests_after < iteration % INTERVAL


@dataclasses.dataclass
class _Simulated:
    """One part of an island of the simulation.

    Attributes:
        model: What it trains.
        at: Iterations that it has passed.
        start: Process that it is now.
        landing: Iteration in which it applies what is under way, and what that is.
    """

    model: Model
    at: int
    start: "Island"
    landing: tuple[int, Callable[[], None]] | None = None


class Simulation:
    """What the outer steps that were written down have to come to, in one part of the model.

    Attributes:
        anchors: The anchor after each outer step, by the iteration in which that began.
        parameters: Those of an island after it has applied an outer step, by its number and that iteration.
        conserved: Number of outer steps in which nothing was lost, where that could be seen.
    """

    def __init__(self, steps: Sequence[Step], part: int, overlap: int, fragments: int, is_coded: bool, rule: str) -> None:
        """Takes outer steps in order: participants, contributing islands, and each island ``by`` its number.

        Where sums ``are coded`` the anchors are those that were written down. Of each outer step what was sent, and what had
        been owed, is then what was applied, and what is owed afterwards.
        """
        self._part, self._overlap, self._is_coded = part, overlap, is_coded
        self._owed: dict[int, tuple[Island, Tensor]] = {}
        self.conserved = 0
        self._is_orthogonal = rule == "muon"
        state = OuterState([Model(0, part).shards()], ranks.CHUNK_NUMEL, fragments, cuts_matrices=not self._is_orthogonal)
        self._matrices = [(chunk, index) for chunk in state.chunks for index in range(len(chunk.matrix_shapes))]
        self._of_fragment = [
            torch.cat(
                [torch.arange(chunk.start, chunk.start + chunk.numel) for chunk in state.chunks if chunk.fragment == each]
            )
            for each in range(fragments)
        ]
        self._anchor = Model(0, part).flat()
        self._momentum, self._before = torch.zeros_like(self._anchor), 0
        self._islands: dict[int, _Simulated] = {}
        # Moments at the end of each iteration, for islands that start again from a save.
        self._moments: dict[tuple[int, int], list[Tensor]] = {}
        self.anchors: dict[int, Tensor] = {}
        self.parameters: dict[tuple[int, int], Tensor] = {}
        for step in steps:
            self._take(step)

    def _take(self, step: Step) -> None:
        iteration, said = step["iteration"], dict(zip(step["islands"], step["verdicts"], strict=True))
        for island in said:
            if step["by"][island] is None:
                assert said[island] == ABSENT, (iteration, island)
                continue
            self._start(island, step["by"][island], iteration)
            if said[island] != ABSENT:
                self._advance(island, iteration)
        counted = [island for island in said if said[island] == GOOD]
        trained = {island: self._trained(island, iteration) for island in counted}
        weights = torch.tensor([float(trained[island]) for island in counted])
        weights += float(not weights.any())
        config = self._islands[counted[0]].start.plan.config()
        # After the last iteration all are due.
        place = torch.cat([self._of_fragment[fragment] for fragment in config.fragments_due(iteration)])
        deltas = torch.stack([self._anchor[place] - self._islands[island].model.flat()[place] for island in counted])
        delta = (deltas * weights[:, None]).sum(0) / weights.sum()
        if self._is_coded:
            delta = self._written(step, place, delta * len(counted))
        elif self._is_orthogonal:
            self._orthogonalise(delta, deltas, weights, place)
        self._momentum[place] = MU * self._momentum[place] + delta
        self._anchor[place] = self._anchor[place] - ETA * (delta + MU * self._momentum[place])
        self._before, self.anchors[iteration] = iteration, self._anchor.clone()
        for island in said:
            if step["by"][island] is None:
                continue
            simulated = self._islands[island]
            apply = functools.partial(self._apply, island, iteration, said[island], simulated.model.flat(), place)
            simulated.landing = iteration + self._overlap, apply
            if said[island] == ABSENT or not self._overlap or iteration == config.train_iters:
                self._land(island)

    def _orthogonalise(self, delta: Tensor, deltas: Tensor, weights: Tensor, place: Tensor) -> None:
        """Makes the matrices in the mean of an outer step orthogonal, as long as those of the islands behind it."""
        mean, *each = (torch.zeros_like(self._anchor).index_put((place,), values) for values in (delta, *deltas))
        for chunk, index in self._matrices:
            matrix, *own = ([*chunk.matrices(chunk.of(flat))][index] for flat in (mean, *each))
            squares = torch.stack([matrix.norm() for matrix in own]).square()
            length = (weights @ squares / weights.sum()).sqrt()
            matrix.copy_(orthogonalised(matrix) * length)
        delta.copy_(mean[place])

    def _written(self, step: Step, place: Tensor, sent: Tensor) -> Tensor:
        """The mean of an outer step, as it was written down; ``sent`` is the sum of the pseudo-gradients behind it."""
        momentum = torch.tensor(step["momentum"][self._part])[place]
        delta = momentum - MU * self._momentum[place]
        owed, owes, are_known = torch.zeros_like(self._anchor), torch.zeros_like(self._anchor), True
        for island, of_parts in step["owes"].items():
            start = step["by"][island]
            before, said = self._owed.get(island), step["verdicts"][step["islands"].index(island)]
            if said != ABSENT:
                # One that starts again from a save owes what it owed there, which nobody has written down.
                are_known &= before is not None and before[0] is start
                owed += before[1] if before is not None else 0
            self._owed[island] = start, torch.tensor(of_parts[self._part])
            owes += self._owed[island][1]
        # One that died before it had applied the step has not written down what it owed then.
        are_known &= all(island in step["owes"] for island in step["islands"])
        if are_known and len(step["islands"]) > 1:
            furthest = (sent + owed[place] - delta * step["verdicts"].count(GOOD) - owes[place]).abs().max().item()
            assert furthest < _LOST, f"in the outer step after iteration {step['iteration']} {furthest} is lost"
            self.conserved += 1
        return delta

    def _start(self, island: int, start: "Island", iteration: int) -> None:
        """Lets an island be the process that applies the outer step of an iteration."""
        before, loads = self._islands.get(island), start.plan.loads
        if before is not None and before.start is start:
            return
        if before is not None and loads is not None and (island, loads) not in self._moments:
            # What followed that save was undone.
            before.start = start
            # One that was saved with this outer step under way had begun it before it was saved.
            self._advance(island, min(loads, iteration))
        if start.took_over or before is None:
            model = Model(island, self._part)
            model.set(self._anchor)
            if start.took_over and loads is not None:
                # The others have not handed these over.
                model.moments = [moment.clone() for moment in self._moments[island, loads]]
            self._islands[island] = _Simulated(model, start.joined_at if start.took_over else 0, start)
        else:
            before.start = start
            if not start.keeps_under_way:
                before.landing = None

    def _advance(self, island: int, until: int) -> None:
        simulated = self._islands[island]
        for iteration in range(simulated.at + 1, until + 1):
            simulated.at = iteration
            if simulated.start.plan.trains(iteration):
                simulated.model.step(iteration)
            if simulated.landing is not None and simulated.landing[0] == iteration:
                self._land(island)
            self._moments[island, iteration] = [moment.clone() for moment in simulated.model.moments]

    def _land(self, island: int) -> None:
        simulated = self._islands[island]
        assert simulated.landing is not None
        simulated.landing[1]()
        simulated.landing = None
        self._moments[island, simulated.at] = [moment.clone() for moment in simulated.model.moments]

    def _apply(self, island: int, begun: int, verdict: int, sent: Tensor, place: Tensor) -> None:
        model, anchor = self._islands[island].model, self.anchors[begun]
        flat = model.flat()
        if verdict == GOOD and self._overlap:
            flat[place] += anchor[place] - sent[place]
        elif verdict == GOOD:
            flat[place] = anchor[place]
        else:
            flat = anchor
        model.set(flat)
        if verdict not in (GOOD, ABSENT):
            model.moments = [torch.zeros_like(moment) for moment in model.moments]
        self.parameters[island, begun] = model.flat()

    def _trained(self, island: int, iteration: int) -> int:
        start = self._islands[island].start
        since = max(self._before, start.joined_at if start.took_over else 0)
        return sum(map(start.plan.trains, range(since + 1, iteration + 1)))


class _Diary:
    """What a rank writes down, a line each."""

    def __init__(self, path: Path) -> None:
        self.folder, self._file = path.parent, path.open("a")

    def write(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry | {"at": time.time()}) + "\n")
        self._file.flush()


def _signal_in_a_sum(number: int, is_due: Callable[[], bool] = lambda: True) -> None:
    """Replaces sums: once one that is due is under way, its island gets a signal."""
    begin = GroupExchange.sum

    def sum_(exchange: GroupExchange, *args: Any, **kwargs: Any) -> Sum:
        under_way = begin(exchange, *args, **kwargs)
        if is_due():
            os.killpg(0, number)
        return under_way

    GroupExchange.sum = sum_  # type: ignore[method-assign]


def _in_steps(loop: OuterLoop, steps: Sequence[int]) -> Callable[[], bool]:
    """Whether a sum is the first one of an outer step of some, by their number."""
    asked: list[int] = []

    def is_due() -> bool:
        asked.append(loop.iteration)
        return len(set(asked)) - 1 in steps and asked.count(loop.iteration) == 1

    return is_due


def _halted(connect: Callable[..., dist.ProcessGroup]) -> Callable[..., dist.ProcessGroup]:
    """Replaces a connection: the island gets a signal before it, when all others have admitted it."""

    def halt_and_connect(*args: Any) -> dist.ProcessGroup:
        time.sleep(1)
        os.killpg(0, signal.SIGSTOP)
        return connect(*args)

    return halt_and_connect


def _without_first_answer_of(index: int, ask: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a question: of the first one the island does not get the answer of another."""
    asked: list[Any] = []

    def ask_others(*args: Any) -> Any:
        answers = ask(*args)
        asked.append(answers)
        return answers if len(asked) > 1 else {name: said for name, said in answers.items() if island_of(name) != index}

    return ask_others


def _fail_in(number: int, meet: Callable[..., GroupExchange]) -> Callable[..., GroupExchange]:
    """Replaces a meeting: one of them happens, and this rank stops there."""
    meetings: list[GroupExchange] = []

    def meet_or_fail(within: datetime.timedelta) -> GroupExchange:
        meetings.append(meet(within))
        if len(meetings) == number:
            raise RuntimeError("fails alone")
        return meetings[-1]

    return meet_or_fail


def _miss_last_message_of(number: int, agree: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces an agreement: all islands have sent what completes an outer step, and this rank loses what it received."""
    complete: list[GroupExchange] = []

    def agree_or_miss(meeting: GroupExchange | None, outcome: Outcome) -> Outcome:
        if meeting is not None and outcome == Outcome.SUCCEEDED:
            complete.append(meeting)
            if len(complete) == number:
                meeting.gather(torch.ones(1)).result()
                outcome = Outcome.FAILED
        return agree(meeting, outcome)

    return agree_or_miss


# Classic BPF: return 0, no byte of the packet is kept.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
_SO_ATTACH_FILTER = 26


def _sockets() -> set[tuple[int, str]]:
    """The open sockets of this process: number and identity."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return {(number, name) for number, name in found if name.startswith("socket:")}


def _break_on_demand() -> None:
    """Lets signals do to this rank what libraries and networks do."""
    between: set[tuple[int, str]] = set()
    connect = memberships.connect

    def connect_and_look(*args: Any) -> dist.ProcessGroup:
        before = _sockets()
        group = connect(*args)
        between.clear()
        between.update(_sockets() - before)
        return group

    def hold(seconds: int) -> Callable[..., None]:
        # Called by way of PyDLL, a function does not let go of Python's lock.
        return lambda *_: ctypes.PyDLL(None).sleep(seconds)

    def fail_in_a_thread(*_: Any) -> None:
        threading.Thread(target=lambda: [][0]).start()

    def cut_one_way(*_: Any) -> None:
        """Nothing of other islands arrives any more; what is sent to them does."""
        program = ctypes.create_string_buffer(_DROP)
        for number, _name in between & _sockets():
            with socket.socket(fileno=os.dup(number)) as copy, contextlib.suppress(OSError):
                copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))

    memberships.connect = connect_and_look
    signal.signal(DIE_IN_A_SUM, lambda *_: _signal_in_a_sum(signal.SIGKILL))
    signal.signal(HOLD, hold(HELD_SECONDS))
    signal.signal(HANG, hold(HUNG_SECONDS))
    signal.signal(FAIL_IN_A_THREAD, fail_in_a_thread)
    signal.signal(CUT_ONE_WAY, cut_one_way)


def _be_rank(plan: Plan, part: int, url: str, store: str, diary: _Diary) -> None:
    torch.set_num_threads(1)
    # The ranks of an island talk to each other at this address; to others, at that of the island.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=part, world_size=PARTS, timeout=datetime.timedelta(seconds=30)
    )
    world, model, config = dist.group.WORLD, Model(plan.index, part, plan.seed), plan.config()
    assert world is not None
    # Seconds for which a test would wait.
    memberships.CONNECT_TIMEOUT = datetime.timedelta(seconds=PATIENCE)
    timeout = datetime.timedelta(seconds=plan.timeout)
    run = {"--tensor-model-parallel-size": plan.layout}
    # Each node has a separate address; on this machine all loopback addresses exist.
    address, secret = f"127.0.0.{1 + part}", str(diary.folder / plan.secret)
    apart = dist.new_group()
    membership = memberships.Membership(plan.index, url, address, apart, config.codec, timeout, run, plan.islands, secret)
    _break_on_demand()
    if plan.halts_connecting:
        memberships.connect = _halted(memberships.connect)
    if plan.misses_answer_of is not None:
        memberships.ask = _without_first_answer_of(plan.misses_answer_of, memberships.ask)
    # Only now: a signal that nothing hears ends a process.
    diary.write(pid=os.getpid())
    if plan.fails_alone_in is not None and part == 0:
        membership.meet = _fail_in(plan.fails_alone_in, membership.meet)  # type: ignore[method-assign]
    if plan.misses_last_message_of is not None and part == 0:
        membership.agree = _miss_last_message_of(plan.misses_last_message_of, membership.agree)  # type: ignore[method-assign]
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=ranks.CHUNK_NUMEL):
        loop = OuterLoop(
            [[model.shards()]],
            config,
            GroupExchange(None, config.codec),
            group=world,
            inner_state=model.inner_state,
            islands=ElasticMembership(membership, plan.index, plan.wait_seconds),
        )

    def note(round_: Any, sums: Any, restarted: Sequence[int]) -> None:
        diary.write(
            iteration=round_.begun,
            islands=round_.exchange.groups,
            verdicts=round_.verdicts.all(),
            anchor=loop.states[0].anchor.tolist(),
            momentum=loop.states[0].momentum.tolist(),
            parameters=model.flat().tolist(),
            owes=sum(loop.states[0].flats.get(name, torch.zeros(1)) for name in (RESIDUAL, REDUCED)).tolist(),
        )

    saves = _Saves(store, plan.index, part)
    with mock.patch.object(loop.reports, "add", note), mock.patch.object(loop.reports, "write_arrived"):
        if plan.loads is not None:
            saves.load(plan.loads, model, loop)
        loop.join()
        under_way = len(loop.steps.rounds)
        diary.write(joined=loop.iteration, took_over=loop.iteration != (plan.loads or 0), under_way=under_way)
        if plan.dies_after is not None:
            _signal_in_a_sum(signal.SIGKILL, _in_steps(loop, [plan.dies_after]))
        if plan.halts_after and part == 0:
            _signal_in_a_sum(signal.SIGSTOP, _in_steps(loop, plan.halts_after))
        while loop.iteration < plan.train_iters and not loop.is_deserted:
            loop.begin_iteration(loop.iteration + 1)
            trains = plan.trains(loop.iteration)
            if trains:
                model.step(loop.iteration)
            if loop.iteration == plan.bad_at and part == 0:
                model.parameters[0].view(-1)[3] = float("nan")
            time.sleep(plan.seconds if trains else 0)
            loop.end_iteration(has_trained=trains)
            if loop.iteration % INTERVAL in (0, 2):
                saves.save(model, loop)
    diary.write(ended="deserted" if loop.is_deserted else "done")


class _Saves:
    """The saves of all islands of a number, part by part: after outer steps and between them, the latest few."""

    def __init__(self, store: str, index: int, part: int) -> None:
        self._folder = Path(store).parent / "saves" / f"{index}.{part}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def save(self, model: Model, loop: OuterLoop) -> None:
        path = self._folder / str(loop.iteration)
        torch.save({"loop": loop.snapshot(), "flat": model.flat(), "moments": model.moments}, f"{path}.new")
        os.replace(f"{path}.new", path)
        for old in sorted(iterations_saved(self._folder))[:-_SAVES]:
            (self._folder / str(old)).unlink(missing_ok=True)

    def load(self, iteration: int, model: Model, loop: OuterLoop) -> None:
        found = torch.load(self._folder / str(iteration))
        model.set(found["flat"])
        for moment, saved in zip(model.moments, found["moments"], strict=True):
            moment.copy_(saved)
        loop.restore(found["loop"])


def iterations_saved(folder: Path) -> set[int]:
    """Iterations of the saves in a folder."""
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()} if folder.exists() else set()


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
    while left := [process for process in started if process.exitcode is None]:
        multiprocessing.connection.wait([process.sentinel for process in left])
        # Like torchrun. A rank that reports its end lets the others report too.
        if any((process.exitcode or 0) < 0 for process in started):
            for process in started:
                process.kill()


def _shine(port: int, least: int, join_timeout: int, log: Path) -> None:
    _log_to(log)
    lighthouse.run(
        Namespace(
            islands=3,
            new_secret=None,
            min_islands=least,
            address="127.0.0.1",
            port=port,
            join_timeout=join_timeout,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
    )


class Island:
    """An island that has been started.

    Attributes:
        plan: What it does.
        index: Its number.
        valid_until: Iteration of the saves from which all started again after it, if they did.
    """

    def __init__(self, plan: Plan, url: str, folder: Path, name: str, context: Any) -> None:
        self.plan, self.index, self.valid_until = plan, plan.index, _ENDLESS
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
                text = file.read()
            # The last line may not be whole. Read line by line, its rest would be a line of its own if it came meanwhile.
            whole = text[: text.rfind("\n") + 1]
            self._read[part] += len(whole)
            self._entries[part] += map(json.loads, whole.splitlines())
        return self._entries[part]

    def log(self, part: int = 0) -> str:
        """What one of its ranks has printed."""
        return self._paths[part].with_suffix(f"{self._paths[part].suffix}.log").read_text()

    def steps(self, part: int = 0) -> dict[int, Step]:
        """Its outer steps by iteration, but those that were undone."""
        found = (entry for entry in self.entries(part) if "iteration" in entry)
        return {entry["iteration"]: entry for entry in found if entry["iteration"] <= self.valid_until}

    def last_step(self) -> int:
        """Iteration of its last outer step that all its ranks have taken."""
        return min(max(self.steps(part), default=0) for part in range(PARTS))

    def missed(self, iteration: int) -> bool:
        """Whether it was left behind before an outer step."""
        return self.last_step() < iteration and any(said.startswith("LeftBehindError") for said in self.ends())

    def _joined(self) -> Step:
        return next((entry for entry in self.entries() if "joined" in entry), {})

    @property
    def has_joined(self) -> bool:
        """Whether it has met the others when it started."""
        return bool(self._joined())

    @property
    def joined_at(self) -> int:
        """Iteration at which it met the others when it started."""
        return int(self._joined()["joined"])

    @property
    def took_over(self) -> bool:
        """Whether it took over the others' anchor then."""
        return bool(self._joined()["took_over"])

    @property
    def keeps_under_way(self) -> bool:
        """Whether it has yet to apply what was under way when it was saved."""
        return bool(self._joined()["under_way"])

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
        """Session of all its processes."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def is_halted(self) -> bool:
        """Whether it is stopped."""
        return psutil.Process(self.session).status() == psutil.STATUS_STOPPED

    def send_to_rank(self, part: int, number: int) -> None:
        """Sends a signal to one of its ranks."""
        while self.is_alive:
            pids = [entry["pid"] for entry in self.entries(part) if "pid" in entry]
            if pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[0], number)
                return
            # It has only just been started.
            time.sleep(0.01)

    def send(self, number: int) -> None:
        """Sends a signal to all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.session, number)

    def kill(self) -> None:
        """Ends it as a power cut does."""
        self.send(signal.SIGKILL)
        self._process.join()

    def die_in_a_sum(self) -> None:
        """Ends it in the next sum of an outer step.

        If it died while the islands tell each other that they have everything, one of them could be left behind.
        """
        self.send(DIE_IN_A_SUM)
        self.wait()

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

    conserved = 0

    def __init__(self, folder: Path, least: int, join_timeout: int) -> None:
        self._context = ranks.forking()
        self._folder, self._least, self._join_timeout = folder, least, join_timeout
        for secret in (Plan.secret, ANOTHER_SECRET):
            new_secret(folder / secret)
        # While the lighthouse is away nobody else takes its port.
        self._port = forked_ranks.free_port()
        self.islands: list[Island] = []
        self._lighthouse: Any = None
        self.light()

    @property
    def url(self) -> str:
        """Where the lighthouse is."""
        return f"http://127.0.0.1:{self._port}"

    def light(self) -> None:
        """Starts the lighthouse."""
        self._lighthouse = self._context.Process(
            target=_shine, args=(self._port, self._least, self._join_timeout, self._folder / "lighthouse.log")
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

    def listening(self) -> list[Any]:
        """Sockets at which the lighthouse and the islands listen."""
        processes = [psutil.Process(self._lighthouse.pid), *self.processes()]
        found = [connection for process in processes for connection in process.net_connections("tcp")]
        return [connection for connection in found if connection.status == psutil.CONN_LISTEN]

    def darken(self) -> None:
        """Kills the lighthouse."""
        self._lighthouse.kill()
        self._lighthouse.join()

    def saved(self, *indices: int) -> list[int]:
        """Iterations that all parts of these islands have saved, in order."""
        folders = [self._folder / "saves" / f"{index}.{part}" for index in indices for part in range(PARTS)]
        return sorted(set.intersection(*map(iterations_saved, folders)))

    def roll_back_to(self, iteration: int, keep: Sequence[Island] = ()) -> None:
        """Kills all islands but some: what they did after an iteration is undone."""
        for island in set(self.islands) - set(keep):
            island.kill()
            island.valid_until = min(island.valid_until, iteration)
            for part in range(PARTS):
                folder = self._folder / "saves" / f"{island.index}.{part}"
                for saved in iterations_saved(folder):
                    if saved > iteration:
                        (folder / str(saved)).unlink()

    def start(self, plan: Plan) -> Island:
        """Starts an island."""
        island = Island(plan, self.url, self._folder, f"{len(self.islands)}-island-{plan.index}", self._context)
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

    def _there(self, index: int, iteration: int, verdict: int) -> Island | None:
        """The island of a number that took part in an outer step; None if it died before it knew that it had joined."""
        joined = [island for island in self.islands if island.index == index and island.has_joined]
        # One that starts from a save of this very outer step has not taken it.
        # One that has joined where others apply an outer step begins the next one there.
        begins = [island for island in joined if island.took_over and (island.joined_at, verdict) == (iteration, GOOD)]
        took = [island for island in joined if island in begins or island.joined_at < iteration or iteration in island.steps()]
        # One that was left behind came to the step after the one that it missed, and did not count there.
        has_left = [island for island in took if verdict == ABSENT and island.missed(iteration)]
        there = [island for island in took if iteration <= island.valid_until and island not in has_left]
        return there[-1] if there else None

    def check(self) -> dict[int, Step]:
        """Holds all that was written down against each other and against the simulation; returns each outer step."""
        taken: dict[int, dict[Island, list[Step]]] = {}
        for island in self.islands:
            parts = [island.steps(part) for part in range(PARTS)]
            for iteration in set.intersection(*map(set, parts)):
                taken.setdefault(iteration, {})[island] = [part[iteration] for part in parts]
        assert taken, "nobody has taken an outer step"
        found: dict[int, Step] = {}
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
            agreed = torch.tensor([number for part in first for number in part["anchor"]])
            said = zip(first[0]["islands"], first[0]["verdicts"], strict=True)
            by = {index: self._there(index, iteration, verdict) for index, verdict in said}
            momentum = [part["momentum"] for part in first]
            owes = {
                island.index: [part["owes"] for part in parts]
                for island, parts in by_island.items()
                if by[island.index] is island
            }
            found[iteration] = first[0] | {"all": agreed, "by": by, "momentum": momentum, "owes": owes}
        plan = self.islands[0].plan
        if not plan.overlap and plan.fragments == 1:
            everything = (part for by_island in taken.values() for parts in by_island.values() for part in parts)
            assert all(part["parameters"] == part["anchor"] for part in everything)
        due = list(itertools.takewhile(lambda iteration: iteration <= max(found), plan.config().outer_steps()))
        # Under way when all were saved, and dropped because one that was saved earlier has none of it.
        dropped = {
            iteration
            for iteration in due
            for island in self.islands
            if island.has_joined and not island.took_over and not island.keeps_under_way
            if iteration <= (island.plan.loads or 0) < iteration + plan.overlap
        }
        found = {iteration: step for iteration, step in found.items() if iteration not in dropped}
        assert list(found) == [iteration for iteration in due if iteration not in dropped]
        how = plan.overlap, plan.fragments, plan.codec != "fp32", plan.rule
        # Newton-Schulz iterations magnify what is small, at each step again.
        rounding = ROUNDING * (100 if plan.rule == "muon" else 1)
        simulated = [Simulation(list(found.values()), part, *how) for part in range(PARTS)]
        self.conserved = simulated[0].conserved
        for iteration, step in found.items():
            anchor = torch.cat([of_part.anchors[iteration] for of_part in simulated])
            furthest = (step["all"] - anchor).abs().max().item()
            assert furthest < rounding, f"after iteration {iteration} the anchor is {furthest} from that of the simulation"
            for island, of_parts in taken[iteration].items():
                for of_part, said in zip(simulated, of_parts, strict=True):
                    # What one applied that died before its next outer step is not simulated.
                    if (flat := of_part.parameters.get((island.index, iteration))) is not None:
                        furthest = (torch.tensor(said["parameters"]) - flat).abs().max().item()
                        where = f"after that of iteration {iteration} the parameters of island {island.index} are {furthest}"
                        assert furthest < rounding, f"{where} from those of the simulation"
        return found

    def end(self) -> None:
        """Ends everything."""
        for island in self.islands:
            island.kill()
        self.darken()


@contextlib.contextmanager
def archipelago(folder: Path, least: int = 2, join_timeout: int = JOIN_TIMEOUT) -> Iterator[Archipelago]:
    """A lighthouse while the ``with`` block lasts; nothing that was started there stays behind."""
    sea = Archipelago(folder, least, join_timeout)
    try:
        yield sea
    finally:
        sea.end()
