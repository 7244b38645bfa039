"""What failures and uneven speeds leave of a job, by the simulation of rounds, and which settings lose least."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from pier_megatron.commands.lighthouse import more_than_half
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, Plan, Prediction, Way, predict
from pier_megatron.commands.plan.rounds import Faults, Groups, Membership, Outcome, elastic, one_launch, young_interval
from pier_megatron.commands.plan.troubles import Troubles
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.codecs import CODECS

# Settings that cost so many times what the best ones do are as good: a shorter interval loses less.
_AS_GOOD = 1.02

# Elastic islands that cost more than this share of one launch are not worth a lighthouse.
_WORTH = 0.97

_INTERVALS = (10, 20, 50, 100, 200, 500)

# Draws of a simulation, and fewest and most rounds: enough for a mean, few enough for a moment.
_DRAWS, _FEWEST, _MOST_ROUNDS = 1_000_000, 100, 400

# Of the picture: hours between failures of a node, and numbers of groups.
_SWEPT_HOURS = tuple(10 ** (power / 2) for power in range(1, 11))
_SWEPT_NUMBERS = (10, 30, 100, 300, 1000, 3000, 10_000)

SYNCHRONOUS, ONE_LAUNCH, PAIRS, ELASTIC, RESTING = (
    "synchronous, overlap flags",
    "Pier, one launch",
    "NoLoCo pairs, one launch",
    "Pier, elastic islands",
    "Pier, elastic islands that rest",
)
"""Ways to run a job. Those of one launch restart from a save; islands restart alone."""

_OF_ISLANDS = (ELASTIC, RESTING)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to run a job, with its settings.

    Attributes:
        way: Name of the way.
        interval: Iterations between outer steps.
        rest_after: Seconds of ``--pier-sync-seconds``; None for islands that do not rest.
    """

    way: str
    interval: int
    rest_after: float | None = None


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A job whose ways to run can be simulated.

    Attributes:
        job: The job.
        cluster: Cluster on which it runs.
        config: Settings of the job.
        troubles: What goes wrong.
        log_interval: Iterations between logs, at which pairs wait for all groups.
    """

    job: Job
    cluster: Cluster
    config: PierConfig
    troubles: Troubles
    log_interval: int

    @functools.cached_property
    def prediction(self) -> Prediction:
        """Times of the job without troubles."""
        return predict(self.job, self.cluster)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return math.ceil(self.job.gpus / self.cluster.gpus_per_node)

    def mtbf(self, way: str) -> float:
        """Seconds between failures of what restarts: the job, or an island, which shares no node with another."""
        nodes = max(self.nodes / self.job.groups, 1.0) if way in _OF_ISLANDS else self.nodes
        return 3600 * self.troubles.mtbf / nodes

    def save_every(self, way: str) -> float:
        """Seconds between saves."""
        mtbf = self.mtbf(way)
        return young_interval(mtbf, self.troubles.save) if math.isfinite(mtbf) else math.inf

    def groups(self, choice: Choice) -> Groups:
        """Groups that train in this way."""
        found, config = self.prediction, self.config
        dtype, interval, overlap = config.exchange_dtype, float(choice.interval), config.overlap
        if choice.way == SYNCHRONOUS:
            exchange, work, overlap = found.synchronous_hidden - found.local, 0.0, 0
        else:
            if choice.way in _OF_ISLANDS:
                # Elastic islands repeat exchanges that fail, which few bits and exchanges behind training do not allow.
                dtype, overlap = ("fp32" if CODECS[dtype].needs_error_feedback else dtype), 0
            parts = config.fragments if choice.way == ONE_LAUNCH else 1
            interval /= parts
            way = Way(choice.interval, overlap, dtype=dtype, in_pairs=choice.way == PAIRS, offload=config.offload)
            exchange, work = (seconds / parts for seconds in found.exchanged_and_waited(way))
        return Groups(
            self.job.groups,
            interval,
            found.local,
            exchange=exchange,
            work=work,
            overlap=min(overlap, interval),
            in_pairs=choice.way == PAIRS,
            spread=self.troubles.spread,
            together_every=max(self.log_interval // choice.interval, 1),
        )

    def membership(self, choice: Choice, groups: Groups) -> Membership:
        """Settings of elastic islands; those that join receive 8 bytes per parameter, twice what pairs send."""
        slowest = float(groups.speeds.max()) * groups.interval
        return Membership(
            more_than_half(self.job.groups),
            choice.rest_after,
            takeover=2 * self.prediction.pairs,
            join_timeout=max(Membership.join_timeout, 2 * slowest),
            island_timeout=self.config.island_timeout,
            island_wait=60 * self.config.island_wait,
        )

    def run(self, choice: Choice) -> Outcome:
        """Simulates a way."""
        groups, mtbf = self.groups(choice), self.mtbf(choice.way)
        rounds = int(min(max(_DRAWS / groups.number, _FEWEST), _MOST_ROUNDS))
        faults = Faults(mtbf, self.troubles.restart, self.troubles.save, self.save_every(choice.way))
        if choice.way in _OF_ISLANDS:
            return elastic(groups, faults, self.membership(choice, groups), rounds)
        return one_launch(groups, dataclasses.replace(faults, mtbf=mtbf * groups.number), rounds)

    def resting(self, interval: int) -> list[Choice]:
        """Islands that rest, the shortest time first: when the fastest has trained its interval, and when half of them have."""
        if not self.troubles.spread:
            return []
        seconds = interval * np.sort(self.groups(Choice(RESTING, interval)).speeds)
        return [Choice(RESTING, interval, _rounded(seconds[place])) for place in (0, len(seconds) // 2)]

    def save_interval(self, choice: Choice, outcome: Outcome) -> int | None:
        """``--save-interval``: iterations between saves, a multiple of the interval; None without failures."""
        seconds, groups = self.save_every(choice.way), self.groups(choice)
        if math.isinf(seconds):
            return None
        undisturbed = outcome if choice.way in _OF_ISLANDS else one_launch(groups, Faults(), _FEWEST)
        rounds = seconds / undisturbed.round * groups.interval / choice.interval
        return max(round(rounds), 1) * choice.interval


def make_plan(simulation: Simulation, iterations: int) -> Plan:
    """Simulates the job's ways to run, and chooses settings.

    Args:
        simulation: The job.
        iterations: Iterations of its run.

    Returns:
        Plain values: what was assumed, a row for each way, and advice.
    """
    config = simulation.config
    one = PAIRS if config.subgroup == 2 else ONE_LAUNCH
    own = [Choice(SYNCHRONOUS, 1), Choice(one, config.sync_interval), Choice(ELASTIC, config.sync_interval)]
    of_launch = [Choice(one, interval) for interval in _tried(config) if _starts(config, interval)]
    of_islands = [
        choice for interval in _tried(config) for choice in (Choice(ELASTIC, interval), *simulation.resting(interval))
    ]
    outcomes = {choice: simulation.run(choice) for choice in dict.fromkeys((*own, *of_launch, *of_islands))}
    launched, islands = (_best({choice: outcomes[choice] for choice in choices}) for choices in (of_launch, of_islands))
    chosen = islands if outcomes[islands].cost < _WORTH * outcomes[launched].cost else launched
    rows = {choice: _row(simulation, choice, outcomes[choice], iterations) for choice in (*own, launched, islands)}
    advice, troubles = rows[chosen], simulation.troubles
    return {
        "assumed": {
            "hours between failures of a node": _finite(troubles.mtbf),
            "hours between failures of the job": _finite(simulation.mtbf(one) / 3600),
            "hours between failures of a group": _finite(simulation.mtbf(ELASTIC) / 3600),
            "spread": troubles.spread,
            "restart": troubles.restart,
            "save": troubles.save,
        },
        "ways": list(rows.values()),
        "advice": advice
        | {
            "flags": _flags(config, chosen, advice["save interval"]),
            "without": _refused(config, chosen),
        },
    }


def _tried(config: PierConfig) -> list[int]:
    """Intervals to look at, the job's own among them."""
    return sorted({*_INTERVALS, config.sync_interval})


