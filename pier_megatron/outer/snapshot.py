"""An outer loop at rest: what a checkpoint stores of it, and what a loop continues from."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


@dataclasses.dataclass
class Progress:
    """Progress of a group in its run.

    Attributes:
        iteration: The iteration under way, 1-based; between iterations, the last one completed.
        is_local: Whether it belongs to the local phase, in which groups train apart.
        is_synchronised: Whether all groups hold the same parameters now.
        last_common_step: Iteration after which this group took its last outer step with others.
        trained: Iterations that this group has trained since.
    """

    iteration: int = 0
    is_local: bool = False
    is_synchronised: bool = True
    last_common_step: int = 0
    trained: int = 0


@dataclasses.dataclass(frozen=True)
class RoundBuffers:
    """One outer step whose exchange has arrived and is not applied yet.

    Attributes:
        begun: Iteration after which it began.
        own: Pseudo-gradient of this group; float32, as long as the chunks of the round together.
        sum: Sum over its participants, likewise.
        verdicts: Verdict on the pseudo-gradient of every group, by group.
    """

    begun: int
    own: Tensor
    sum: Tensor
    verdicts: Sequence[int] = ()


@dataclasses.dataclass
class Snapshot:
    """An outer loop as plain data.

    ``torch.save`` stores it, and ``torch.load`` reads it back without running code from the file.

    Attributes:
        progress: Progress of the group.
        states: What each outer state holds, in order: tensors by name, see :attr:`pier_megatron.outer.state.OuterState.kept`.
        rounds: Outer steps whose exchange is hidden behind the present iterations, oldest first.
        restarted: Iteration of the last restart of a group, by group; only groups that had one.
        rule: Name of the rule of the outer steps; None if it is not known.
    """

    progress: Progress
    states: Sequence[Mapping[str, Tensor]]
    rounds: Sequence[RoundBuffers] = ()
    restarted: Mapping[int, int] = dataclasses.field(default_factory=dict)
    rule: str | None = None


torch.serialization.add_safe_globals([Progress, RoundBuffers, Snapshot])
