"""How pseudo-gradients cross the groups: a communicator that carries nothing else."""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, CODECS, Codec


@dataclasses.dataclass(frozen=True)
class Wire:
    """What a sum over groups costs, without any of them.

    Attributes:
        codec: What sums look like on the wire.
        groups: Number of groups.
    """

    codec: Codec
    groups: int

    def bytes_of_sum(self, numel: int, exactly: bool = False) -> int:
        """Bytes that each rank sends to sum ``numel`` elements, by the cost model of a ring: reduce-scatter and all-gather.

        Args:
            numel: Number of elements.
            exactly: Whether they travel in FP32, whatever the codec.
        """
        if self.groups == 1:
            return 0
        encoded = not (exactly or self.codec.lossless)
        sent = self.codec.nbytes(self.segment_numel(numel)) if encoded else numel * 4 / self.groups
        return round(2 * (self.groups - 1) * sent)

    def segment_numel(self, numel: int) -> int:
        """Elements of which each group computes the sum, of ``numel`` in all: whole blocks."""
        return -(-numel // (self.groups * BLOCK)) * BLOCK

    def payload_bytes(self, numel: int) -> int:
        """Memory of the encoded payloads of a sum of ``numel`` elements while it is under way: sent and received."""
        return 0 if self._is_plain else 2 * self.groups * self.codec.nbytes(self.segment_numel(numel))

    def coding_bytes(self, numel: int) -> int:
        """Memory that encoding or decoding ``numel`` elements takes for a moment: a padded copy, and what is made of it."""
        return 0 if self._is_plain else 2 * 4 * self.groups * self.segment_numel(numel)

    @property
    def _is_plain(self) -> bool:
        return self.groups == 1 or self.codec.lossless


class GroupExchange:
    """Collectives between the ranks that own the same parameters, one rank of each group.

    Every rank must call the same methods in the same order. None of them waits for the other groups before its result is
    asked for.

    Attributes:
        size: Number of groups.
        rank: Index of this rank's group.
        wire: What sums cost.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, codec: Codec = CODECS["fp32"]) -> None:
        """Wraps the plugin's own communicator.

        Args:
            process_group: One rank of each group, in group order. None stands for a single group: there is nobody to
                talk to.
            codec: What sums look like on the wire.
        """
        self.process_group = process_group
        self.codec = codec
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.wire = Wire(codec, self.size)

    def sum(self, vector: Tensor, residual: "Residual | None" = None, exactly: bool = False) -> "Sum":
        """Begins to sum ``vector`` over the groups.

        Args:
            vector: float32, shape ``[n]``; it must not change before the sum is finished, and holds it then.
            residual: What the codec has dropped from earlier vectors of this place, to be made up for now.
            exactly: Send FP32, whatever the codec.

        Returns:
            The sum under way.
        """
        if self.process_group is None:
            return Sum()
        if exactly or self.codec.lossless:
            return _AllReduce(dist.all_reduce(vector, group=self.process_group, async_op=True))
        return _EncodedSum(self, vector, residual)

    def gather(self, vector: Tensor) -> "Gathered":
        """Begins to collect a short vector of each group, shape ``[n]``."""
        return Gathered(self, vector)


class Sum:
    """A sum over the groups under way; this one is that of a single group, which is there from the start."""

    def advance(self) -> None:
        """Begins what follows on what has arrived. Call it once on every rank, before :meth:`finish`."""

    def finish(self) -> None:
        """Waits until the vector holds the sum, the same bits in every group."""


class _AllReduce(Sum):
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def finish(self) -> None:
        self._work.wait()


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

    def __init__(self, exchange: GroupExchange, vector: Tensor, residual: Residual | None) -> None:
        self._exchange, self._vector, self._residual = exchange, vector, residual
        codec, segment = exchange.codec, exchange.wire.segment_numel(len(vector))
        rows = vector.new_zeros(exchange.size, segment)
        padded = rows.view(-1)[: len(vector)]
        padded.copy_(vector)
        if residual is not None:
            padded += residual.sent
        self._sent = codec.encode(rows)
        if residual is not None:
            torch.sub(padded, codec.decode(self._sent).view(-1)[: len(vector)], out=residual.sent)
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=exchange.process_group, async_op=True)

    def advance(self) -> None:
        self._work.wait()
        codec = self._exchange.codec
        total = codec.decode(self._received).sum(0, keepdim=True)
        if self._residual is not None:
            total += self._residual.reduced
        self._sent = codec.encode(total)
        if self._residual is not None:
            torch.sub(total[0], codec.decode(self._sent)[0], out=self._residual.reduced)
        group = self._exchange.process_group
        self._work = dist.all_gather_into_tensor(self._received, self._sent, group=group, async_op=True)

    def finish(self) -> None:
        self._work.wait()
        self._vector.copy_(self._exchange.codec.decode(self._received).view(-1)[: len(self._vector)])


class Gathered:
    """Short vectors of all groups, on their way."""

    def __init__(self, exchange: GroupExchange, vector: Tensor) -> None:
        """Begins to collect ``vector``, shape ``[n]``."""
        self._vectors = [vector.clone() for _ in range(exchange.size)]
        self._work: dist.Work | None = None
        if exchange.process_group is not None:
            self._work = dist.all_gather(self._vectors, vector, group=exchange.process_group, async_op=True)

    def is_complete(self) -> bool:
        """Whether :meth:`result` would not wait."""
        return self._work is None or self._work.is_completed()

    def result(self) -> Tensor:
        """Waits for all groups; shape ``[groups, n]``, the same on every rank."""
        if self._work is not None:
            self._work.wait()
        return torch.stack(self._vectors)