def _starts(config: PierConfig, interval: int) -> bool:
    """Whether the job would start with an interval."""
    try:
        dataclasses.replace(config, sync_interval=interval)
    except PierConfigError:
        return False
    return True


def _best(outcomes: Mapping[Choice, Outcome]) -> Choice:
    """The shortest interval, and then the longest time before islands rest, that costs hardly more than what costs least."""
    limit = _AS_GOOD * min(outcome.cost for outcome in outcomes.values())
    good = [choice for choice, outcome in outcomes.items() if outcome.cost <= limit]
    return min(good, key=lambda choice: (choice.interval, -(choice.rest_after or math.inf)))


def _row(simulation: Simulation, choice: Choice, outcome: Outcome, iterations: int) -> Plan:
    seconds = outcome.cost * simulation.prediction.local * iterations
    groups = simulation.groups(choice)
    return dataclasses.asdict(choice) | {
        "trains": outcome.trains,
        "counts": outcome.counts,
        "cost": _finite(outcome.cost),
        "GPU-hours": _finite(seconds * simulation.job.gpus / 3600),
        "save interval": simulation.save_interval(choice, outcome),
        "join timeout": simulation.membership(choice, groups).join_timeout,
    }


def _flags(config: PierConfig, choice: Choice, save_interval: int | None) -> str:
    found = []
    if choice.way in _OF_ISLANDS and config.lighthouse is None:
        found.append("--pier-lighthouse URL --pier-island K --pier-lazy-start-iters 0")
        if config.codec.needs_error_feedback:
            found.append("--pier-exchange-dtype fp32")
        elif config.has_error_feedback:
            found.append("--pier-no-error-feedback")
    found.append(f"--pier-sync-interval {choice.interval}")
    if choice.rest_after is not None:
        found.append(f"--pier-sync-seconds {choice.rest_after:g}")
    return " ".join([*found, *([f"--save-interval {save_interval}"] if save_interval else [])])


