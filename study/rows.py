"""What the study trains: every row of its tables, as data."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from pier_megatron.schedules import PRESETS, Preset

ITERATIONS = 600
BATCH = 64
"""Sequences in a batch of all groups together."""

LEARNING_RATES = (4e-3, 8e-3, 1.6e-2)
"""Rates that synchronous AdamW chooses from before anything is compared with it."""

MUON_RATES = (1e-2, 2e-2, 4e-2, 8e-2)
"""Rates of matrices that synchronous Muon chooses from; AdamW trains all other parameters, at the rate chosen for it."""

SYNCHRONOUS = "adamw"
ADAM, MUON = "adam", "muon"
METHODS = ("diloco", "pier", "pier-rising")

# Schedules with one part changed.
_PIER, _RISING = PRESETS["pier"], PRESETS["pier-rising"]
_UNLIMITED = "pier-rising without the limit"
_SHORT_DILOCO = "diloco with momentum 0.5"
_NOLOCO = PRESETS["noloco"]
IN_PAIRS: dict[str, Preset] = {
    "noloco with momentum warmup": dataclasses.replace(_NOLOCO, warmup_momentum=0.5),
    "pier-rising in pairs": dataclasses.replace(_RISING, subgroup_size=2),
}
ABLATIONS: dict[str, Preset] = {
    "pier without momentum warmup": dataclasses.replace(_PIER, warmup_momentum=None),
    "pier without momentum decay": dataclasses.replace(_PIER, momentum=_PIER.momentum[:1]),
    "pier without the ramp": dataclasses.replace(_PIER, learning_rate=_PIER.learning_rate[1:]),
    _UNLIMITED: dataclasses.replace(_RISING, longest_horizon=None),
    **IN_PAIRS,
    _SHORT_DILOCO: dataclasses.replace(
        PRESETS["diloco"], momentum=tuple(dataclasses.replace(part, start=0.5, end=0.5) for part in PRESETS["diloco"].momentum)
    ),
    "pier-rising reversed": dataclasses.replace(
        _RISING, momentum=tuple(dataclasses.replace(part, start=part.end, end=part.start) for part in _RISING.momentum)
    ),
}


# What a run and its synchronous baseline have in common, apart from the seed.
_COMPARED = ("learning_rate", "batch_scale", "inner", "muon_rate")


@dataclasses.dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        method: :data:`SYNCHRONOUS`, or a preset of the outer schedule.
        seed: Seed of weights and data order.
        groups: Number of groups; synchronous training has as many ranks.
        interval: Iterations between outer steps.
        lazy_start: Share of the run that is synchronous.
        learning_rate: Learning rate of AdamW; None for the one that synchronous AdamW chose.
        batch_scale: Factor on the batch and on the learning rate; the run is as many times shorter.
        inner: What trains inside a group, or synchronously.
        muon_rate: Learning rate of Muon; None for the one that synchronous Muon chose.
        dtype: What a pseudo-gradient is sent as, with error feedback.
        overlap: Iterations behind which an exchange is hidden.
    """

    method: str
    seed: int
    groups: int = 4
    interval: int = 20
    lazy_start: float = 0.1
    learning_rate: float | None = None
    batch_scale: int = 1
    inner: str = ADAM
    muon_rate: float | None = None
    dtype: str = "fp32"
    overlap: int = 0

    @property
    def name(self) -> str:
        """Name of its folder: everything that makes it differ from others."""
        parts = [self.method.replace(" ", "-"), f"g{self.groups}"]
        if self.method != SYNCHRONOUS:
            parts += [f"h{self.interval}", f"lazy{round(100 * self.lazy_start)}"]
        if self.dtype != "fp32":
            parts.append(self.dtype)
        if self.overlap:
            parts.append(f"hidden{self.overlap}")
        if self.batch_scale > 1:
            parts.append(f"batch{self.batch_scale}")
        if self.inner == MUON:
            parts.append(MUON if self.muon_rate is None else f"{MUON}{self.muon_rate:g}")
        if self.learning_rate is not None:
            parts.append(f"lr{self.learning_rate:g}")
        return "-".join([*parts, f"seed{self.seed}"])

    @property
    def baseline(self) -> "Row":
        """The synchronous training that it is compared with: the same batches in the same order."""
        return dataclasses.replace(Row(SYNCHRONOUS, self.seed, groups=2), **{name: getattr(self, name) for name in _COMPARED})


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that are read together.

    Attributes:
        title: What is varied.
        methods: Method of each column.
        variants: Name of each line, and what it changes in a :class:`Row`'s defaults.
    """

    title: str
    methods: tuple[str, ...]
    variants: dict[str, dict[str, Any]]

    def rows(self, seeds: int) -> Iterator[Row]:
        """All trainings of the table except the synchronous ones."""
        for seed, changes, method in itertools.product(range(1, seeds + 1), self.variants.values(), self.methods):
            yield Row(method, seed, **changes)


_BOTH = ("diloco", "pier-rising")
_WITH_MUON = (*_BOTH, _SHORT_DILOCO, "pier-muon", "pier-muon-annealed")
# A lazy start lasts at least an interval.
_LONG_INTERVALS = {"H = 50": {"interval": 50}, "H = 200, lazy start 33 %": {"interval": 200, "lazy_start": 1 / 3}}

_INTERVALS = {"H = 10": {"interval": 10}, "H = 20": {"interval": 20}} | _LONG_INTERVALS

TABLES = (
    Table("Number of groups", METHODS, {f"{groups} groups": {"groups": groups} for groups in (2, 4, 8)}),
    Table("Sync interval, 4 groups", _BOTH, _INTERVALS),
    Table(
        "The limit of the momentum horizon, 4 groups",
        ("pier-rising", _UNLIMITED),
        _LONG_INTERVALS,
    ),
    Table("Lazy start, 8 groups", _BOTH, {f"{share:.0%}": {"lazy_start": share, "groups": 8} for share in (0.1, 0.3)}),
    Table(
        "Parts of a schedule, 4 groups",
        (
            *("local-sgd", "pier", "pier-cosine", "pier-rising"),
            *(name for name in ABLATIONS if name not in (_UNLIMITED, _SHORT_DILOCO)),
        ),
        {"H = 20": {}},
    ),
    Table("Many groups", _BOTH, {"16 groups": {"groups": 16}}),
    Table(
        "Gossip pairs, equal intervals",
        (*_BOTH, "noloco"),
        {f"{groups} groups": {"groups": groups} for groups in (4, 8, 16)},
    ),
    Table(
        "Gossip pairs, half the interval: the bytes of an all-reduce at H = 20",
        ("noloco",),
        {f"{groups} groups, H = 10": {"groups": groups, "interval": 10} for groups in (4, 8, 16)},
    ),
    Table("Gossip pairs, start and schedule, 8 groups", tuple(IN_PAIRS), {"H = 20": {"groups": 8}}),
    Table("Gossip pairs without a lazy start, 8 groups", (*_BOTH, "noloco"), {"H = 20": {"groups": 8, "lazy_start": 0.0}}),
    Table(
        "Weak scaling: the batch and the learning rate grow with the groups",
        _BOTH,
        {f"{scale} x, {2 * scale} groups": {"batch_scale": scale, "groups": 2 * scale} for scale in (1, 2)},
    ),
    Table(
        "Muon inside: number of groups",
        _WITH_MUON,
        {f"{groups} groups": {"groups": groups, "inner": MUON} for groups in (2, 4, 8)},
    ),
    Table("Muon inside: many groups", ("diloco", "pier-muon-annealed"), {"16 groups": {"groups": 16, "inner": MUON}}),
    Table(
        "Muon inside: sync interval, 4 groups",
        ("diloco", "pier-muon"),
        {name: {**changes, "inner": MUON} for name, changes in _INTERVALS.items()},
    ),
    Table(
        "Muon inside: AdamW at twice its rate",
        ("diloco", "pier-muon-annealed"),
        {f"{groups} groups": {"groups": groups, "learning_rate": 1.6e-2, "inner": MUON} for groups in (4, 8)},
    ),
    Table(
        "Muon inside: int4 at a quarter of the interval",
        ("pier-muon-annealed",),
        {"8 groups, H = 5, int4": {"groups": 8, "interval": 5, "dtype": "int4", "inner": MUON}},
    ),
    Table(
        "Muon inside: one bit in every iteration",
        ("local-sgd",),
        {"8 groups, H = 1, int1": {"groups": 8, "interval": 1, "dtype": "int1", "inner": MUON}},
    ),
    Table(
        "Muon inside: few bits, often",
        ("pier-frequent",),
        {
            "8 groups, H = 1, int1, hidden": {"groups": 8, "interval": 1, "dtype": "int1", "inner": MUON, "overlap": 1},
            "8 groups, H = 5, int2": {"groups": 8, "interval": 5, "dtype": "int2", "inner": MUON},
            "16 groups, H = 2, int2": {"groups": 16, "interval": 2, "dtype": "int2", "inner": MUON},
        },
    ),
    Table(
        "Muon inside: few bits, rarely",
        ("pier-muon-annealed",),
        {"8 groups, H = 10, int2": {"groups": 8, "interval": 10, "dtype": "int2", "inner": MUON}},
    ),
    Table("Few bits, 8 groups", ("pier-annealed",), {"H = 10, int2": {"groups": 8, "interval": 10, "dtype": "int2"}}),
    Table("One group", ("pier-annealed",), {"H = 20": {"groups": 1}}),
    Table("Orthogonal steps, 8 groups", ("pier-orthogonal",), {"H = 20": {"groups": 8}}),
    Table("Annealed momentum, 4 groups", ("pier-rising", "pier-annealed"), {"H = 20": {}}),
)


def learning_rate_sweep(seeds: int) -> list[Row]:
    """The trainings that choose the learning rate."""
    return [Row(SYNCHRONOUS, seed, groups=2, learning_rate=rate) for rate in LEARNING_RATES for seed in range(1, seeds + 1)]


def muon_sweep(seeds: int, learning_rate: float) -> list[Row]:
    """The trainings that choose the learning rate of Muon."""
    of_muon = functools.partial(Row, SYNCHRONOUS, groups=2, learning_rate=learning_rate, inner=MUON)
    return [of_muon(seed, muon_rate=rate) for rate in MUON_RATES for seed in range(1, seeds + 1)]
