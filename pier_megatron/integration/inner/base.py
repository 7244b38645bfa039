"""What the outer loop and checkpoints want to know of an inner optimizer, whatever it computes."""

import abc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from pier_megatron.megatron_api import versions
from pier_megatron.outer import Shards
from pier_megatron.outer.chunks import Matrix, Stored, matrix_in

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import StateDict
    from megatron.core.optimizer import MegatronOptimizer


class InnerOptimizer(abc.ABC):
    """One of the optimizers that Megatron steps on this rank, with parameters of its own.

    Attributes:
        optimizer: Megatron's.
        holders: Data-parallel ranks of the group that hold the same main parameters; None if they shard them.
        stored: How main parameters are read and written that are no FP32 tensors; None if they are.
        hands_out_copies: Whether :meth:`state_of` may return copies, which :meth:`store` takes back.
    """

    holders: dist.ProcessGroup | None = None
    stored: Stored | None = None
    hands_out_copies = False

    def __init__(self, optimizer: "MegatronOptimizer") -> None:
        """Wraps one of Megatron's optimizers."""
        self.optimizer = optimizer

    @property
    def copies(self) -> int:
        """Number of data-parallel ranks of the group that hold the same main parameters."""
        return 1 if self.holders is None else self.holders.size()

    @abc.abstractmethod
    def parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's parameters, each with the main parameter that this rank steps for it: all of it or a part.

        The main parameter is an FP32 tensor, or what :attr:`stored` knows it by.
        """

    def stretch(self, model: Tensor) -> slice:
        """The part of one of the model's parameters, flat, that this rank steps."""
        return slice(0, model.numel())

    @abc.abstractmethod
    def round_to_model(self) -> None:
        """Writes the main parameters to those of the model, as far as this rank steps them."""

    @abc.abstractmethod
    def settings(self) -> "StateDict":
        """State that is not a tensor: ``optimizer``, with the settings of its ``param_groups``, and anything else."""

    @abc.abstractmethod
    def take_settings(self, settings: "StateDict") -> None:
        """Takes over the settings of another one with the same groups of parameters."""

    def is_counted(self, is_expert: bool) -> bool:
        """Whether norms over the model count this rank's main parameters, those of experts or the others."""
        return True

    def state_of(self, main: Tensor) -> dict[str, Tensor]:
        """The tensors for one main parameter, of its shape, by name: Adam's or Muon's moments, once it has stepped."""
        state = self.optimizer.optimizer.state.get(main, {})
        return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == main.shape}

    def store(self, main: Tensor, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027  Most hand out their own tensors.
        """Takes back what :meth:`state_of` has returned, with other values."""

    def values_of(self, main: Tensor) -> Tensor:
        """A main parameter in FP32: itself, or a copy."""
        return main.detach() if self.stored is None else self.stored.read(main, slice(None)).view(main.shape)

    def main_parameters(self) -> list[Shards]:
        """The FP32 main parameters.

        Returns:
            Parameters split over tensor-parallel ranks, then those that each of these ranks copies, then those that the first
            and the last pipeline stage share. All copies come at the same place on their ranks.
        """
        split: list[Tensor] = []
        copied: list[Tensor] = []
        tied: list[Tensor] = []
        matrix_of: dict[Tensor, Matrix | None] = {}
        is_counted_when_tied, is_expert = True, False
        is_not_shared = versions.require("megatron.core.transformer.module", "param_is_not_shared")
        for model, main in self.parameters():
            is_expert |= not getattr(model, "allreduce", True)
            is_tied = getattr(model, "shared_embedding", False)
            matrix_of[main] = None if is_tied else matrix_in(model, self.stretch(model))
            if is_tied:
                tied.append(main)
                is_counted_when_tied = is_not_shared(model)
            elif getattr(model, "tensor_model_parallel", False):
                split.append(main)
            else:
                copied.append(main)
        parallel_state = versions.require("megatron.core", "parallel_state")
        # Experts may be split over other tensor-parallel ranks than the rest of the model.
        tensor_parallel = (
            parallel_state.get_expert_tensor_parallel_group() if is_expert else parallel_state.get_tensor_model_parallel_group()
        )
        is_counted, holders = self.is_counted(is_expert), self.holders if self.copies > 1 else None

        def shards(tensors: list[Tensor], is_counted: bool, **kind: bool) -> Shards:
            matrices = [matrix_of[tensor] for tensor in tensors]
            return Shards(tensors, is_counted, stored=self.stored, holders=holders, matrices=matrices, **kind)

        return [
            shards(split, is_counted),
            shards(copied, is_counted and tensor_parallel.rank() == 0, is_copied=tensor_parallel.size() > 1),
            shards(tied, is_counted and is_counted_when_tied, is_tied=True),
        ]
