"""Order of the passes of a pipeline rank: 1F1B, and interleaved with any group size, as Megatron does."""

import dataclasses
from typing import NamedTuple

from pier_megatron.errors import PierConfigError, division


class Pass(NamedTuple):
    """A micro-batch on its way through a stage.

    Attributes:
        is_backward: Whether it is the backward pass.
        stage: Virtual stage, from 0 to ``stages`` - 1 in the order of the layers.
        micro_batch: Index in the step, from 0.
    """

    is_backward: bool
    stage: int
    micro_batch: int


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A step of a pipeline.

    Attributes:
        ranks: Number of ranks.
        chunks: Virtual stages of a rank; stage s lives on rank s mod ``ranks``.
        micro_batches: Number of micro-batches of a step.
        group: Micro-batches that a virtual stage takes at a time, if there are several on a rank: as many as there are ranks
            is depth-first, all of them breadth-first.

    Raises:
        PierConfigError: If ranks would wait for each other for ever, which Megatron refuses at the first step.
    """

    ranks: int
    chunks: int
    micro_batches: int
    group: int

    def __post_init__(self) -> None:
        rest = self.micro_batches % self.group
        if self.chunks > 1 and not (self.ranks <= self.group <= self.micro_batches and (rest == 0 or rest >= self.ranks)):
            raise PierConfigError(
                f"--microbatch-group-size-per-virtual-pipeline-stage {self.group} (by default one for each pipeline rank): "
                f"{division(self.micro_batches, self.group)} micro-batches of a step, but {self.ranks} pipeline ranks need as "
                "many at a time, or more, and of the rest too. Use batches with a multiple of the pipeline ranks."
            )

    @property
    def stages(self) -> int:
        """Number of virtual stages."""
        return self.ranks * self.chunks

    def passes(self, rank: int) -> list[Pass]:
        """What a rank does in a step, in its order.

        Forward passes until the first micro-batch can come back, then one of each in turn, then the backward passes that
        are left.
        """
        forward, backward = (self._one_way(rank, is_backward) for is_backward in (False, True))
        hops = self.ranks - rank - 1
        ahead = hops if self.chunks == 1 else 2 * hops + (self.chunks - 1) * self.group
        ahead = min(ahead, len(forward))
        alternating = [each for pair in zip(forward[ahead:], backward, strict=False) for each in pair]
        return [*forward[:ahead], *alternating, *backward[len(forward) - ahead :]]

    def _one_way(self, rank: int, is_backward: bool) -> list[Pass]:
        chunks = range(self.chunks)
        return [
            Pass(is_backward, chunk * self.ranks + rank, micro_batch)
            for start in range(0, self.micro_batches, self.group)
            for chunk in (reversed(chunks) if is_backward else chunks)
            for micro_batch in range(start, min(start + self.group, self.micro_batches))
        ]
