"""How pseudo-gradients cross the groups: a communicator that carries nothing else."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import CODECS, Codec, padded
from pier_megatron.exchange.encoded import AllGather, Payloads, ReduceScatter, gather_into
from pier_megatron.exchange.wire import Wire

_EXACT = CODECS["fp32"]


class GroupExchange:
    """Collectives between some groups: the ranks that own the same parameters, one of each group.

    Every rank must call the same methods in the same order. None of them waits for the other groups before its result is
    asked for.

    Attributes:
        process_group: Communicator of one rank of each group, in group order; None for a single group.
        codec: Codec of sums on the wire.
        groups: Numbers of the participants among all groups, in order.
        size: Number of participants.
        rank: Index of this rank's group among them.
        wire: Cost of sums.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        codec: Codec = _EXACT,
        groups: Sequence[int] | None = None,
    ) -> None:
        """Wraps the plugin's own communicator.

        Args:
            process_group: Communicator of one rank of each group, in group order; None, or a single rank, for a single group.
            codec: Codec of sums on the wire.
            groups: Numbers of these groups among all; by default, all of them.
        """
        self.size, self.rank = (1, 0) if process_group is None else (process_group.size(), process_group.rank())
        self.process_group = process_group if self.size > 1 else None
        self.codec, self.groups, self.wire = codec, tuple(groups or range(self.size)), Wire(codec, self.size)

    def sum(self, vectors: Sequence[Tensor], residuals: Sequence["Residual | None"] = (), exactly: bool = False) -> "Sum":
        """Begins to sum vectors over the groups, together: encoded, or over NCCL, with as many launches as one of them.

        Args:
            vectors: float32, shape ``[n]`` each; they must not change before the sum is finished, and hold it then.
            residuals: What the codec has dropped from earlier vectors of each place, to be made up for now; by default, none.
            exactly: Send FP32, whatever the codec, and sum in the order of the groups: ranks that hold copies get the same
                bits, each over its own communicator. A collective of a communicator's own may sum in any order.

        Returns:
            The sum under way.
        """
        if self.process_group is None:
            return Sum()
        if exactly:
            return _EncodedSum(self, _EXACT, vectors, ())
        if self.codec.lossless:
            return _AllReduce(vectors, self.process_group)
        return _EncodedSum(self, self.codec, vectors, residuals)

    def gather(self, vector: Tensor) -> "Gathered":
        """Begins to collect a short vector of each group.

        Args:
            vector: Vector of this group, of a shape ``[n]`` that is the same in all.
        """
        # In one tensor: a list of them would take Python as long as there are groups.
        vectors = vector.new_empty(self.size, len(vector))
        if self.process_group is None:
            vectors.copy_(vector)
            return Gathered(vectors, [Computed(vector.device)])
        return Gathered(vectors, [gather_into(vectors, vector[None], self.process_group)])

    def broadcast(self, tensor: Tensor, source: int, targets: Sequence[int]) -> None:
        """Copies a tensor of one group to others, in place; called by all groups.

        Args:
            tensor: Tensor that is copied in the source, and written in the targets.
            source: Index of the group that has it.
            targets: Indices of the groups that receive it.
        """
        received = tensor if self.rank in (*targets, source) else torch.empty_like(tensor)
        dist.broadcast(received, group=self.process_group, group_src=source)


class Sum:
    """A sum over the groups under way; this one is several, or without any that of a single group, complete from the start."""

    _sums: Sequence["Sum"] = ()

    def __init__(self, sums: Sequence["Sum"] = ()) -> None:
        """Takes sums that are under way together."""
        self._sums = sums

    def advance(self) -> None:
        """Begins what follows on what has arrived. Call it once on every rank, before :meth:`finish`."""
        for each in self._sums:
            each.advance()

    def finish(self) -> None:
        """Waits until the vectors hold the sum, the same bits in every group."""
        for each in self._sums:
            each.finish()


def sum_over(
    exchange: GroupExchange,
    holders: dist.ProcessGroup | None,
    vectors: Sequence[Tensor],
    residuals: Sequence["Residual | None"] = (),
    exactly: bool = False,
) -> Sum:
    """Begins to sum vectors over the groups of an ``exchange``; see :meth:`GroupExchange.sum`.

    Ranks that hold the same vectors, the ``holders``, exchange a part each and put the parts together among themselves: they
    send what one of them would.
    """
    if holders is None or exchange.size == 1:
        return exchange.sum(vectors, residuals, exactly)
    return SumOfParts(exchange.sum, holders, vectors, residuals, exactly)


