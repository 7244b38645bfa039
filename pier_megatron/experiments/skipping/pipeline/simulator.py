"""How long a step of a pipeline takes, if every rank takes its passes in its order and waits for nothing but their inputs."""

from collections import deque
from collections.abc import Collection, Sequence

from pier_megatron.experiments.skipping.pipeline.schedule import Pass, Pipeline

BACKWARD = 2.0
"""Time of a backward pass in forward passes, without recomputation."""


def makespan(
    pipeline: Pipeline,
    forward: Sequence[float],
    skipped: Collection[tuple[int, int]] = (),
    backward: float = BACKWARD,
    link: float = 0.0,
) -> float:
    """Simulates a step, in the unit of the costs given.

    Args:
        pipeline: Pipeline with its order.
        forward: Cost of a forward pass through each stage.
        skipped: Pairs of a stage and a micro-batch that passes it at no cost. Its messages are sent all the same.
        backward: Cost of a backward pass, in forward passes.
        link: Time from the end of a pass until its result has reached the next stage; links carry any number of messages, and
            nobody computes more slowly meanwhile.

    Returns:
        Time at which the last rank has ended its last pass.
    """
    queues = [deque(pipeline.passes(rank)) for rank in range(pipeline.ranks)]
    clocks = [0.0] * pipeline.ranks
    ended: dict[Pass | None, float] = {None: -link}
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and (source := _source(pipeline, queue[0])) in ended:
                this = queue.popleft()
                cost = 0.0
                if (this.stage, this.micro_batch) not in skipped:
                    cost = forward[this.stage] * (backward if this.is_backward else 1.0)
                clocks[rank] = max(clocks[rank], ended[source] + link) + cost
                ended[this] = clocks[rank]
    return max(clocks)


def _source(pipeline: Pipeline, this: Pass) -> Pass | None:
    """The pass whose result another rank has to send first; what comes from the same rank, its order has put before."""
    stage = this.stage + (1 if this.is_backward else -1)
    return Pass(this.is_backward, stage, this.micro_batch) if 0 <= stage < pipeline.stages else None
