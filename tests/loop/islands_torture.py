"""Torture of islands that are jobs: they are killed, paused and cut off at random, and so is their lighthouse.

``make torture``, or ``python tests/loop/islands_torture.py [--events N] [--seed S]``. Whatever happens, those who are left go
on within the time-outs, all hold the same anchors, and these are those of a simulation with the same membership.
"""

import argparse
import collections
import dataclasses
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from archipelago import HEARTBEAT_TIMEOUT, ISLAND_TIMEOUT, LIMIT, PARTS, START_SECONDS, Archipelago, Island, Plan, archipelago

ISLANDS, LEAST = 3, 2

# The others went on without it, or the lighthouse was away when it started.
_CLEAR_ENDS = ("LeftBehindError", "PierConfigError: --pier-lighthouse")


@dataclasses.dataclass
class Outcome:
    """What was done to islands and what came of it.

    Attributes:
        events: How often each thing was done.
        left_behind: After which of them islands had to start again, without having been killed.
        steps: Outer steps that were taken.
        longest: Seconds until all who were left had gone on.
        remaining: Processes that outlived their island.
    """

    events: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    left_behind: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    steps: int = 0
    longest: float = 0.0
    remaining: int = 0


class _Torture:
    def __init__(self, sea: Archipelago, seed: int) -> None:
        self._sea, self._chance, self.outcome = sea, random.Random(seed), Outcome()
        self._live: dict[int, Island] = {}

    def run(self, events: int) -> None:
        """Does so many things to islands."""
        self._populate()
        self._settle("start")
        deeds = [self.kill, self.die_in_the_exchange, self.pause, self.sleep, self.darken, self.cut_off]
        for number in range(1, events + 1):
            deed = self._chance.choice(deeds)
            time.sleep(self._chance.random())
            deed()
            seconds = self._settle(deed.__name__)
            self.outcome.events[deed.__name__] += 1
            print(f"{number} of {events}: {deed.__name__}, all go on after {seconds:.1f} s", flush=True)
            self._populate()
            if self._chance.random() < 0.5:
                self._settle("start")

    def kill(self) -> None:
        """An island dies, wherever it is."""
        self._live.pop(self._victim().index).kill()

    def die_in_the_exchange(self) -> None:
        """An island dies with a part of its pseudo-gradient sent."""
        index = self._victim().index
        self._live.pop(index).kill()
        self._sea.start(Plan(index, dies_after=self._chance.randint(0, 2))).wait(START_SECONDS)

    def pause(self) -> None:
        """An island stands still for less than a time-out."""
        self._stop([self._victim()], HEARTBEAT_TIMEOUT / 2)

    def sleep(self) -> None:
        """An island stands still for longer than the others wait."""
        self._stop([self._victim()], HEARTBEAT_TIMEOUT + ISLAND_TIMEOUT + 1)

    def darken(self) -> None:
        """The lighthouse dies, and comes back."""
        self._sea.darken()
        time.sleep(3 * self._chance.random())
        self._sea.light()

    def cut_off(self) -> None:
        """Nobody hears of anybody for a while, and of each at another time again."""
        self._stop(list(self._live.values()), 2 * ISLAND_TIMEOUT * self._chance.random())

    def _victim(self) -> Island:
        return self._chance.choice(list(self._live.values()))

    def _stop(self, islands: list[Island], seconds: float) -> None:
        for island in islands:
            island.send(signal.SIGSTOP)
        time.sleep(seconds)
        self._chance.shuffle(islands)
        for island in islands:
            island.send(signal.SIGCONT)
            time.sleep(self._chance.random() / 5)

    def _populate(self) -> None:
        for index in sorted(set(range(ISLANDS)) - set(self._live)):
            self._live[index] = self._sea.start(Plan(index))

    def _settle(self, event: str) -> float:
        """Waits until all who are left have gone on; who has ended since the others did without it is started again."""
        begun = time.monotonic()
        limit = LIMIT if all(island.taken() for island in self._live.values()) else START_SECONDS
        wanted = {island: island.taken() + 2 for island in self._live.values()}

        def have_gone_on() -> bool:
            return all(island.taken() >= number for island, number in wanted.items()) and not self._ended()

        while not have_gone_on():
            self._sea.until(lambda: have_gone_on() or bool(self._ended()), limit)
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


def torture(folder: Path, events: int, seed: int) -> Outcome:
    """Does things to islands, ``events`` in number, and checks what they come to.

    Args:
        folder: For what they write down.
        events: Number of them.
        seed: Of the random choices.
    """
    with archipelago(folder, LEAST) as sea:
        tortured = _Torture(sea, seed)
        tortured.run(events)
    tortured.outcome.steps = len(sea.check())
    tortured.outcome.remaining = len(sea.processes())
    return tortured.outcome


def main() -> None:
    """Tortures as the command line says and prints the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100, help="things that are done to islands (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (%(default)s)")
    options = parser.parse_args()
    print(f"Seed {options.seed}", flush=True)
    # Stays where it is if something fails.
    folder = Path(tempfile.mkdtemp(prefix="islands-torture-"))
    outcome = torture(folder, options.events, options.seed)
    shutil.rmtree(folder)
    print(outcome)
    sys.exit(bool(outcome.remaining))


if __name__ == "__main__":
    main()
