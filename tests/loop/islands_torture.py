"""Torture of elastic islands: they are killed, paused, broken and cut off at random, and so is their lighthouse.

``make torture``, or ``python tests/loop/islands_torture.py [--events N] [--seed S]``. After every event the survivors
continue within the time-outs, all hold the same anchors, and these are those of a simulation with the same membership. The
events are drawn before anything happens. If they fail, events are removed until each of them is needed; ``--replay``
takes what is printed then.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import archipelago as sea_of
from archipelago import (
    HEARTBEAT_TIMEOUT,
    INTERVAL,
    ISLAND_TIMEOUT,
    PARTS,
    START_SECONDS,
    Archipelago,
    Island,
    Plan,
    archipelago,
)

ISLANDS, LEAST, JOIN_TIMEOUT = 3, 2, 5

LIMIT = sea_of.LIMIT + JOIN_TIMEOUT

# The others continued without it, or the lighthouse was away when it started.
_CLEAR_ENDS = ("LeftBehindError", "PierConfigError: --pier-lighthouse")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that is done to islands.

    Attributes:
        deed: Name of a method of :class:`_Torture`.
        island: Index of the island that it is done to, where it is done to one.
        after: Seconds of peace before.
        amount: How much of it, from 0 to 1.
    """

    deed: str
    island: int
    after: float
    amount: float

    def __str__(self) -> str:
        return f"{self.deed}:{self.island}:{self.after:.3f}:{self.amount:.3f}"

    @classmethod
    def parse(cls, text: str) -> "Event":
        deed, island, after, amount = text.split(":")
        return cls(deed, int(island), float(after), float(amount))


def draw(number: int, seed: int) -> list[Event]:
    """Draws events."""
    chance = random.Random(seed)
    return [
        Event(chance.choice(DEEDS), chance.randrange(ISLANDS), round(chance.random(), 3), round(chance.random(), 3))
        for _ in range(number)
    ]


@dataclasses.dataclass
class Outcome:
    """What was done to islands and what came of it.

    Attributes:
        events: How often each thing was done.
        left_behind: After which of them islands had to start again, without having been killed.
        steps: Outer steps that were taken.
        longest: Seconds until all survivors had continued.
        remaining: Processes that outlived their island.
        conserved: Number of outer steps in few bits in which nothing was lost, where that could be seen.
    """

    events: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    left_behind: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    steps: int = 0
    longest: float = 0.0
    remaining: int = 0
    conserved: int = 0


