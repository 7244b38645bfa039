"""What the plugin adds to Megatron's checkpoints when they are saved."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from pier_megatron.integration.checkpoint.content import RunPosition, sharded_object
from pier_megatron.integration.checkpoint.description import ENTRY, Metadata, checksum_name, group_prefix, groups_apart
from pier_megatron.integration.checkpoint.parameter_state import ParameterState
from pier_megatron.integration.checkpoint.random_states import random_states
from pier_megatron.megatron_api import versions
from pier_megatron.outer import Snapshot

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class Saving:
    """One checkpoint of a run that is at rest, while its model holds what all groups agree on.

    Attributes:
        description: What the checkpoint says about itself.
    """

    def __init__(
        self,
        place: RunPosition,
        snapshot: Snapshot,
        checksums: Sequence[Mapping[str, int]],
        trained: Sequence[Tensor] | None,
        opt_param_scheduler: "OptimizerParamScheduler | None",
    ) -> None:
        """Prepares a checkpoint of this rank.

        Args:
            place: Groups, ranks and owners of this process.
            snapshot: State of the outer loop.
            checksums: Checksums of the outer state of each group of the launch, by name.
            trained: Trained parameters, see :meth:`RunPosition.inner_states`.
            opt_param_scheduler: Megatron's.
        """
        self._place, self._snapshot, self._trained, self._scheduler = place, snapshot, trained, opt_param_scheduler
        # Each group saves its own where groups hold different ones.
        has_common = place.config.has_common_anchor
        self._holders: list[int | None] = [None] if has_common else list(range(place.groups))
        progress = snapshot.progress
        self.description = place.describe(
            progress.iteration,
            own_inner_state=tuple(groups_apart(place.config, progress.is_local, progress.is_synchronised)),
            rounds={round_.begun: tuple(round_.verdicts) for round_ in snapshot.rounds},
            restarted=snapshot.restarted,
            is_local=progress.is_local,
            is_synchronised=progress.is_synchronised,
            last_common_step=progress.last_common_step,
            checksums={
                checksum_name(name, group): sums[name]
                for group, sums in zip(self._holders, checksums, strict=False)
                for name in sums
            },
        )

    @functools.cached_property
    def _inner_states(self) -> list[ParameterState]:
        return self._place.inner_states(self._trained)

    def _announcement(self) -> str:
        place, own = self._place, len(self.description.own_inner_state)
        outer, inner_state = (
            sum(state.nbytes / state.owner.copies for state in states) * place.ranks.size() / 1e6
            for states in (place.outer_states(self._snapshot), self._inner_states if own else ())
        )
        if self.description.is_synchronised:
            weights = "common to all groups"
        elif self.description.has_common_outer_state:
            weights = "the anchor, from the last outer step"
        else:
            weights = "the mean of the groups' slow weights"
        more = f"inner state of {own} group{'' if own == 1 else 's'} {own * inner_state:,.1f} MB"
        if not own:
            more = "inner state as in stock Megatron"
        return (
            f" checkpoint of iteration {self.description.iteration}: model weights are {weights}; outer state "
            f"{len(self._holders) * outer:,.1f} MB; {more}"
        )

    def complete(self, stock: "ShardedStateDict", model_state: "ShardedStateDict", metadata: Metadata) -> "ShardedStateDict":
        """Completes the optimizer's sharded state; see :class:`pier_megatron.integration.optimizer.Completion`."""
        # Only now: an optimizer that has not stepped has been given its state, and one that is not saved is not asked.
        if dist.get_rank() == 0:
            print(self._announcement(), flush=True)
        place, snapshot, group = self._place, self._snapshot, self._place.number
        entry: ShardedStateDict = {}
        prefix = group_prefix(group)
        has_own = self.description.is_apart(group)
        holder = None if self.description.has_common_outer_state else group
        # What all groups agree on the first one stores.
        for index, outer in enumerate(() if holder is None and group else place.outer_states(snapshot)):
            outer_prefix = self.description.outer_prefix(holder, index)
            entry[f"outer{index}"] = outer.sharded(model_state, metadata, outer_prefix, is_loading=False)
        for index, inner in enumerate(self._inner_states if has_own else ()):
            entry[f"inner{index}"] = inner.sharded(model_state, metadata, f"{prefix}.{index}", is_loading=False)
        objects = {
            "inner": [owner.settings() for owner in place.owners],
            "scheduler steps": None if self._scheduler is None else self._scheduler.num_steps,
            "rng": random_states(),
            "trained": snapshot.progress.trained,
            "under way": snapshot.progress.under_way,
        }
        entry["objects"] = sharded_object(group, place.ranks.rank(), objects, copy=0)
        if exact := place.sharded_tensors(group, place.exact_tensors(snapshot)):
            # Not if there are none: Megatron would store the empty dict, for one of the optimizers that it counts in a chain.
            entry["tensors"] = exact
        if versions.megatron_args().async_save:
            parts = (part for round_ in snapshot.rounds for part in (round_.own, round_.sum, round_.lengths))
            _copy_host_memory(entry, {part.data_ptr() for part in parts})
        return {**stock, ENTRY: entry}


def _copy_host_memory(state: "ShardedStateDict", copied: Collection[int]) -> None:
    """Replaces sharded tensors in host memory by copies, for a save that goes on behind training.

    Megatron copies what is on a device before training continues. A buffer on the host it would give to the writing process:
    moved out of pinned into shared memory, and read while the next outer steps change it.

    Args:
        state: Sharded tensors, which are changed in place.
        copied: Addresses of what is the checkpoint's own already.
    """
    mapping = versions.require("megatron.core.dist_checkpointing", "mapping")
    for value in versions.require("megatron.core.dist_checkpointing.dict_utils", "nested_values")(state):
        is_sharded = isinstance(value, mapping.ShardedTensor | mapping.ShardedTensorFactory)
        if is_sharded and value.data.device.type == "cpu" and value.data.data_ptr() not in copied:
            value.data = value.data.clone()