def _refused(config: PierConfig, choice: Choice) -> list[str]:
    """Flags of the job that do not go with a way."""
    if choice.way not in _OF_ISLANDS:
        return ["--pier-lighthouse and the flags that need it"] if config.lighthouse is not None else []
    given = {
        "--pier-overlap": config.overlap > 0,
        "--pier-fragments": config.fragments > 1,
        "--pier-outlier-zscore": config.outlier_zscore is not None,
        "--pier-subgroup-size and --pier-preset noloco": config.subgroup is not None,
        "--pier-sync-seconds": config.sync_seconds is not None and choice.rest_after is None,
    }
    return [flag for flag, is_given in given.items() if is_given]


def _finite(value: float) -> float | None:
    # JSON has no infinity.
    return value if math.isfinite(value) else None


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def sweeps(simulation: Simulation) -> dict[str, dict[float, dict[str, float | None]]]:
    """Cost of each way over hours between failures of a node, numbers of groups of the job's size, and intervals."""
    troubles, config = simulation.troubles, simulation.config
    own = config.sync_interval
    failing = {
        hours: dataclasses.replace(simulation, troubles=dataclasses.replace(troubles, mtbf=hours)) for hours in _SWEPT_HOURS
    }
    return {
        "hours": {hours: _costs(of_hours, own) for hours, of_hours in failing.items()},
        "groups": {number: _costs(of_size(simulation, number), own) for number in _SWEPT_NUMBERS},
        "interval": {interval: _costs(simulation, interval) for interval in _tried(config)},
    }


def of_size(simulation: Simulation, number: int) -> Simulation:
    """The same with another number of groups, each of which trains what it did."""
    job = simulation.job
    factor = number / job.groups
    gpus, replicas = round(job.gpus * factor), round(job.replicas * factor)
    scaled = dataclasses.replace(job, groups=number, gpus=gpus, replicas=replicas, flops=job.flops * factor)
    return dataclasses.replace(simulation, job=scaled)


def _costs(simulation: Simulation, interval: int) -> dict[str, float | None]:
    choices = [Choice(SYNCHRONOUS, 1), Choice(ONE_LAUNCH, interval), Choice(ELASTIC, interval)]
    return {choice.way: _finite(simulation.run(choice).cost) for choice in (*choices, *simulation.resting(interval)[:1])}


def lines(found: Plan, groups: int) -> list[str]:
    """The lines of a plan's text."""
    assumed, advice = found["assumed"], found["advice"]
    hours = [assumed[f"hours between failures of a {what}"] for what in ("node", "group")]
    failures = ""
    if hours[0] is not None:
        failures = (
            f"a node fails every {hours[0]:,.4g} h, a group every {hours[1]:,.4g} h, any of the job every "
            f"{assumed['hours between failures of the job']:,.4g} h; a restart takes {assumed['restart'] / 60:g} min, a save "
            f"{assumed['save']:g} s; "
        )
    title = "shares of time that trains, and of samples that count"
    width = max(len(title), *(len(_name(row)) for row in found["ways"]))
    table = [
        f"{_name(row):{width}} {row['trains']:7.1%} {row['counts']:8.1%} {_number(row['cost'], '11.2f')} "
        f"{_number(row['GPU-hours'], '11,.0f')} {row['save interval'] or '':>13}"
        for row in found["ways"]
    ]
    return [
        "",
        f"Simulated (docs/planner.md#failures): {failures}groups differ in speed by {assumed['spread']:.1%}",
        f"{title:{width}} {'trains':>7} {'counts':>8} {'x one alone':>11} {'GPU-hours':>11} {'save-interval':>13}",
        *table,
        _advice(advice, groups),
    ]


def _advice(advice: Plan, groups: int) -> str:
    if advice["cost"] is None:
        return "Advice: none. Failures come sooner than saves, whatever the way: no run ends."
    least = f"--islands {groups} --min-islands {more_than_half(groups)}"
    return (
        f"Advice: {_name(advice)}: {advice['flags']}"
        + (f", without {', '.join(advice['without'])}" if advice["without"] else "")
        + (f" (lighthouse: {least} --join-timeout {advice['join timeout']:.0f})" if advice["way"] in _OF_ISLANDS else "")
    )


def _name(row: Plan) -> str:
    if row["way"] == SYNCHRONOUS:
        return SYNCHRONOUS
    rests = "" if row["rest_after"] is None else f" after {row['rest_after']:g} s"
    return f"{row['way']}{rests}, H = {row['interval']}"


def _number(value: float | None, form: str) -> str:
    return f"{value:{form}}" if value is not None else f"{'never ends':>11}"
