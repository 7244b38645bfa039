"""Training with groups as a simulation: what waiting, failures and restarts leave of a job's time.

Groups depend on each other only where they wait for each other, at outer steps. So time advances from one outer step to the
next, with one draw for each group and round, in NumPy: 10,000 groups take a millisecond a round. A queue of events would find
the same times, one group after the other.

What happens in a round is that of ``outer/elastic.py``, ``exchange/membership.py``, ``integration/resting.py`` and torchft's
lighthouse. ``benchmarks/rounds.py`` holds it against measurements.
"""

import dataclasses
import functools
import math
import statistics

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Lives that are drawn of a job that restarts from saves.
_LIVES = 20_000


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups and what they do between outer steps.

    Attributes:
        number: Number of groups.
        interval: Iterations between outer steps; 1 for synchronous training, whose exchange is that of gradients.
        iteration: Seconds of an iteration of a group of mean speed.
        exchange: Seconds of an exchange over a link of slowness 1.
        work: Seconds of the outer step's own work.
        overlap: Iterations behind which an exchange is hidden.
        in_pairs: Whether two groups exchange, drawn at random, in place of all.
        spread: Standard deviation of the groups' seconds per iteration, as a share of their mean; it lasts.
        jitter: Standard deviation of one group's iterations, as a share of their mean.
        slowness: Multiple of ``exchange`` by pair of sites; groups are numbered site by site.
        together_every: Rounds after which pairs wait for all groups, as they do where the loss is logged; 0 for never.
    """

    number: int
    interval: float
    iteration: float
    exchange: float = 0.0
    work: float = 0.0
    overlap: float = 0
    in_pairs: bool = False
    spread: float = 0.0
    jitter: float = 0.0
    slowness: tuple[tuple[float, ...], ...] = ((1.0,),)
    together_every: int = 0

    @functools.cached_property
    def speeds(self) -> Floats:
        """Seconds per iteration of each group, at the expected places of so many draws (Blom's) and in random order."""
        quantile = statistics.NormalDist().inv_cdf
        scores = np.array([quantile((place + 0.625) / (self.number + 0.25)) for place in range(self.number)])
        found = np.exp(math.sqrt(math.log1p(self.spread**2)) * scores)
        return np.random.default_rng(0).permutation(self.iteration * found / found.mean())

    @functools.cached_property
    def sites(self) -> NDArray[np.int64]:
        """Site of each group."""
        return np.arange(self.number) * len(self.slowness) // self.number

    def seconds(self, iterations: Floats | float, chance: np.random.Generator) -> Floats:
        """Draws the seconds of some iterations of each group; iterations are gamma distributed, and so is their sum."""
        if not self.jitter:
            return self.speeds * iterations
        variance = self.jitter**2
        return self.speeds * variance * chance.gamma(iterations / variance, size=self.number)

    def exchange_of_all(self) -> float:
        """Seconds of an exchange around a ring of all groups: the slowest link decides."""
        if self.number == 1:
            return 0.0
        factors = np.array(self.slowness)
        return self.exchange * float(factors[self.sites, np.roll(self.sites, -1)].max())


@dataclasses.dataclass(frozen=True)
class Faults:
    """Failures of groups, and restarts from saves.

    Attributes:
        mtbf: Mean seconds between failures of one group.
        restart: Seconds from a failure to the first iteration after it.
        save: Seconds for which a save holds up training.
        save_every: Seconds of training between saves.
    """

    mtbf: float = math.inf
    restart: float = 0.0
    save: float = 0.0
    save_every: float = math.inf


@dataclasses.dataclass(frozen=True)
class Membership:
    """Settings of elastic islands, and of their lighthouse.

    Attributes:
        least: Fewest islands of a quorum (``--min-islands``).
        rest_after: Seconds of training after which an island rests (``--pier-sync-seconds``); None for never.
        takeover: Seconds in which those that join receive anchor and momentum.
        heartbeat_timeout: Seconds of silence after which the lighthouse gives an island up.
        join_timeout: Seconds that islands at an outer step wait for one that is alive.
        island_timeout: Seconds until an exchange with a lost node fails (``--pier-island-timeout``).
        island_wait: Seconds that islands wait for a quorum before they end (``--pier-island-wait``).
        tick: Seconds between the lighthouse's looks at who is there.
    """

    least: int
    rest_after: float | None = None
    takeover: float = 0.0
    heartbeat_timeout: float = 5.0
    join_timeout: float = 600.0
    island_timeout: float = 120.0
    island_wait: float = 1800.0
    tick: float = 0.1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a simulated run.

    Attributes:
        trains: Share of all groups' time that goes into iterations that count.
        counts: Share of the run's samples that count: absent and resting islands read none.
        cost: Time of all groups for each iteration that counts, as a multiple of an iteration of one group alone; infinite if
            none counts.
        round: Mean seconds from one outer step to the next.
    """

    trains: float
    counts: float
    cost: float
    round: float


def one_launch(groups: Groups, faults: Faults, rounds: int = 400, seed: int = 0) -> Outcome:
    """Simulates groups of one launch: a failure ends the job, which restarts from its last save.

    Args:
        groups: Groups, of instances or islands of one launch; of one iteration for synchronous training.
        faults: Failures.
        rounds: Rounds to draw.
        seed: Seed of all draws.
    """
    chance = np.random.default_rng(seed)
    seconds, trained = _rounds_of_one_launch(groups, rounds, chance)
    kept = kept_share(chance.exponential(faults.mtbf / groups.number, _LIVES), faults) if _fails(faults) else _saving(faults)
    cost = seconds / (groups.interval * groups.iteration * kept) if kept else math.inf
    return Outcome(kept * trained / seconds, 1.0, cost, seconds / kept if kept else math.inf)


def kept_share(lives: Floats, faults: Faults) -> float:
    """Share of time that a job keeps which restarts from its last save.

    Args:
        lives: Seconds from each failure to the next, the restart included.
        faults: Restarts and saves.
    """
    up = np.maximum(lives - faults.restart, 0.0)
    segments = up // (faults.save_every + faults.save) if math.isfinite(faults.save_every) else np.zeros(len(up))
    return float(segments.sum() * faults.save_every / lives.sum()) if segments.any() else 0.0


def kept_share_expected(mtbf: float, faults: Faults) -> float:
    """The same in closed form, for exponential lives with a mean of ``mtbf`` seconds (Daly, 2006)."""
    segment = faults.save_every + faults.save
    return math.exp(-faults.restart / mtbf) * faults.save_every / mtbf / math.expm1(segment / mtbf)


def young_interval(mtbf: float, save: float) -> float:
    """Seconds between saves that lose least where a job fails every ``mtbf`` seconds (Young, 1974)."""
    return math.sqrt(2 * save * mtbf)


def _fails(faults: Faults) -> bool:
    return math.isfinite(faults.mtbf)


def _saving(faults: Faults) -> float:
    return 1.0 if math.isinf(faults.save_every) else faults.save_every / (faults.save_every + faults.save)


def _rounds_of_one_launch(groups: Groups, rounds: int, chance: np.random.Generator) -> tuple[float, float]:
    """Mean seconds of a round without failures, and those in which a group trains, in the mean of all."""
    now, arrived, trained = np.zeros(groups.number), np.zeros(groups.number), 0.0
    for number in range(1, rounds + 1):
        hidden = groups.seconds(groups.overlap, chance) if groups.overlap else 0.0
        rest = groups.seconds(groups.interval - groups.overlap, chance) if groups.overlap < groups.interval else 0.0
        # What was sent after the last round is applied behind the iterations that hide it.
        now = np.maximum(now + hidden, arrived) + rest
        trained += float(np.mean(hidden + rest))
        arrived = _exchange(groups, now, chance)
        now = (now if groups.overlap else arrived) + groups.work
        if groups.together_every and number % groups.together_every == 0:
            now = np.full_like(now, now.max())
    return float(np.maximum(now, arrived).max()) / rounds, trained / rounds


def _exchange(groups: Groups, ready: Floats, chance: np.random.Generator) -> Floats:
    """When the exchange of each group is complete, that each is ready for at its own time."""
    if not groups.in_pairs:
        return np.full_like(ready, ready.max() + groups.exchange_of_all())
    order = chance.permutation(groups.number)
    one, other = order[: groups.number // 2], order[groups.number // 2 : groups.number // 2 * 2]
    complete = ready.copy()
    seconds = groups.exchange * np.array(groups.slowness)[groups.sites[one], groups.sites[other]]
    complete[one] = complete[other] = np.maximum(ready[one], ready[other]) + seconds
    return complete


class Islands:
    """Elastic islands between two outer steps."""

    def __init__(self, groups: Groups, faults: Faults, membership: Membership, seed: int) -> None:
        self.groups, self.faults, self.membership = groups, faults, membership
        self.chance = np.random.default_rng(seed)
        self.now = self.saved_at = 0.0
        self.are_members = np.ones(groups.number, bool)
        self.back_at = np.zeros(groups.number)
        # Iterations and seconds of training that count, and rounds: up to the last save, and since.
        self.saved, self.unsaved = np.zeros(3), np.zeros(3)
        self.iterations = self._iterations()

    def _iterations(self) -> Floats:
        """Iterations of an interval that each island trains: until its time is up, and the one of the outer step."""
        after, interval = self.membership.rest_after, float(self.groups.interval)
        if after is None:
            return np.full(self.groups.number, interval)
        trained = np.maximum(np.ceil(after / self.groups.speeds - 1e-9), 1)
        return np.where(trained >= interval - 1, interval, trained + 1)

    def take_round(self) -> None:
        """Trains an interval and takes its outer step, however often that must be tried."""
        seconds = self.groups.seconds(self.iterations, self.chance)
        drawn = self.chance.exponential(self.faults.mtbf, self.groups.number) if _fails(self.faults) else np.inf
        # Seconds from now to the end of each member.
        lives = np.where(self.are_members, drawn, -np.inf)
        met = self.quorum(seconds, lives)
        while True:
            met, back_in = self._wait_for_enough(lives, met)
            there, joining = lives > met, (lives <= met) & (back_in <= met)
            if not there.any():
                # Nobody has the last anchor any more: all start again from the last save.
                self.now += float(lives.max()) + self.faults.restart
                self.are_members[:], self.unsaved[:], self.saved_at = True, 0.0, self.now
                return
            exchange = self.groups.exchange_of_all() + (self.membership.takeover if joining.any() else 0.0)
            lost = there & (lives < met + exchange)
            if not lost.any():
                break
            # The exchange fails; the next quorum is one without those that are lost.
            met = float(lives[lost].min()) + max(self.membership.island_timeout, self.membership.heartbeat_timeout)
        self.back_at = self.now + back_in
        self.are_members = there | joining
        self.unsaved += [self.iterations[there].sum(), seconds[there].sum(), 1]
        self.now += met + exchange + self.groups.work
        if self.now - self.saved_at >= self.faults.save_every:
            self.now += self.faults.save
            self.saved_at = self.now
            self.saved += self.unsaved
            self.unsaved[:] = 0.0

    def quorum(self, seconds: Floats, lives: Floats) -> float:
        """Seconds until the quorum: all that live are there, and those that died are given up; infinite if all died."""
        there = lives > seconds
        if not there.any():
            return math.inf
        met = self._without_late(seconds, lives, there)
        while (died := self.are_members & (lives < met)).any():
            given_up = float(lives[died].max()) + self.membership.heartbeat_timeout
            if given_up <= met:
                break
            met = given_up
        # The lighthouse looks for a quorum now and then.
        return met + self.membership.tick / 2

    def _without_late(self, seconds: Floats, lives: Floats, there: Flags) -> float:
        """Seconds until all are there, or until a time-out: those that come later are left behind, and start again."""
        limit = float(seconds[there].min()) + self.membership.join_timeout
        late = there & (seconds > limit)
        on_time = int((there & ~late).sum())
        # The lighthouse forms no quorum of half of those that are alive.
        if not late.any() or on_time < self.membership.least or 2 * on_time <= there.sum():
            return float(seconds[there].max())
        self.are_members[late], lives[late] = False, -np.inf
        self.back_at[late] = self.now + seconds[late] + self.faults.restart
        return limit

    def _wait_for_enough(self, lives: Floats, met: float) -> tuple[float, Floats]:
        """Seconds until enough islands are there, and those until each is back that is not."""
        back_in = np.where(self.are_members, lives + self.faults.restart, self.back_at - self.now)
        waited = met
        for waited in (met, *np.sort(back_in[(back_in > met) & np.isfinite(back_in)])):
            if ((lives > waited) | (back_in <= waited)).sum() >= self.membership.least:
                break
        if waited - met > self.membership.island_wait:
            # All have saved and ended, and start again.
            waited = max(waited, met + self.membership.island_wait + self.faults.restart)
            lives[lives > met] = np.inf
        return float(waited), back_in

    def outcome(self) -> Outcome:
        """What has come of it until now."""
        iterations, seconds, rounds = map(float, self.saved + self.unsaved)
        if not rounds:
            return Outcome(0.0, 0.0, math.inf, math.inf)
        of_all = self.groups.number * self.now
        counts = iterations / (self.groups.number * rounds * self.groups.interval)
        return Outcome(seconds / of_all, counts, of_all / (iterations * self.groups.iteration), self.now / rounds)


def elastic(groups: Groups, faults: Faults, membership: Membership, rounds: int = 400, seed: int = 0) -> Outcome:
    """Simulates elastic islands: those that fail are missed until they are back.

    Args:
        groups: Groups; neither overlapped nor in pairs, which elastic islands refuse.
        faults: Failures.
        membership: Settings.
        rounds: Rounds to take, those that are lost and retried included.
        seed: Seed of all draws.
    """
    islands = Islands(groups, faults, membership, seed)
    for _ in range(rounds):
        islands.take_round()
    return islands.outcome()
