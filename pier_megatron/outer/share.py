"""What a rank owns of its group's model, with the outer state over it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.collectives import GroupExchange, Sum, sum_over
from pier_megatron.outer.chunks import Chunk, Shards, matrix_in
from pier_megatron.outer.memory import residuals_of
from pier_megatron.outer.rules import common_names, rule_class
from pier_megatron.outer.staging import Staged, Staging, chunks_of, one_ahead
from pier_megatron.outer.state import ANCHOR, OuterState
from pier_megatron.settings import flag_of


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

    def _sizes(self) -> tuple[int, int]:
        """Returns their number, which is zero before the first inner step, and the number of their elements."""
        sizes = [moment.numel() for moment in self.each()]
        return len(sizes), sum(sizes)

    def each(self, changes: bool = False) -> Iterator[Tensor]:
        """Yields one after the other, since copies take as much memory as a parameter, and stores ``changes`` in place."""
        for parameter in self._parameters:
            found = self._read(parameter)
            yield from (moment for _, moment in sorted(found.items()))
            if changes and found:
                self._write(parameter, found)

    def forget(self) -> None:
        """Sets all to zero."""
        for moment in self.each(changes=True):
            moment.zero_()

    def hand_over(self, exchange: GroupExchange, groups: Sequence[int], source: int | None, device: torch.device) -> None:
        """Gives ``groups`` the moments of the ``source``, or zeros if it is None; called by all groups of the exchange.

        Groups are named by their index in the exchange, whose tensors are on the ``device``.
        """
        sizes, is_changed = exchange.gather(torch.tensor([*self._sizes()], device=device)).result(), exchange.rank in groups
        # A group that has skipped all its steps so far has no moments to give or to take.
        source = source if len(sizes.unique(dim=0)) == 1 else None
        if source is not None:
            for moment in self.each(is_changed):
                exchange.broadcast(moment, source, groups)
        elif is_changed:
            self.forget()


class Share:
    """The parameters of one rank, which the inner optimizer trains and outer steps reset, with the outer state over them.

    Attributes:
        exchange: Collectives between all groups that are known beforehand.
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
        exchange: GroupExchange,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        inner_state: Callable[[Tensor], Mapping[str, Tensor]] = lambda parameter: {},
        store_inner_state: Callable[[Tensor, Mapping[str, Tensor]], None] = lambda parameter, tensors: None,
        on_change: Callable[[], None] = lambda: None,
        is_elastic: bool = False,
    ) -> None:
        """Takes over parameters that the model knows; for the arguments see :class:`pier_megatron.outer.loop.OuterLoop`."""
        devices = (tensor.device for of_optimizer in shards for alike in of_optimizer for tensor in alike.tensors)
        self.device = device or next(devices, torch.device("cpu"))
        self.common = common_names(config)
        segment_numel, residuals = residuals_of(config, is_elastic)
        self.states = [
            OuterState(
                of_optimizer,
                chunk_numel=config.chunk_numel_on(self.device.type),
                fragments=config.fragments,
                offload=config.offload,
                device=self.device,
                common=self.common,
                segment_numel=segment_numel,
                residuals=residuals,
                cuts_matrices=not rule_class(config).takes_matrices,
            )
            for of_optimizer in shards
        ]
        self.stagings = [Staging(state) for state in self.states]
        self.exchange, self._group, self._on_change, self._is_committed = exchange, group, on_change, True
        parameters = [parameter for state in self.states for parameter, _ in state.slices()]
        self.moments = Moments(parameters, inner_state, store_inner_state)

    def chunks(self, fragments: Sequence[int]) -> Iterator[tuple[Staging, Chunk]]:
        """Yields the chunks of some fragments, each with what lends it buffers."""
        return chunks_of(self.stagings, fragments)

    def hand_over(self, exchange: GroupExchange, source: int, targets: Sequence[int]) -> None:
        """Copies what all groups agree on from one group to others, in place; called by all groups of the exchange.

        By way of the device, chunk by chunk: NCCL takes no tensors in host memory, where offloaded state is.
        """
        for staged in self._lent(*self.common):
            for name in self.common:
                exchange.broadcast(staged.tensors[name], source, targets)
            staged.give_back(self.common)

    def commit(self) -> None:
        """Lets the model know the parameters."""
        self._on_change()
        self._is_committed = True

    def commit_pending(self) -> None:
        """Commits if an error has prevented :meth:`commit`."""
        if not self._is_committed:
            self.commit()

    def become_anchor(self) -> None:
        """Copies the present parameters into the anchor."""
        self.synchronize()
        for state in self.states:
            state.copy_parameters_to(state.anchor)

    def return_to_anchor(self) -> None:
        """Takes the anchor for the parameters."""
        self.synchronize()
        for state in self.states:
            state.set_parameters(state.anchor)

    def agree_on_mean(self) -> None:
        """Takes the mean of all groups' anchors for the parameters and for the anchor."""
        self._write_mean_of_anchors()
        self.become_anchor()
        self.commit()

    @contextlib.contextmanager
    def showing_anchor(self, as_mean: bool) -> Iterator[list[Tensor]]:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.anchor_in_model`."""
        with torch.no_grad():
            trained = [state.parameters_on_host() for state in self.states]
        try:
            with torch.no_grad():
                if as_mean:
                    self._write_mean_of_anchors()
                else:
                    self.return_to_anchor()
            self.commit()
            yield trained
        finally:
            with torch.no_grad():
                for state, parameters in zip(self.states, trained, strict=True):
                    state.set_parameters(parameters)
            # Not here: after an error on one rank the others would not take part.
            self._is_committed = False
        self.commit()

    def average(self, exchange: GroupExchange, counted: Sequence[bool]) -> None:
        """Takes the mean of the parameters of the groups that count, at least one: the same bits in all, copies included."""
        for staged in self._lent():
            staged.chunk.copy_parameters_to(staged.shared)
            if not counted[exchange.rank]:
                staged.shared.zero_()
            shards = staged.chunk.shards
            total = sum_over(exchange, shards.holders, [staged.shared], exactly=shards.travel_exactly(exchange.codec))
            _write_mean(staged, total, sum(counted))

    def _write_mean_of_anchors(self) -> None:
        """Writes the mean of all groups' anchors to the parameters: the same bits in all of them, whatever their anchors."""
        for staged in self._lent(ANCHOR):
            staged.shared.copy_(staged.anchor)
            total = sum_over(self.exchange, staged.chunk.shards.holders, [staged.shared], exactly=True)
            _write_mean(staged, total, self.exchange.size)

    def _lent(self, *reads: str) -> Iterator[Staged]:
        return one_ahead(staging.lend(chunk, reads) for staging in self.stagings for chunk in staging.state.chunks)

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


def _write_mean(staged: Staged, total: Sum, number: int) -> None:
    """Waits for the sum of ``number`` groups in ``staged.shared``, and takes the mean for the parameters."""
    total.advance()
    total.finish()
    staged.chunk.set_parameters(staged.shared.div_(number))
    staged.give_back()


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
    holders = group if group is not None and group.size() > 1 else None
    matrices = [matrix_in(parameter, slice(0, parameter.numel())) for parameter in parameters]
    return Shards(parameters, is_counted=holders is None or holders.rank() == 0, holders=holders, matrices=matrices)


def moments_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns what an optimizer keeps for a parameter, such as Adafactor's rows and columns: not its count of steps."""
    state = optimizer.state.get(parameter, {}).items()
    return {
        name: value
        for name, value in state
        if name != "step" and isinstance(value, Tensor) and value.device == parameter.device
    }


def exchange_between(
    config: PierConfig, between: dist.ProcessGroup | GroupExchange | None, is_elastic: bool = False
) -> GroupExchange:
    """Returns collectives between the groups of a run, made or given; a :class:`PierConfigError` if they are of another run."""
    found = between if isinstance(between, GroupExchange) else GroupExchange(between, config.codec)
    wrong = {"groups": (config.groups, len(found.groups)), "exchange_dtype": (config.exchange_dtype, found.codec.name)}
    for name, (wanted, given) in wrong.items():
        if wanted != given and not is_elastic:
            raise PierConfigError(
                f"{flag_of(name)} {wanted}: the loop was given collectives of {given}. Pass it the process group of the ranks "
                f"that own the same parameters, one of each of the {config.groups} groups."
            )
    return found
