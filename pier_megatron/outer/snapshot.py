"""An outer loop at rest: what a checkpoint stores of it, and what a loop continues from."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.outer.rules import common_names
from pier_megatron.settings import flag_of

_SETTINGS = (
    "groups",
    "sync_interval",
    "preset",
    "outer_lr",
    "outer_momentum",
    "subgroup_size",
    "subgroup_seed",
    "sites",
    "site_interval",
    "overlap",
    "fragments",
    "exchange_dtype",
    "no_error_feedback",
)


@dataclasses.dataclass
class Progress:
    """Progress of a group in its run.

    Attributes:
        iteration: The iteration under way, 1-based; between iterations, the last one completed.
        is_local: Whether it belongs to the local phase, in which groups train apart.
        is_synchronised: Whether all groups hold the same parameters now.
        last_common_step: Iteration after which this group took its last outer step with others.
        trained: Iterations that this group has trained since the last one that it took part in began.
        under_way: Iterations of training behind an outer step that is under way.
    """

    iteration: int = 0
    is_local: bool = False
    is_synchronised: bool = True
    last_common_step: int = 0
    trained: int = 0
    under_way: int = 0

    def take_back(self) -> None:
        """Lets the training behind an outer step that was dropped count in the next one."""
        self.trained, self.under_way = self.trained + self.under_way, 0


@dataclasses.dataclass(frozen=True)
class RoundBuffers:
    """One outer step whose exchange has arrived and is not applied yet.

    Attributes:
        begun: Iteration after which it began.
        own: Pseudo-gradient of this group; float32, as long as the chunks of the round together.
        sum: Sum over its participants, likewise.
        lengths: How far its participants have moved each matrix that the outer rule takes, see
            :attr:`pier_megatron.outer.verdicts.Verdicts.lengths`.
        verdicts: Verdict on the pseudo-gradient of every group, by group.
    """

    begun: int
    own: Tensor
    sum: Tensor
    lengths: Tensor
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
        settings: Settings of the run by which outer steps are taken, see :func:`settings_of`; None if they are not known.
    """

    progress: Progress
    states: Sequence[Mapping[str, Tensor]]
    rounds: Sequence[RoundBuffers] = ()
    restarted: Mapping[int, int] = dataclasses.field(default_factory=dict)
    rule: str | None = None
    settings: Mapping[str, object] | None = None


def for_settings(snapshot: Snapshot, config: PierConfig, device: torch.device) -> Snapshot:
    """Returns what a loop on a ``device`` can continue from: with other settings no exchange under way and no residual.

    Raises:
        PierConfigError: If the settings are others, and the user has not accepted that.
    """
    present, saved = settings_of(config, device), snapshot.settings
    changed = [name for name in present if saved is not None and saved.get(name) != present[name]]
    if saved is None or not changed:
        return snapshot
    if not config.override_checkpoint:
        changes = ", ".join(f"{flag_of(name)} {saved.get(name)} is now {present[name]}" for name in changed)
        raise PierConfigError(
            f"The snapshot of iteration {snapshot.progress.iteration} is of another run: {changes}. Restore what was saved, or "
            "continue without exchanges under way and residuals: override_checkpoint=True (--pier-override-checkpoint)."
        )
    common = common_names(config)
    states = [{name: state[name] for name in state if name in common} for state in snapshot.states]
    return dataclasses.replace(snapshot, states=states, rounds=())


def settings_of(config: PierConfig, device: torch.device) -> dict[str, object]:
    """Returns the settings by which a snapshot is read, without those of the length of a run."""
    chunk_mib = config.chunk_mib_on(device.type) if config.has_error_feedback else None
    return {name: getattr(config, name) for name in _SETTINGS} | {"chunk_mib": chunk_mib}


torch.serialization.add_safe_globals([Progress, RoundBuffers, Snapshot])
