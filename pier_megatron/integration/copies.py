"""Copies of parameters: several ranks of a group hold the same one, and it must stay the same to the last bit.

Tensor-parallel ranks hold copies of what is not split, the first and the last pipeline stage of a tied embedding, data-parallel
ranks of the whole model. Nothing in training brings copies together that have come apart, and a checkpoint stores one of them.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.collectives import Computed, Gathered
from pier_megatron.integration import own_world
from pier_megatron.integration.inner.base import InnerOptimizer
from pier_megatron.integration.own_world import own_data_parallel_ranks
from pier_megatron.megatron_api import versions
from pier_megatron.outer.state import sum_of_bits

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

# One in this many parameters is compared at a time, where only data-parallel ranks hold copies.
_TURNS = 16

# An error names no more parameters than these.
_NAMED = 3


class CopiesDifferError(RuntimeError):
    """Ranks that hold copies of a parameter do not hold the same bits."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One of the model's parameters on this rank.

    Attributes:
        name: In the model.
        tensor: What the model computes with.
        is_split: Whether tensor-parallel ranks hold different parts of it.
        is_tied: Whether another pipeline stage holds it, too.
    """

    name: str
    tensor: Tensor
    is_split: bool
    is_tied: bool


class _Quantised(Protocol):
    """A quantised tensor of Transformer Engine."""

    def dequantize(self, *, dtype: torch.dtype) -> Tensor:
        """What codes and scales stand for."""


@dataclasses.dataclass(frozen=True)
class Domain:
    """Parameters that are copied over the same ranks: those of experts, or the others."""

    parameters: Sequence[Parameter]
    data_parallel: dist.ProcessGroup
    tensor_parallel: dist.ProcessGroup
    tied: dist.ProcessGroup | None


class Copies:
    """Compares sums of bits over the ranks that hold copies. The device does so after the work that it has queued."""

    def __init__(
        self, members: Sequence[InnerOptimizer], model_chunks: "Sequence[DistributedDataParallel]", device: torch.device
    ) -> None:
        """Looks at the parameters of this rank.

        Args:
            members: The inner optimizers.
            model_chunks: Chunks of the model on this rank.
            device: Device of the parameters.
        """
        self._members, self._device = members, device
        self._domains = _domains(model_chunks)
        # Of each: name of the parameter, kind of the ranks, and these. A list of them is long where groups are large.
        self._compared: list[tuple[str, str, dist.ProcessGroup]] = []
        self._under_way: Gathered | None = None
        self._iteration = 0

    def compare(self, iteration: int) -> None:
        """Begins to compare the copies; called by all ranks of the group after ``iteration``.

        Raises:
            CopiesDifferError: If those differed that were compared before.
        """
        self.check(waits=True)
        self._iteration, self._compared = iteration, []
        differing = [torch.zeros(0, dtype=torch.bool, device=self._device)]
        for domain in self._domains:
            differing += self._compare(domain)
        self._under_way = Gathered(torch.cat(differing)[None], [Computed(self._device)])

    def check(self, waits: bool) -> None:
        """Checks the comparisons that have arrived, or all of them if the caller ``waits``.

        Raises:
            CopiesDifferError: If copies differ.
        """
        if self._under_way is None or not (waits or self._under_way.is_complete()):
            return
        [differs], self._under_way = self._under_way.on_host().tolist(), None
        found = [copies for copies, is_other in zip(self._compared, differs, strict=True) if is_other]
        if found:
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            first = own_world.launch().first_of_group
            named = "; ".join(
                f"{name} on {kind} ranks {[first + rank for rank in dist.get_process_group_ranks(group)]}"
                for name, kind, group in found[:_NAMED]
            )
            raise CopiesDifferError(
                f"After iteration {self._iteration} copies of a parameter differ: {named}{more}. Training "
                "does not bring them together again, and a checkpoint stores one of them. A kernel or a collective has given "
                "ranks different bits, or a memory or a link has gone wrong. Restart from an older checkpoint (--ckpt-step); "
                "if it happens again, add --deterministic-mode. See docs/troubles.md."
            )

    @torch.no_grad()
    def _compare(self, domain: Domain) -> list[Tensor]:
        """Which copies differ, in the order in which this says what it compares."""
        parameters = domain.parameters
        turns = max(1, min(_TURNS, len(parameters)))
        # The same on all ranks, and every parameter's turn comes whatever the intervals are.
        due = range(random.Random(self._iteration).randrange(turns), len(parameters), turns)
        looked_at = [
            index for index, parameter in enumerate(parameters) if not parameter.is_split or parameter.is_tied or index in due
        ]
        if not looked_at:
            return []
        in_model = torch.stack([bits_of(parameters[index].tensor) for index in looked_at])
        main = self._bits_of_mains([parameters[index] for index in looked_at], domain.data_parallel)
        sums = torch.stack([in_model, main])

        def differing(group: dist.ProcessGroup, of: Callable[[Parameter], bool], kind: str) -> list[Tensor]:
            chosen = [place for place, index in enumerate(looked_at) if of(parameters[index])]
            if group.size() == 1 or not chosen:
                return []
            self._compared += [(parameters[looked_at[place]].name, kind, group) for place in chosen]
            # Not by a list, which waits for the device.
            return [_differ(torch.stack([sums[:, place] for place in chosen], dim=1), group)]

        found = differing(domain.data_parallel, lambda parameter: True, "data-parallel")
        found += differing(domain.tensor_parallel, lambda parameter: not parameter.is_split, "tensor-parallel")
        if domain.tied is not None:
            found += differing(domain.tied, lambda parameter: parameter.is_tied, "pipeline-parallel")
        return found

    def _bits_of_mains(self, parameters: Sequence[Parameter], group: dist.ProcessGroup) -> Tensor:
        """Sums of the bits of whole main parameters, however the data-parallel ranks share them."""
        places = {id(parameter.tensor): place for place, parameter in enumerate(parameters)}
        shared, whole = (torch.zeros(len(parameters), dtype=torch.int64, device=self._device) for _ in range(2))
        for member in self._members:
            sums = shared if member.copies == 1 else whole
            for tensor, main in member.parameters():
                if id(tensor) in places:
                    sums[places[id(tensor)]] = bits_of(member.values_of(main))
        if group.size() > 1:
            dist.all_reduce(shared, group=group)
        return shared + whole


def _domains(model_chunks: "Sequence[DistributedDataParallel]") -> list[Domain]:
    parallel_state = versions.require("megatron.core", "parallel_state")
    dense: list[Parameter] = []
    expert: list[Parameter] = []
    for number, chunk in enumerate(model_chunks):
        for name, tensor in chunk.named_parameters():
            place = f"{re.sub(r'^(module[.])+', '', name)}{f' of virtual stage {number}' if len(model_chunks) > 1 else ''}"
            is_split, is_tied = (bool(getattr(tensor, kind, False)) for kind in ("tensor_model_parallel", "shared_embedding"))
            (dense if getattr(tensor, "allreduce", True) else expert).append(Parameter(place, tensor, is_split, is_tied))
    tied = parallel_state.get_embedding_group(check_initialized=False)
    found = [
        Domain(
            dense,
            own_data_parallel_ranks(),
            parallel_state.get_tensor_model_parallel_group(),
            tied if any(parameter.is_tied for parameter in dense) else None,
        )
    ]
    if expert:
        tensor_parallel = parallel_state.get_expert_tensor_parallel_group()
        found.append(Domain(expert, own_data_parallel_ranks(of_experts=True), tensor_parallel, None))
    return found


def bits_of(tensor: Tensor) -> Tensor:
    """A sum over a tensor's bits; an int64 scalar. A quantised one's are those of its FP32 values: codes and scales make them.

    Its scales are not compared as they lie in memory: Transformer Engine pads them with whatever was there.
    """
    if not (quantised := _quantised(tensor)):
        return sum_of_bits(tensor.detach().reshape(-1))
    return torch.stack([sum_of_bits(part.dequantize(dtype=torch.float32).reshape(-1)) for part in quantised]).sum()


def _quantised(tensor: Tensor) -> "Sequence[_Quantised]":
    """The quantised tensors of Transformer Engine that a parameter consists of: one, or those of a group; none in BF16."""
    fp8_utils = functools.partial(versions.require, "megatron.core.fp8_utils")
    if versions.is_between("0.19", None) and fp8_utils("is_grouped_tensor_with_quantized_storage")(tensor):
        members: Sequence[_Quantised] = fp8_utils("get_grouped_quantized_members")(tensor, create_if_missing=True)
        return members
    return [cast("_Quantised", tensor)] if fp8_utils("is_float8tensor")(tensor) else []


def _differ(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Whether ranks have different sums, of shape ``[2, n]``, for the model's or for the main parameter; ``[n]``."""
    extremes = torch.stack([sums, -sums])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return (extremes[0] != -extremes[1]).any(0)
