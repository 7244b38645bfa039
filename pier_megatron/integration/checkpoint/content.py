"""What the plugin adds to Megatron's checkpoints when they are saved, and asks of them when they are loaded."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.integration import startup, versions
from pier_megatron.integration.checkpoint.files import DamagedCheckpointError
from pier_megatron.integration.checkpoint.formats import Layer
from pier_megatron.integration.checkpoint.random_states import random_states, restore_random_states
from pier_megatron.integration.inner.adam import inner_state
from pier_megatron.outer.description import ENTRY, OUTER, Description, group_prefix

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer

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


def layout_of(args: Any, ranks: int) -> dict[str, int]:
    """How a group of ``ranks`` ranks shares the model, by Megatron's arguments."""
    return {f"--{name.replace('_', '-')}": getattr(args, name, None) or 1 for name in _LAYOUT} | {_RANKS: ranks}


@dataclasses.dataclass
class _Load:
    """What has been asked of a checkpoint."""

    saved: Description
    is_exact: bool
    changes: list[str]
    metadata: Any
    sources: list[int]
    objects: dict[str, Any] | None = None


class CheckpointContent:
    """What one rank stores of a Pier run, and how it goes on from what was stored.

    Attributes:
        description: Of the run, while it is saved.
    """

    def __init__(self, optimizer: "PierOptimizer") -> None:
        """Looks after an optimizer."""
        self._optimizer = optimizer
        self._group, self._groups = optimizer.exchange.rank, optimizer.exchange.size
        self._ranks = optimizer.get_grad_stats_parallel_group()
        self._scheduler: Any = None
        self._load: _Load | None = None
        self.description: Description | None = None

    # Saving

    @contextlib.contextmanager
    def saving(self, opt_param_scheduler: Any) -> Iterator[None]:
        """Inside, the run is at rest, its model holds what all groups agree on, and :meth:`content` is complete."""
        optimizer = self._optimizer
        optimizer.settle()
        self._scheduler = opt_param_scheduler
        self.description = self._describe(
            optimizer.iteration,
            own_inner_state=self._groups_with_own_inner_state(),
            rounds={underway.begun: tuple(underway.round.verdicts().tolist()) for underway in optimizer.underway},
            checksums=self._checksums(),
        )
        if dist.get_rank() == 0:
            print(self._announcement(), flush=True)
        with contextlib.nullcontext() if optimizer.is_synchronised else optimizer.anchor_in_model():
            yield
        self.description = self._scheduler = None

    def _describe(self, iteration: int, **content: Any) -> Description:
        layout = layout_of(versions.megatron_args(), self._ranks.size())
        return Description.of_run(self._optimizer.pier_config, iteration, layout, **content)

    def _groups_with_own_inner_state(self) -> tuple[int, ...]:
        optimizer = self._optimizer
        if not optimizer.is_local or optimizer.pier_config.save_inner_state == "first":
            return ()
        return tuple(range(1 if optimizer.is_synchronised else 0, self._groups))

    def _checksums(self) -> dict[str, int]:
        """Sums of the bits, the same however the ranks of a group share the model."""
        sums = {}
        for name in ("anchor", "momentum"):
            total = torch.zeros((), dtype=torch.int64)
            for state in self._optimizer.outer_states:
                for chunk in state.chunks:
                    if chunk.part.is_counted:
                        total += chunk.of(state.flats[name]).view(torch.int32).sum(dtype=torch.int64).cpu()
            total = total.to(self._optimizer.get_loss_scale().device)
            dist.all_reduce(total, group=self._ranks)
            sums[name] = int(total.item())
        return sums

    def _announcement(self) -> str:
        optimizer, description = self._optimizer, self.description
        assert description is not None
        ranks, parameters = self._ranks.size(), sum(state.numel for state in optimizer.outer_states)
        own = len(description.own_inner_state)
        weights = "those that all groups hold" if optimizer.is_synchronised else "the anchor, from the last outer step"
        inner = f"{own} groups apart" if own else "group 0, for all"
        return (
            f" checkpoint of iteration {optimizer.iteration}: model weights are {weights}; outer state "
            f"{8 * parameters * ranks / 1e6:,.1f} MB; inner state of {inner}: {12 * parameters * ranks * own / 1e6:,.1f} MB "
            "beside Megatron's own"
        )

    def content(self, stock: dict[Any, Any], model_state: Any, metadata: Any) -> dict[Any, Any]:
        """Completes the optimizer's sharded state while it is saved.

        Args:
            stock: What Megatron stores.
            model_state: The sharded state of the model.
            metadata: Of the checkpoint.
        """
        optimizer, description = self._optimizer, self.description
        assert description is not None
        entry: dict[str, Any] = {}
        prefix = group_prefix(self._group)
        has_own = self._group in description.own_inner_state
        for index, outer in enumerate(self._outer_layers()):
            entry[f"outer{index}"] = outer.sharded(model_state, metadata, f"{OUTER}.{index}", is_loading=False)
        for index, inner in enumerate(self._inner_layers() if has_own else ()):
            entry[f"inner{index}"] = inner.sharded(model_state, metadata, f"{prefix}.{index}", is_loading=False, copy=0)
        objects = {
            "inner": [member.state_dict() for member in optimizer.members],
            "scheduler steps": None if self._scheduler is None else self._scheduler.num_steps,
            "rng": random_states(),
            "outliers": optimizer.outliers.state_dict() if optimizer.outliers else {},
        }
        entry["objects"] = self._sharded_object(self._group, self._ranks.rank(), objects, copy=(0, 0))
        entry["tensors"] = self._sharded_tensors(self._exact_tensors())
        if optimizer.is_local and self._group > 0:
            # Megatron takes the groups for copies of each other and would store some of this from one, some from another.
            stock = _without_sharded(stock)
        return {**stock, ENTRY: entry}

    def _outer_layers(self) -> list[Layer]:
        layers = []
        for member, state, staging in self._optimizer.stores():
            staging.synchronize()
            layers.append(
                Layer(
                    member,
                    {
                        id(shard): {"param": state.anchor[place], "exp_avg": state.momentum[place]}
                        for shard, place in state.places()
                    },
                )
            )
        return layers

    def _inner_layers(self) -> list[Layer]:
        """Main parameters and Adam's moments; the main parameters as they are trained, whatever the model shows."""
        layers = []
        for index, (member, state, _) in enumerate(self._optimizer.stores()):
            stash = self._optimizer.stash[index] if self._optimizer.stash else None
            layers.append(
                Layer(
                    member,
                    {
                        id(shard): {"param": shard.detach() if stash is None else stash[place], **inner_state(member, shard)}
                        for shard, place in state.places()
                    },
                )
            )
        return layers

    def _residuals(self) -> dict[str, Tensor]:
        """What codecs have dropped so far: views, which can be written to."""
        return {
            f"{index}.{name}": residual
            for index, state in enumerate(self._optimizer.outer_states)
            for name, residual in state.residuals().items()
        }

    def _exact_tensors(self) -> dict[str, Tensor]:
        """What only a run of the same shape can go on with: residuals and exchanges under way."""
        tensors = self._residuals()
        for underway in self._optimizer.underway:
            own, total = underway.round.settle()
            tensors |= {f"round_{underway.begun}.own": own, f"round_{underway.begun}.sum": total}
        return tensors

    def _sharded_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        sharded_tensor = versions.require("megatron.core.dist_checkpointing", "ShardedTensor")
        prefix = f"{group_prefix(self._group)}.rank_{self._ranks.rank()}"
        return {
            name: sharded_tensor.from_rank_offsets(f"{prefix}.{name}", tensor, replica_id=0)
            for name, tensor in tensors.items()
            if tensor.numel()
        }

    @staticmethod
    def _sharded_object(group: int, rank: int, data: Any, copy: tuple[int, int]) -> Any:
        """The object of one rank of a group, under a key of its own: a load must not have to ask for those of all ranks."""
        sharded_object = versions.require("megatron.core.dist_checkpointing.mapping", "ShardedObject")
        return sharded_object(f"{group_prefix(group)}.rank_{rank}.objects", data, (1,), (0,), replica_id=copy)

    # Loading

    def request(self, stock: dict[Any, Any], model_state: Any, metadata: Any) -> dict[Any, Any]:
        """Completes the optimizer's sharded state with what this rank wants from a checkpoint.

        Args:
            stock: What Megatron asks for.
            model_state: The sharded state of the model.
            metadata: Of the checkpoint.

        Raises:
            PierConfigError: If the checkpoint is of another run than this one and the user has not accepted that.
        """
        if ENTRY not in (metadata or {}):
            return stock
        saved, config = Description.from_metadata(metadata[ENTRY]), self._optimizer.pier_config
        present = self._describe(saved.iteration)
        changes = saved.check(present, config.override_checkpoint)
        rule = config.load_inner_state
        sources = saved.sources(self._group, self._groups, rule)
        self._load = _Load(saved, saved.is_exact_for(present), changes, metadata, sources)
        readers = {
            source: [group for group in range(self._groups) if source in saved.sources(group, self._groups, rule)]
            for source in sources
        }
        copies = {source: groups.index(self._group) for source, groups in readers.items()}
        entry: dict[str, Any] = {}
        for index, outer in enumerate(self._outer_layers()):
            entry[f"outer{index}"] = outer.sharded(model_state, metadata, f"{OUTER}.{index}", is_loading=True)
        for index, inner in enumerate(self._inner_layers()):
            for source in (source for source in sources if source in saved.own_inner_state):
                prefix = f"{group_prefix(source)}.{index}"
                # Not into the parameters themselves: in FP32 they are the model's, and its weights are yet to be loaded.
                layer = inner.empty_on_host()
                entry[f"inner{index}.{source}"] = layer.sharded(model_state, metadata, prefix, True, copies[source])
        rank, copy = (self._ranks.rank(), 0) if saved.has_layout_of(present) else (0, self._ranks.rank())
        entry["objects"] = self._sharded_object(sources[0], rank, None, copy=(copies[sources[0]], copy))
        if self._load.is_exact:
            tensors = self._residuals()
            for begun, verdicts in saved.rounds.items():
                numel = self._optimizer.resume_round(begun, verdicts).numel()
                tensors |= {f"round_{begun}.{name}": torch.empty(numel) for name in ("own", "sum")}
            entry["tensors"] = self._sharded_tensors(tensors)
        if all(source in saved.own_inner_state for source in sources):
            stock = _without_sharded(stock)
        return {**stock, ENTRY: entry}

    def restore(self, state: dict[Any, Any]) -> None:
        """Takes over what was read for :meth:`request`."""
        optimizer, load = self._optimizer, self._load
        assert load is not None
        entry = state[ENTRY]
        load.objects = entry["objects"]
        for member, inner in zip(optimizer.members, load.objects["inner"], strict=True):
            member.load_state_dict(inner)
        # Only now: loading may have put other tensors in the place of those that were there.
        for index, mean in enumerate(self._inner_layers()):
            for source in load.sources:
                is_apart = source in load.saved.own_inner_state
                layer = mean if source == load.sources[0] else mean.empty_on_host()
                layer.load(
                    entry[f"inner{index}.{source}"] if is_apart else self._of_member(state, index)["param_state"], load.metadata
                )
                if layer is not mean:
                    mean.add(layer)
            if len(load.sources) > 1:
                mean.divide(len(load.sources))
        for index, outer in enumerate(self._outer_layers()):
            outer.load(entry[f"outer{index}"], load.metadata)
        if load.is_exact:
            self._restore_exact(entry["tensors"])
        if optimizer.outliers:
            optimizer.outliers.load_state_dict(load.objects["outliers"])

    def _of_member(self, state: dict[Any, Any], index: int) -> Any:
        """A member's part of Megatron's own state, which numbers optimizers only where there are several."""
        chained = self._optimizer.chained_optimizers
        return state[chained.index(self._optimizer.members[index])] if len(chained) > 1 else state

    def _restore_exact(self, tensors: dict[str, Tensor]) -> None:
        for name, residual in self._residuals().items():
            residual.copy_(tensors[name])
        for underway in self._optimizer.underway:
            empty = torch.empty(0)
            underway.round.resume(
                tensors.get(f"round_{underway.begun}.own", empty), tensors.get(f"round_{underway.begun}.sum", empty)
            )

    def finish_loading(self, iteration: int, opt_param_scheduler: Any) -> None:
        """Restores what Megatron keeps outside of the optimizer, checks the result and says what it is.

        Args:
            iteration: At which the run goes on; 0 if nothing was loaded.
            opt_param_scheduler: Megatron's.

        Raises:
            DamagedCheckpointError: If the outer state is not what was saved.
            PierConfigError: If the groups do not agree.
        """
        optimizer, load = self._optimizer, self._load
        if load is None or load.objects is None:
            optimizer.reset_outer_state()
            startup.check_groups_agree(optimizer.outer_states, optimizer.exchange)
            if iteration and dist.get_rank() == 0:
                print(f" Pier begins at iteration {iteration}, from weights without outer momentum", flush=True)
            return
        if load.saved.has_layout_of(self._describe(iteration)):
            self._verify(load.saved)
            restore_random_states(load.objects["rng"])
        steps = load.objects["scheduler steps"]
        if opt_param_scheduler is not None and steps is not None and steps != opt_param_scheduler.num_steps:
            # Megatron has restored the scheduler of group 0, which may have skipped other steps than this one.
            opt_param_scheduler.num_steps = steps
            opt_param_scheduler.step(0)
        startup.check_groups_agree(optimizer.outer_states, optimizer.exchange)
        if dist.get_rank() == 0:
            print(self._resumption(load), flush=True)
        self._load = None

    def _verify(self, saved: Description) -> None:
        found = self._checksums()
        wrong = [name for name, checksum in saved.checksums.items() if found[name] != checksum]
        if wrong:
            raise DamagedCheckpointError(
                f"--load {versions.megatron_args().load}: the {' and the '.join(wrong)} of iteration {saved.iteration} are not "
                "what was saved: their checksums differ. The files are damaged. Choose another iteration with --ckpt-step."
            )

    @staticmethod
    def _resumption(load: _Load) -> str:
        if load.is_exact and load.saved.holds_all_groups:
            return f" Pier goes on exactly from iteration {load.saved.iteration}"
        lines = [f" Pier goes on from iteration {load.saved.iteration}"]
        if load.changes:
            lines.append(f"with changes: {', '.join(load.changes)}")
        lines.append(f"group 0 with the inner state of saved group {' and '.join(map(str, load.sources))}")
        if load.saved.rounds and not load.is_exact:
            lines.append("exchanges under way are dropped: what they carried goes into the next outer step")
        return "; ".join(lines)


def _without_sharded(state: dict[Any, Any]) -> dict[Any, Any]:
    """The plain values of a sharded state."""
    extract = versions.require("megatron.core.dist_checkpointing.dict_utils", "extract_matching_values")
    sharded = versions.require("megatron.core.dist_checkpointing.mapping", "ShardedBase")
    _, plain = extract(state, lambda value: isinstance(value, sharded))
    kept: dict[Any, Any] = plain
    return kept
