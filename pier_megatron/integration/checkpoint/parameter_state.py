"""Tensors of the main parameters of one inner optimizer, to save and to load, however they are stored."""

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from pier_megatron.integration.checkpoint.description import Metadata
from pier_megatron.integration.inner.base import InnerOptimizer

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict


class ParameterState(abc.ABC):
    """Named tensors for every main parameter of one optimizer.

    Attributes:
        owner: The optimizer.
        tensors: Tensors by the identity of the main parameter, then by name: ``param`` and the names of the optimizer's own
            tensors; float32, each of the shape of its main parameter.
    """

    def __init__(self, owner: InnerOptimizer, tensors: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Takes tensors for the main parameters of an optimizer."""
        self.owner, self.tensors = owner, tensors

    @abc.abstractmethod
    def sharded(self, model_state: "ShardedStateDict", metadata: Metadata, prefix: str, is_loading: bool) -> "ShardedStateDict":
        """Describes the tensors as Megatron describes an optimizer's state.

        Args:
            model_state: The sharded state of the model.
            metadata: Metadata of the checkpoint.
            prefix: Prefix of all keys.
            is_loading: Whether the tensors are to be read.
        """

    @abc.abstractmethod
    def load(self, state: "StateDict", metadata: Metadata) -> None:
        """Takes over what was read for :meth:`sharded`."""

    def add(self, other: "ParameterState") -> None:
        """Adds another state of the same parameters."""
        for main, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                tensor += other.tensors[main][name].to(tensor.device)

    def divide(self, number: int) -> None:
        """Divides all tensors by a number."""
        for tensors in self.tensors.values():
            for tensor in tensors.values():
                tensor /= number

    def take(self, other: "ParameterState") -> None:
        """Takes over the values of another state of the same parameters."""
        for main, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                tensor.copy_(other.tensors[main][name])

    def zeros_on_host(self) -> Self:
        """A state of the same shape, in host memory, of zeros."""
        return type(self)(
            self.owner,
            {
                main: {name: torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in tensors.items()}
                for main, tensors in self.tensors.items()
            },
        )

    @property
    def is_finite(self) -> bool:
        """Whether all tensors are finite."""
        return all(bool(tensor.isfinite().all()) for tensors in self.tensors.values() for tensor in tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())
