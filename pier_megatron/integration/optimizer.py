"""Megatron's optimizer with the outer loop around it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer

from pier_megatron.integration.all_groups import AllGroups
from pier_megatron.integration.copies import Copies
from pier_megatron.integration.gradient_averaging import GradientAveraging
from pier_megatron.integration.resting import Clock
from pier_megatron.outer import OuterLoop

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.process_groups_config import ProcessGroupCollection


class Completion(Protocol):
    """What the plugin adds to the optimizer's state in a checkpoint."""

    def complete(
        self, stock: "ShardedStateDict", model_state: "ShardedStateDict", metadata: Mapping[str, object]
    ) -> "ShardedStateDict":
        """Completes the optimizer's sharded state.

        Args:
            stock: What Megatron stores or asks for.
            model_state: The sharded state of the model.
            metadata: Metadata of the checkpoint.
        """


class Restoration(Completion, Protocol):
    """What the plugin asks of a checkpoint."""

    def begin(self, metadata: Mapping[str, object]) -> None:
        """Reads the description of a checkpoint, before Megatron reads what another run may have stored."""

    def restore(self, state: "StateDict", load_stock: "Callable[[StateDict], None]") -> bool:
        """Takes over what was read; returns whether it was Pier's, so that Megatron has nothing left to do.

        Args:
            state: What was read.
            load_stock: Lets Megatron load a state of its own.
        """


class BypassedError(RuntimeError):
    """A training script calls one of Megatron's functions around Pier."""

    def __init__(self, name: str, what: str) -> None:
        """Takes the name of the function, and what would be wrong."""
        super().__init__(
            f"Pier was left out of {name}: {what}. A module has imported {name} from Megatron by name before the arguments "
            f"were parsed. Call it as megatron.training.training.{name}, or import it later."
        )


class PierOptimizer(ChainedOptimizer):
    """Pier (arXiv 2511.17849) over the optimizers that Megatron built.

    Each :meth:`step` is Megatron's own, then one call of the outer loop.

    Attributes:
        loop: Outer loop, over the FP32 main parameters that this rank owns.
        copies: Check that copies of a parameter stay equal, whenever the loop has changed the parameters.
        clock: Clock by which this island rests; None if it never does.
        saving: Additions of the plugin to the checkpoint that is being saved, or None.
        loading: Requests of the plugin to the checkpoint that is being loaded, or None.
        has_seen_samples: Whether this process knows that the groups read different data, at a resume as at the beginning.
    """

    def __init__(
        self,
        optimizer: ChainedOptimizer,
        model_chunks: "Sequence[DistributedDataParallel]",
        loop: OuterLoop,
        copies: Copies,
        clock: Clock | None,
        everyone: AllGroups | None = None,
        gradients: dist.ProcessGroup | None = None,
    ) -> None:
        """Takes over what Megatron built for the chunks of a model: optimizers that have not stepped.

        Args:
            optimizer: Megatron's optimizer.
            model_chunks: Virtual stages of the model on this rank, in order.
            loop: Outer loop over the FP32 main parameters that this rank owns.
            copies: Check that copies of a parameter stay equal.
            clock: Clock by which this island rests, or None.
            everyone: Megatron's process groups over all groups of the launch; None if there is one.
            gradients: Communicator between the groups for gradients, with a lazy start.
        """
        # The layer-wise optimizer is a chain with ways of its own, and becomes a link.
        super().__init__(optimizer.chained_optimizers if type(optimizer) is ChainedOptimizer else [optimizer])
        # Not all optimizers know them.
        self.model_chunks = list(model_chunks)
        self.loop, self.copies, self.clock = loop, copies, clock
        self.saving: Completion | None = None
        self.loading: Restoration | None = None
        self.has_seen_samples = self._has_begun = False
        self._everyone = everyone
        self._gradients = GradientAveraging(self.model_chunks, loop.config.groups, gradients, everyone)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Inside, Megatron's data-parallel groups are those of the whole launch."""
        return contextlib.nullcontext() if self._everyone is None else self._everyone.together()

    def widened(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The ranks of a process group and those in their places in all groups of the launch.

        Args:
            group: Process group inside this group; itself where groups were not divided.
        """
        return group if self._everyone is None else self._everyone.widened(group)

    def collection(self, own: "ProcessGroupCollection", names: Sequence[str]) -> "ProcessGroupCollection":
        """A copy of a collection of process groups, with some of these widened to all groups of the launch.

        Args:
            own: Megatron's collection of this group.
            names: Attributes of it that are widened.
        """
        return own if self._everyone is None else self._everyone.collection(own, names)

    def begin_iteration(self, iteration: int) -> None:
        """Sets the clock and the averaging domain of the gradients, before the first micro-batch.

        Args:
            iteration: Iteration that begins, counted from 1.
        """
        self.loop.begin_iteration(iteration)
        self._has_begun = True
        if self.loop.is_local:
            self._gradients.over_own_group()
        else:
            self._gradients.over_all_groups()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Steps the inner optimizer, then does what is due after this iteration.

        Returns:
            Megatron's three values: whether the inner step was taken, its gradient norm, its number of zeros.

        Raises:
            DivergedError: If an outer step is due and no group has finite parameters.
            CopiesDifferError: If ranks of this group hold different copies of a parameter.
            BypassedError: If the iteration did not begin with :meth:`begin_iteration`.
        """
        if not self._has_begun:
            raise BypassedError("train_step", "no outer step would ever be taken")
        self._has_begun = False
        result: tuple[bool, float | None, int | None] = super().step()
        self.loop.end_iteration()
        # Where the groups have just met, the device has been waited for.
        self.copies.check(waits=self.loop.is_local and self.loop.is_synchronised)
        return result

    def sharded_state_dict(
        self, model_sharded_state_dict: "ShardedStateDict", is_loading: bool = False, **kwargs: Any
    ) -> "ShardedStateDict":
        """Returns Megatron's sharded state, with the state of each group and the outer state.

        Args:
            model_sharded_state_dict: Sharded state of the model.
            is_loading: Whether the result describes what to load.
            kwargs: Further arguments of Megatron's.

        Raises:
            BypassedError: If it is asked for by another save than Pier's.
        """
        metadata: Mapping[str, object] = kwargs.get("metadata") or {}
        if is_loading and self.loading is not None:
            self.loading.begin(metadata)
        stock: ShardedStateDict = super().sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
        if not is_loading:
            if self.saving is None:
                raise BypassedError("save_checkpoint", "the checkpoint would lack the groups' own state")
            self.copies.check(waits=True)
        part = self.loading if is_loading else self.saving
        return stock if part is None else part.complete(stock, model_sharded_state_dict, metadata)

    def load_state_dict(self, state_dict: "StateDict") -> None:
        """Loads what :meth:`sharded_state_dict` has asked for.

        Args:
            state_dict: State that was read.
        """
        if self.loading is None or not self.loading.restore(state_dict, super().load_state_dict):
            super().load_state_dict(state_dict)
