"""What a checkpoint of Pier consists of, for saving and loading alike: whose state goes where, and under which keys."""

import argparse
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.integration.checkpoint.description import LAYER_WISE, PRECISION_AWARE, Description, group_prefix
from pier_megatron.integration.checkpoint.formats import ShardedState
from pier_megatron.integration.checkpoint.parameter_state import ParameterState
from pier_megatron.integration.checkpoint.whole_tensors import WholeState
from pier_megatron.integration.inner.base import InnerOptimizer
from pier_megatron.integration.inner.requirements import keeps_halves, keeps_main_parameters
from pier_megatron.integration.inner.sharded import ShardedOptimizer
from pier_megatron.megatron_api import versions
from pier_megatron.outer import Snapshot
from pier_megatron.outer.rules import common_names

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict

# Sizes that decide how a group's ranks share the model, by their names among Megatron's arguments.
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_RANKS = "ranks in a group"


def layout_of(args: argparse.Namespace, ranks: int) -> dict[str, int]:
    """How a group of ``ranks`` ranks shares the model, by Megatron's arguments."""
    layout = {f"--{name.replace('_', '-')}": getattr(args, name, None) or 1 for name in _LAYOUT} | {_RANKS: ranks}
    if args.optimizer != "adam":
        layout[LAYER_WISE] = int(getattr(args, "use_layer_wise_distributed_optimizer", False))
    if keeps_main_parameters(args):
        layout[PRECISION_AWARE] = 16 if keeps_halves(args) else 32
    return layout


@dataclasses.dataclass(frozen=True)
class RunPosition:
    """Place of this rank among those that save and load together.

    Attributes:
        config: Settings of the run.
        device_type: Device on which it trains, ``cuda`` or ``cpu``.
        group: Index of this rank's group among all of the run.
        ranks: The ranks of the group.
        owners: Those of Megatron's optimizers that own parameters here.
        slices: Main parameters of each of them, with their stretches of the outer loop's flat buffers.
    """

    config: PierConfig
    device_type: str
    group: int
    ranks: dist.ProcessGroup
    owners: Sequence[InnerOptimizer]
    slices: Sequence[Sequence[tuple[Tensor, slice]]]

    @property
    def groups(self) -> int:
        """Number of groups that save into one folder, where an elastic island is alone."""
        return self.config.groups // self.config.launches

    @property
    def number(self) -> int:
        """The number of the group in the folder."""
        return self.group % self.groups

    def describe(self, iteration: int, **content: Any) -> Description:
        """Describes this run, and what of it is stored."""
        layout = layout_of(versions.megatron_args(), self.ranks.size())
        return Description.of_run(self.config, iteration, layout, self.device_type, cut=self._cut, **content)

    @functools.cached_property
    def _cut(self) -> int:
        """A checksum of how the ranks of the group share the main parameters, stretch by stretch."""
        sizes = [[main.numel() for main, _ in slices] for slices in self.slices]
        found: list[int] = [0] * self.ranks.size()
        dist.all_gather_object(found, zlib.crc32(repr(sizes).encode()), group=self.ranks)
        return zlib.crc32(repr(found).encode())

    def outer_states(self, snapshot: Snapshot) -> list[ParameterState]:
        """Anchor and memory of the outer rule, in the places of a main parameter and its moments."""
        places = dict(zip(common_names(self.config), ("param", "exp_avg", "exp_avg_sq"), strict=False))

        def tensors(state: Mapping[str, Tensor], main: Tensor, at: slice) -> dict[str, Tensor]:
            return {there: state[name][at].view(main.shape) for name, there in places.items() if name in state}

        return [
            _state_of(owner, {id(main): tensors(state, main, at) for main, at in slices})
            for owner, slices, state in zip(self.owners, self.slices, snapshot.states, strict=True)
        ]

    def inner_states(self, trained: Sequence[Tensor] | None = None) -> list[ParameterState]:
        """Main parameters and the inner optimizers' tensors; those that are copies are in host memory, see :meth:`store`.

        Args:
            trained: The main parameters as they are trained, laid out as the flat buffers, if the model shows others.
        """

        def tensors(owner: InnerOptimizer, flat: Tensor | None, main: Tensor, at: slice) -> Mapping[str, Tensor]:
            parameter = owner.values_of(main) if flat is None else flat[at].view(main.shape)
            tensors = {"param": parameter, **owner.state_of(main)}
            # On the device they would take 12 bytes a parameter in runs that keep half of it.
            return {name: tensor.cpu() for name, tensor in tensors.items()} if owner.hands_out_copies else tensors

        flats = trained or itertools.repeat(None)
        return [
            _state_of(owner, {id(main): tensors(owner, flat, main, at) for main, at in slices})
            for owner, slices, flat in zip(self.owners, self.slices, flats, strict=False)
        ]

    def store(self, inner: Sequence[ParameterState]) -> None:
        """Hands what was written to :meth:`inner_states` to optimizers that have given copies."""
        for owner, slices, state in zip(self.owners, self.slices, inner, strict=True):
            for main, _ in slices if owner.hands_out_copies else ():
                tensors = dict(state.tensors[id(main)])
                parameter = tensors.pop("param")
                if owner.stored is not None:
                    owner.stored.write(main, slice(None), parameter.view(-1))
                else:
                    main.detach().copy_(parameter)
                owner.store(main, tensors)

    def exact_tensors(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """What only a run of the same shape can use: residuals and exchanges under way."""
        common = common_names(self.config)
        tensors = {
            f"{index}.{name}": tensor
            for index, state in enumerate(snapshot.states)
            for name, tensor in state.items()
            if name not in common
        }
        for round_ in snapshot.rounds:
            of_round = {"own": round_.own, "sum": round_.sum, "lengths": round_.lengths}
            tensors |= {f"round_{round_.begun}.{name}": tensor for name, tensor in of_round.items()}
        return tensors

    def sharded_tensors(self, group: int, tensors: Mapping[str, Tensor]) -> "ShardedStateDict":
        """Tensors of this rank alone; ``group`` is the number of its group in the folder."""
        sharded_tensor = versions.require("megatron.core.dist_checkpointing", "ShardedTensor")
        prefix = f"{group_prefix(group)}.rank_{self.ranks.rank()}"
        return {
            name: sharded_tensor.from_rank_offsets(f"{prefix}.{name}", tensor, replica_id=0)
            for name, tensor in tensors.items()
            if tensor.numel()
        }


def _state_of(owner: InnerOptimizer, tensors: Mapping[int, Mapping[str, Tensor]]) -> ParameterState:
    return ShardedState(owner, tensors) if isinstance(owner, ShardedOptimizer) else WholeState(owner, tensors)


def sharded_object(group: int, rank: int, data: object, copy: int) -> "ShardedObject":
    """The object of one rank of a group, under a key of its own: a load must not have to ask for those of all ranks."""
    cls = versions.require("megatron.core.dist_checkpointing.mapping", "ShardedObject")
    return cls(f"{group_prefix(group)}.rank_{rank}.objects", data, (1,), (0,), replica_id=copy)


def without_sharded(state: "ShardedStateDict") -> "StateDict":
    """The plain values of a sharded state."""
    extract = versions.require("megatron.core.dist_checkpointing.dict_utils", "extract_matching_values")
    sharded = versions.require("megatron.core.dist_checkpointing.mapping", "ShardedBase")
    _, plain = extract(state, lambda value: isinstance(value, sharded))
    kept: StateDict = plain
    return kept
