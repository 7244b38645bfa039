"""Which interval, codec, overlap and preset lose least on a given link: docs/frontier.md with a job's times."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from pier_megatron.commands.plan import ways
from pier_megatron.commands.plan.model import Plan, Prediction, Way
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.codecs import BLOCK, CODECS

# Up to so many times the fastest way, less loss is worth more than speed.
_AS_FAST = 1.05


@dataclasses.dataclass(frozen=True)
class Point:
    """Groups that the study has trained, and what they lost.

    Attributes:
        inner: Optimizer inside a group.
        groups: Number of groups.
        interval: Iterations between outer steps.
        dtype: Codec of pseudo-gradients.
        preset: Schedule of the outer step.
        overlap: Iterations behind which the exchange is hidden.
        gap: Final validation loss above that of synchronous training with the same inner optimizer, nats per byte, mean of
            the seeds.
        seeds: Number of paired seeds.
    """

    inner: str
    groups: int
    interval: int
    dtype: str
    preset: str
    overlap: int
    gap: float
    seeds: int

    @property
    def way(self) -> Way:
        """Its outer steps, for the model of times."""
        return Way(self.interval, self.overlap, dtype=self.dtype)

    @property
    def flags(self) -> str:
        """What to add to a command; it may have an overlap of its own, longer than this interval."""
        exchange = f"--pier-exchange-dtype {self.dtype} --pier-overlap {self.overlap}"
        return f"--pier-sync-interval {self.interval} {exchange} --pier-preset {self.preset}"

    @property
    def bits(self) -> float:
        """Bits for each parameter and iteration; an FP32 all-reduce in every iteration has 32."""
        return 8 * CODECS[self.dtype].nbytes(BLOCK) / BLOCK / self.interval


POINTS = (
    Point("muon", 8, 1, "int1", "local-sgd", 0, 0.024, 3),
    Point("muon", 8, 1, "int1", "pier-frequent", 1, 0.030, 3),
    Point("muon", 8, 2, "int2", "pier-frequent", 0, 0.028, 3),
    Point("muon", 8, 2, "int2", "pier-frequent", 2, 0.057, 1),
    Point("muon", 8, 5, "int2", "pier-frequent", 0, 0.053, 3),
    Point("muon", 8, 10, "int2", "pier-muon-annealed", 0, 0.085, 3),
    Point("muon", 8, 20, "int2", "pier-muon-annealed", 0, 0.164, 1),
    Point("muon", 8, 20, "fp32", "pier-muon-annealed", 0, 0.136, 3),
    Point("muon", 16, 1, "int1", "local-sgd", 0, 0.057, 1),
    Point("muon", 16, 2, "int2", "pier-frequent", 0, 0.050, 3),
    Point("muon", 16, 20, "fp32", "pier-muon-annealed", 0, 0.219, 3),
    Point("adam", 8, 1, "int1", "local-sgd", 0, 0.150, 1),
    Point("adam", 8, 1, "int1", "local-sgd", 1, 0.164, 1),
    Point("adam", 8, 10, "int2", "pier-annealed", 0, 0.152, 3),
    Point("adam", 8, 10, "fp32", "pier-annealed", 0, 0.150, 3),
    Point("adam", 8, 20, "fp32", "pier-annealed", 0, 0.226, 3),
)
"""Points of docs/frontier.md: through the plugin where there are such runs, else simulated."""


def suggest(prediction: Prediction, config: PierConfig) -> list[Plan]:
    """Ways that lose less the longer they take, fastest first.

    Args:
        prediction: Times of the job.
        config: Its settings: inner optimizer, groups, lazy start.

    Returns:
        The fastest way, or one as fast that loses less, and those that lose less still; empty if there is nothing to relax.
    """
    known = [point for point in POINTS if point.inner == config.inner_optimizer and _starts(point, config)]
    if config.groups == 1 or not known:
        return []
    nearest = min({point.groups for point in known}, key=lambda groups: abs(math.log(groups / config.groups)))
    lazy = ways.lazy_share(config)
    seconds = {
        point: prediction.mean_of_run(dataclasses.replace(point.way, offload=config.offload), lazy)
        for point in known
        if point.groups == nearest
    }
    fastest = min(seconds.values())
    return [
        dataclasses.asdict(point) | {"flags": point.flags, "bits": point.bits, "seconds": seconds[point]}
        for point in _frontier(seconds, _AS_FAST * fastest)
    ]


def _starts(point: Point, config: PierConfig) -> bool:
    """Whether a job may take its outer steps so, beside its other settings; elastic islands repeat exchanges that fail."""
    if config.lighthouse is not None and (point.overlap or not CODECS[point.dtype].lossless):
        return False
    try:
        dataclasses.replace(
            config,
            sync_interval=point.interval,
            exchange_dtype=point.dtype,
            overlap=point.overlap,
            preset=point.preset,
        )
    except PierConfigError:
        return False
    return True


def _frontier(seconds: dict[Point, float], as_fast: float) -> Iterator[Point]:
    best = math.inf
    for point in sorted(seconds, key=lambda point: (max(seconds[point], as_fast), point.gap)):
        if point.gap < best:
            best = point.gap
            yield point


def lines(suggestions: Sequence[Plan], groups: int) -> list[str]:
    """The lines of a plan."""
    if not suggestions:
        return ["Nothing to suggest: there is one group, or none of the ways that were studied would start in this job."]
    found = [
        f"{'Suggested' if index == 0 else 'Less loss'}: {way['flags']}\n"
        f"  {way['seconds'] * 1e3:,.0f} ms an iteration, {way['bits']:.3g} bits a parameter; {way['gap']:+.3f} nats per byte "
        f"from synchronous training with {way['groups']} groups (seeds: {way['seeds']})"
        for index, way in enumerate(suggestions)
    ]
    studied = suggestions[0]["groups"]
    other = "" if studied == groups else f" and {studied} groups, not {groups}"
    return [
        *found,
        f"The losses are those of one small model in 600 iterations{other}: seeds differ by up to 0.03. "
        "Trust their order, not their size (docs/frontier.md).",
    ]