class _Torture:
    def __init__(self, sea: Archipelago, settings: Mapping[str, Any]) -> None:
        self._sea, self.outcome, self._plan = sea, Outcome(), functools.partial(Plan, **settings)
        self._live: dict[int, Island] = {}

    def run(self, events: Sequence[Event]) -> None:
        """Does things to islands, one after the other."""
        self._populate()
        self._settle("start")
        for number, event in enumerate(events, start=1):
            time.sleep(event.after)
            getattr(self, event.deed)(event)
            seconds = self._settle(event.deed)
            self.outcome.events[event.deed] += 1
            print(f"{number} of {len(events)}: {event}, all continue after {seconds:.1f} s", flush=True)
            self._populate()
            if event.amount < 0.5:
                self._settle("start")

    def kill(self, event: Event) -> None:
        """An island dies, wherever it is."""
        self._live.pop(self._victim(event).index).kill()

    def segmentation_fault(self, event: Event) -> None:
        """A library of one rank reads memory that is not there; its launcher ends the others."""
        self._one_rank_dies(event, signal.SIGSEGV)

    def abort(self, event: Event) -> None:
        """A rank is ended as NCCL's watchdog ends it."""
        self._one_rank_dies(event, signal.SIGABRT)

    def die_in_the_exchange(self, event: Event) -> None:
        """An island dies with a part of its pseudo-gradient sent."""
        index = self._victim(event).index
        self._live.pop(index).kill()
        self._sea.start(self._plan(index, dies_after=int(3 * event.amount))).wait(START_SECONDS)

    def restart_from_an_older_save(self, event: Event) -> None:
        """An island starts again from a save that the others have long left behind."""
        index = self._victim(event).index
        self._live.pop(index).kill()
        self._live[index] = self._sea.start(self._plan(index, loads=self._older_save(event, index)))

    def restart_of_all_from_a_save(self, event: Event) -> None:
        """All start again, perhaps one of them from an older save than the others."""
        saved = self._sea.saved(*self._live)
        if not saved:
            return
        iteration, late = saved[-1], self._victim(event).index
        self._sea.roll_back_to(iteration)
        for index in self._live:
            older = index == late and event.amount < 0.3
            self._live[index] = self._sea.start(self._plan(index, loads=self._older_save(event, index) if older else iteration))

    def pause(self, event: Event) -> None:
        """An island is stopped for less than a time-out."""
        self._stop([self._victim(event)], HEARTBEAT_TIMEOUT / 2)

    def sleep(self, event: Event) -> None:
        """An island is stopped for longer than the others wait."""
        self._stop([self._victim(event)], HEARTBEAT_TIMEOUT + ISLAND_TIMEOUT + 1)

    def hold(self, event: Event) -> None:
        """A rank holds Python's lock for a while; the heart of its island beats on."""
        self._victim(event).send_to_rank(int(PARTS * event.amount), sea_of.HOLD)

    def hang(self, event: Event) -> None:
        """The same for longer than the others wait."""
        self._victim(event).send_to_rank(int(PARTS * event.amount), sea_of.HANG)

    def fail_in_a_thread(self, event: Event) -> None:
        """A thread of a rank ends with an exception, which has no effect on the run."""
        self._victim(event).send_to_rank(int(PARTS * event.amount), sea_of.FAIL_IN_A_THREAD)

    def cut_one_way(self, event: Event) -> None:
        """A rank does not hear the other islands any more, which hear it."""
        self._victim(event).send_to_rank(int(PARTS * event.amount), sea_of.CUT_ONE_WAY)

    def darken(self, event: Event) -> None:
        """The lighthouse dies, and comes back."""
        self._sea.darken()
        time.sleep(3 * event.amount)
        self._sea.light()

    def cut_off(self, event: Event) -> None:
        """Nobody hears of anybody for a while, and of each at another time again."""
        self._stop(list(self._live.values()), 2 * ISLAND_TIMEOUT * event.amount)

    def _one_rank_dies(self, event: Event, number: int) -> None:
        victim = self._live.pop(self._victim(event).index)
        victim.send_to_rank(int(PARTS * event.amount), number)
        victim.wait(START_SECONDS)

    def _older_save(self, event: Event, index: int) -> int | None:
        saved = [iteration for iteration in self._sea.saved(index) if iteration % INTERVAL == 0]
        return saved[int(event.amount * len(saved))] if saved else None

    def _victim(self, event: Event) -> Island:
        live = [self._live[index] for index in sorted(self._live)]
        return live[event.island % len(live)]

    def _stop(self, islands: Iterable[Island], seconds: float) -> None:
        stopped = list(islands)
        for island in stopped:
            island.send(signal.SIGSTOP)
        time.sleep(seconds)
        for island in stopped:
            island.send(signal.SIGCONT)
            time.sleep(0.1)

    def _populate(self) -> None:
        for index in sorted(set(range(ISLANDS)) - set(self._live)):
            self._live[index] = self._sea.start(self._plan(index))

    def _settle(self, event: str) -> float:
        """Waits until all survivors have continued; restarts an island that ended because the others continued without it."""
        begun = time.monotonic()
        limit = LIMIT if all(island.taken() for island in self._live.values()) else START_SECONDS
        wanted = {island: island.taken() + 2 for island in self._live.values()}

        def have_gone_on() -> bool:
            return all(island.taken() >= number for island, number in wanted.items()) and not self._ended()

        while not have_gone_on():
            # One that hangs is not waited for by the others, but is here: until it wakes, and ends.
            self._sea.until(lambda: have_gone_on() or bool(self._ended()), limit + sea_of.HUNG_SECONDS * (event == "hang"))
            for island in self._ended():
                ends = island.ends()
                assert len(ends) == PARTS, island.state()
                assert all(end.startswith(_CLEAR_ENDS) for end in ends), island.state()
                self.outcome.left_behind[event] += 1
                del self._live[island.index], wanted[island]
            if len(self._live) < LEAST:
                # They wait for others, as they should.
                self._populate()
                wanted.update({island: 2 for island in self._live.values() if island not in wanted})
                limit = START_SECONDS
        seconds = time.monotonic() - begun
        if limit == LIMIT:
            self.outcome.longest = max(self.outcome.longest, seconds)
        return seconds

    def _ended(self) -> list[Island]:
        return [island for island in self._live.values() if not island.is_alive]


