"""What a rank owns of its group's model, with the outer state over it."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer.memory import wire_of
from pier_megatron.outer.rules import common_names
from pier_megatron.outer.staging import Staging, chunks_of, one_ahead
from pier_megatron.outer.state import Chunk, OuterState, Shards


class Moments:
    """The inner optimizer's tensors of all parameters of a rank, in the same order in all groups."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        read: Callable[[Tensor], Mapping[str, Tensor]],
        write: Callable[[Tensor, Mapping[str, Tensor]], None],
    ) -> None:
        """Remembers whose they are; the functions are those of :class:`pier_megatron.outer.loop.OuterLoop`."""
        self._parameters, self._read, self._write = parameters, read, write

    def __len__(self) -> int:
        """Returns their number, which is zero before the first inner step."""
        return sum(len(self._read(parameter)) for parameter in self._parameters)

    def each(self, changes: bool = False) -> Iterator[Tensor]:
        """Yields one after the other, as copies of one parameter's may take as much memory as it.

        Args:
            changes: Whether the caller changes them in place.
        """
        for parameter in self._parameters:
            found = self._read(parameter)
            yield from (moment for _, moment in sorted(found.items()))
            if changes and found:
                self._write(parameter, found)


class Share:
    """The parameters of one rank, and the ranks of its group that own the rest.

    Attributes:
        device: Device of the parameters, and of tensors in collectives.
        states: Outer states, one for each optimizer that owns some of the parameters.
        stagings: Lender of work buffers for each of them.
        common: Names of the flat buffers that all groups agree on.
        moments: Tensors of the inner optimizer for all parameters.
    """

    def __init__(
        self,
        shards: Sequence[Sequence[Shards]],
        config: PierConfig,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        inner_state: Callable[[Tensor], Mapping[str, Tensor]] = lambda parameter: {},
        store_inner_state: Callable[[Tensor, Mapping[str, Tensor]], None] = lambda parameter, tensors: None,
    ) -> None:
        """Takes over parameters; the arguments are those of :class:`pier_megatron.outer.loop.OuterLoop`."""
        devices = (tensor.device for of_optimizer in shards for alike in of_optimizer for tensor in alike.tensors)
        self.device = device or next(devices, torch.device("cpu"))
        self.common = common_names(config)
        self.states = [
            OuterState(
                of_optimizer,
                chunk_numel=config.chunk_numel_on(self.device.type),
                fragments=config.fragments,
                offload=config.offload,
                segment_numel=wire_of(config).segment_numel if config.has_error_feedback else None,
                device=self.device,
                common=self.common,
            )
            for of_optimizer in shards
        ]
        self.stagings = [Staging(state) for state in self.states]
        self._group = group
        parameters = [parameter for state in self.states for parameter, _ in state.slices()]
        self.moments = Moments(parameters, inner_state, store_inner_state)

    def chunks(self, fragments: Sequence[int]) -> Iterator[tuple[Staging, Chunk]]:
        """Yields the chunks of some fragments, each with what lends it buffers."""
        return chunks_of(self.stagings, fragments)

    def hand_over(self, exchange: GroupExchange, source: int, targets: Sequence[int]) -> None:
        """Copies what all groups agree on from one group to others, in place; called by all groups of the exchange.

        By way of the device, chunk by chunk: NCCL takes no tensors in host memory, where offloaded state is.

        Args:
            exchange: Collectives between the groups.
            source: Index of the group that has them.
            targets: Indices of the groups that receive them.
        """
        lent = (staging.lend(chunk, self.common) for staging in self.stagings for chunk in staging.state.chunks)
        for staged in one_ahead(lent):
            for name in self.common:
                exchange.broadcast(staged.tensors[name], source, targets)
            staged.give_back(self.common)

    def over_group(self, tensor: Tensor, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a tensor in place over the ranks of this group; returns it."""
        if self._group is not None:
            dist.all_reduce(tensor, op=op, group=self._group)
        return tensor

    def checksums(self, names: Sequence[str]) -> Tensor:
        """Returns sums of the bits of flat buffers over this rank's parameters; int64, one for each name."""
        self.synchronize()
        sums = torch.zeros(len(names), dtype=torch.int64, device=self.device)
        for state in self.states:
            sums += torch.stack([state.checksum(name) for name in names])
        return sums

    def kept(self) -> list[dict[str, Tensor]]:
        """Returns all that the outer states hold, by name, whole where it lives; see :attr:`OuterState.kept`."""
        self.synchronize()
        return [state.kept for state in self.states]

    def synchronize(self) -> None:
        """Waits until the outer state is whole where it lives."""
        for staging in self.stagings:
            staging.synchronize()


def whole_parameters(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None) -> Shards:
    """Returns the parameters of an optimizer; every rank of a ``group`` must hold all of them.

    Raises:
        TypeError: If one is sharded over ranks.
    """
    parameters = [parameter for settings in optimizer.param_groups for parameter in settings["params"]]
    for parameter in parameters:
        if type(parameter.data) is not Tensor:
            raise TypeError(
                f"OuterLoop.for_optimizer takes whole parameters, but one is a {type(parameter.data).__name__}. Build "
                "OuterLoop over Shards of what each rank holds of it, for example parameter.to_local()."
            )
    is_first, is_copied = group is None or group.rank() == 0, group is not None and group.size() > 1
    return Shards(parameters, is_counted=is_first, is_copied=is_copied)


def moments_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns what an optimizer keeps for every element of a parameter: not its count of steps, which can have that shape."""
    state = optimizer.state.get(parameter, {}).items()
    return {name: value for name, value in state if name != "step" and getattr(value, "shape", None) == parameter.shape}
