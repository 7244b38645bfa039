"""Which stages a micro-batch skips: tables of paths, balanced, and the one among them with the shortest step.

After SkipPipe (arXiv 2502.19913), as far as a grid of pipeline and data ranks allows: the first and the last stage are never
skipped, every other one equally often, and all micro-batches skip equally many. The last micro-batch of a step is whole: when
its backward pass has brought the gradients of a bucket, Megatron begins their reduction, and it misses those that do not come.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Sequence

from pier_megatron.experiments.skipping.pipeline.schedule import Pipeline
from pier_megatron.experiments.skipping.pipeline.simulator import BACKWARD, makespan

_MOST_TABLES = 60

# Passes that a search may simulate, a second's worth: every rank does it when it starts.
_MOST_PASSES = 500_000


@dataclasses.dataclass(frozen=True)
class Paths:
    """Skipped stages of each micro-batch in a step.

    Attributes:
        stages: Number of virtual stages.
        micro_batches: Number of micro-batches of the step.
        skipped: Pairs of a stage and a micro-batch that does not visit it.
    """

    stages: int
    micro_batches: int
    skipped: frozenset[tuple[int, int]]

    @property
    def fraction(self) -> float:
        """Share of all pairs of a stage and a micro-batch that are skipped."""
        return len(self.skipped) / (self.stages * self.micro_batches)

    def row(self, stage: int) -> str:
        """The micro-batches in order as a stage sees them: ``#`` for a visit, ``.`` for one that skips it."""
        return "".join(".#"[(stage, micro_batch) not in self.skipped] for micro_batch in range(self.micro_batches))


def wanted(stages: int, micro_batches: int, fraction: float) -> int:
    """Number of pairs of a stage and a micro-batch that come nearest to a fraction of all."""
    return round(fraction * stages * micro_batches)


def most(stages: int, micro_batches: int) -> int:
    """Number of pairs that may be skipped."""
    return max(stages - 2, 0) * (micro_batches - 1)


def draw(stages: int, micro_batches: int, fraction: float, generator: random.Random) -> Paths:
    """Draws a table: how often two stages are skipped, or how much two micro-batches skip, differs by one at most.

    Args:
        stages: Number of virtual stages.
        micro_batches: Number of micro-batches of the step.
        fraction: Share of all pairs; what it :func:`wanted` must be no more than the :func:`most`.
        generator: Source of the random table.
    """
    inner, partial = range(1, stages - 1), range(micro_batches - 1)
    return Paths(stages, micro_batches, balanced(inner, partial, wanted(stages, micro_batches, fraction), generator))


def balanced(
    stages: Sequence[int], micro_batches: Sequence[int], count: int, generator: random.Random
) -> frozenset[tuple[int, int]]:
    """Draws pairs of a stage and a micro-batch, in which each stage comes as often as any, and each micro-batch, to within one.

    Args:
        stages: Stages that may be skipped.
        micro_batches: Micro-batches that may skip them.
        count: Number of pairs; all pairs if fewer exist.
        generator: Source of the draw.
    """
    inner, partial = list(stages), list(micro_batches)
    generator.shuffle(inner)
    generator.shuffle(partial)
    # Both indices go round. When they come back to the same pair together, one of them is shifted: no pair is met twice.
    together = math.lcm(len(inner), len(partial)) if inner and partial else 1
    return frozenset((inner[pair % len(inner)], partial[(pair + pair // together) % len(partial)]) for pair in range(count))


@functools.cache
def search(pipeline: Pipeline, fraction: float, seed: int, forward: tuple[float, ...], backward: float = BACKWARD) -> Paths:
    """Draws tables and keeps the one whose step takes the least time.

    Args:
        pipeline: Pipeline with its order.
        fraction: Share of pairs to skip, see :func:`draw`.
        seed: Seed of the random table; the same everywhere gives the same table everywhere.
        forward: Lengths of forward passes, see :func:`makespan`.
        backward: Length of backward passes, see :func:`makespan`.
    """
    generator = random.Random(seed)
    passes = 2 * pipeline.stages * pipeline.micro_batches
    tables = [
        draw(pipeline.stages, pipeline.micro_batches, fraction, generator)
        for _ in range(min(max(_MOST_PASSES // passes, 1), _MOST_TABLES))
    ]
    return min(tables, key=lambda paths: makespan(pipeline, forward, paths.skipped, backward))