DEEDS = [
    name
    for name, method in vars(_Torture).items()
    if not name.startswith("_") and name != "run" and isinstance(method, Callable)
]
"""What can be done to islands."""


def torture(folder: Path, events: Sequence[Event], settings: Mapping[str, Any]) -> Outcome:
    """Does things to islands and checks what they come to.

    Args:
        folder: Folder for what they record.
        events: What is done to them.
        settings: How they exchange, in a :class:`Plan`.
    """
    with archipelago(folder, LEAST, JOIN_TIMEOUT) as sea:
        tortured = _Torture(sea, settings)
        tortured.run(events)
    tortured.outcome.steps = len(sea.check())
    tortured.outcome.conserved = sea.conserved
    tortured.outcome.remaining = len(sea.processes())
    return tortured.outcome


def shrunk(events: Sequence[Event], fails: Callable[[Sequence[Event]], bool], attempts: int) -> list[Event]:
    """Fewer events that still fail: stretches are left out as long as that lasts, ever shorter ones.

    Args:
        events: Events that fail.
        fails: Tries some of them.
        attempts: Most of these tries.
    """
    left, length = list(events), max(len(events) // 2, 1)
    while attempts and len(left) > 1:
        begins = range(0, len(left), length)
        for begin in begins:
            fewer = left[:begin] + left[begin + length :]
            if not attempts or not fewer:
                break
            attempts -= 1
            if fails(fewer):
                left = fewer
                break
        else:
            if length == 1:
                break
            length //= 2
    return left


def _fails(events: Sequence[Event], settings: Mapping[str, Any]) -> bool:
    with tempfile.TemporaryDirectory(prefix="islands-torture-") as folder, contextlib.redirect_stdout(None):
        try:
            torture(Path(folder), events, settings)
        except AssertionError:
            return True
    return False


def main() -> None:
    """Tortures as the command line says and prints the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=70, help="number of events for each seed (%(default)s)")
    parser.add_argument("--seed", type=int, nargs="+", help="seeds of the events, a run for each; by default three new ones")
    parser.add_argument("--replay", metavar="EVENTS", help="these events, as a failure prints them")
    parser.add_argument("--shrink", type=int, default=20, metavar="N", help="attempts to make a failure shorter (%(default)s)")
    parser.add_argument("--overlap", type=int, default=0, help="iterations behind which exchanges are hidden (%(default)s)")
    parser.add_argument("--fragments", type=int, default=1, help="parts that are exchanged at different times (%(default)s)")
    parser.add_argument("--codec", default="fp32", help="what sums look like on the wire (%(default)s)")
    parser.add_argument("--rule", default="nesterov", help="outer rule (%(default)s)")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("overlap", "fragments", "codec", "rule")}
    if options.replay:
        _run([*map(Event.parse, options.replay.split())], options.shrink, settings)
        return
    for seed in options.seed or random.sample(range(10**6), 3):
        print(f"Seed {seed}", flush=True)
        _run(draw(options.events, seed), options.shrink, settings)


def _run(events: Sequence[Event], attempts: int, settings: Mapping[str, Any]) -> None:
    fails = functools.partial(_fails, settings=settings)
    # Stays where it is if something fails.
    folder = Path(tempfile.mkdtemp(prefix="islands-torture-"))
    try:
        outcome = torture(folder, events, settings)
    except AssertionError as error:
        print(f"Failed: {error}; logs in {folder}. The same again: --replay '{' '.join(map(str, events))}'", flush=True)
        print(
            f"Shorter: --replay '{' '.join(map(str, shrunk(events, fails, attempts)))}'",
            flush=True,
        )
        raise
    shutil.rmtree(folder)
    print(outcome)
    assert not outcome.remaining


if __name__ == "__main__":
    main()