class SumOfParts(Sum):
    """A sum of this rank's parts of vectors, which all ranks that hold the same vectors then put together."""

    def __init__(
        self,
        begin: Callable[..., Sum],
        holders: dist.ProcessGroup,
        vectors: Sequence[Tensor],
        residuals: Sequence["Residual | None"],
        exactly: bool,
    ) -> None:
        """Begins the sum of the parts, as ``begin`` does; the other arguments are those of :func:`sum_over`."""
        self._vectors, self._holders, rank = vectors, holders, holders.rank()
        self._parts = [vector.new_zeros(-(-len(vector) // holders.size())) for vector in vectors]
        carried = [slice(rank * len(part), (rank + 1) * len(part)) for part in self._parts]
        for part, vector, place in zip(self._parts, vectors, carried, strict=True):
            part[: len(vector[place])].copy_(vector[place])
        dropped = [
            residual and Residual(residual.sent[place], residual.reduced)
            for residual, place in zip(residuals, carried, strict=False)
        ]
        super().__init__([begin(self._parts, dropped, exactly)])

    def finish(self) -> None:
        """Waits for the parts, and puts them together."""
        super().finish()
        # One after the other: together their buffers would exceed the vectors.
        for vector, part in zip(self._vectors, self._parts, strict=True):
            gathered = part.new_empty(self._holders.size(), len(part))
            gather_into(gathered, part[None], self._holders).wait()
            vector.copy_(gathered.view(-1)[: len(vector)])


class _AllReduce(Sum):
    def __init__(self, vectors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._works: Sequence[Any]
        backend = group._get_backend(vectors[0].device)
        # gloo cannot: it would copy all vectors into one, and refuses those on a GPU. Older PyTorch does not say who can.
        if len(vectors) == 1 or not getattr(backend, "supports_coalescing", backend.name() == "nccl"):
            self._works = [dist.all_reduce(vector, group=group, async_op=True) for vector in vectors]
            return
        # Megatron launches the reductions of several gradient buckets likewise.
        with dist._coalescing_manager(group, async_ops=True) as launched:  # type: ignore[attr-defined]
            for vector in vectors:
                dist.all_reduce(vector, group=group, async_op=True)
        self._works = [launched]

    def finish(self) -> None:
        for work in self._works:
            work.wait()


@dataclasses.dataclass(frozen=True, eq=False)
class Residual:
    """Error feedback: what the codec dropped is added to the next vector, so that it is late but never lost. At first zero.

    Reference: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv 1901.09847.

    Attributes:
        sent: Dropped from this group's own vectors; float32, shape ``[n]``.
        reduced: Dropped from the sums that this group computes for all; float32, shape ``[segment_numel(n)]``.
    """

    sent: Tensor
    reduced: Tensor


class _EncodedSum(Sum):
    """An all-reduce in the codec's bytes: all-to-all of encoded segments, sum in FP32, all-gather of the encoded sum.

    Adding up encoded numbers would overflow them or round at every hop; this rounds twice, whatever the number of groups.
    """

    def __init__(
        self, exchange: GroupExchange, codec: Codec, vectors: Sequence[Tensor], residuals: Sequence[Residual | None]
    ) -> None:
        self._exchange, self._codec, self._vectors, self._residuals = exchange, codec, vectors, residuals
        segments = (self._segments(vector) for vector in vectors)
        dropped = [None if residual is None else residual.sent for residual in residuals]
        self._scattered: ReduceScatter | None = ReduceScatter(Payloads(segments, codec, dropped), exchange.process_group)

    def advance(self) -> None:
        scattered, self._scattered = self._scattered, None
        assert scattered is not None
        dropped = [None if residual is None else residual.reduced for residual in self._residuals]
        totals = Payloads(scattered.result(), self._codec, dropped)
        # What was received makes room for what will be.
        del scattered
        self._gathered = AllGather(totals, self._exchange.process_group)

    def finish(self) -> None:
        for vector, gathered in zip(self._vectors, self._gathered.result(), strict=True):
            vector.copy_(gathered.view(-1)[: len(vector)])

    def _segments(self, vector: Tensor) -> Tensor:
        size = self._exchange.size
        segments = vector.new_zeros(size, padded(-(-len(vector) // size)))
        segments.view(-1)[: len(vector)].copy_(vector)
        return segments


class Computed:
    """Work that a device has queued until now, with the interface of a collective."""

    def __init__(self, device: torch.device) -> None:
        """Marks this moment; nothing to wait for on a CPU."""
        self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def is_completed(self) -> bool:
        """Whether it has been computed."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Waits until it has been."""
        if self._event is not None:
            self._event.synchronize()


class Gathered:
    """Short vectors of some groups, on their way.

    Attributes:
        vectors: What will hold them; shape ``[groups, n]``.
    """

    def __init__(self, vectors: Tensor, works: Sequence[dist.Work | Computed] = ()) -> None:
        """Takes what will hold the ``vectors`` once the ``works`` are done."""
        self.vectors, self._works = vectors, works

    def is_complete(self) -> bool:
        """Whether :meth:`result` would not wait."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> Tensor:
        """Waits for these groups; shape ``[groups, n]``, the same on every rank."""
        for work in self._works:
            work.wait()
        return self.vectors

    def on_host(self) -> Tensor:
        """Waits for these groups, and for nothing else that a device computes; :meth:`result` in host memory."""
        device = self.vectors.device
        # PyTorch hands out 32 streams of each priority in turn: one of the default priority may be that of a communicator of
        # NCCL's, and the copy would wait for its collectives.
        apart = torch.cuda.stream(torch.cuda.Stream(device, priority=-1)) if device.type == "cuda" else contextlib.nullcontext()
        with apart:
            return self.result().cpu()
