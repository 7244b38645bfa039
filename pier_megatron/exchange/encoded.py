"""Collectives in a codec's bytes, over any process group: parts are summed in FP32, and none is rounded at every hop."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import Codec, padded
from pier_megatron.exchange.coding import decode, encode


def saves_bytes(codec: Codec, tensor: Tensor, parts: int = 1) -> bool:
    """Whether encoding a floating-point tensor in ``parts`` equal parts makes it smaller."""
    return tensor.is_floating_point() and parts * codec.nbytes(padded(tensor.numel() // parts)) < tensor.nbytes


def gather_into(gathered: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Begins to collect tensors of one shape from all ranks, in one tensor."""
    # The name from PyTorch 2.13 on, which warns of the older one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(gathered, own, group=group, async_op=True)
    return work


class Payloads:
    """Encoded tensors side by side, so that one collective carries them all.

    Attributes:
        sent: uint8 of shape ``[m, bytes]``.
    """

    def __init__(self, tensors: Iterable[Tensor], codec: Codec, dropped: Sequence[Tensor | None] = ()) -> None:
        """Encodes tensors that are not needed any more, float32 of shape ``[m, n]``, each n a multiple of :data:`BLOCK`.

        Each may have a residual that is ``dropped``, see :func:`pier_megatron.exchange.coding.encode`.
        """
        self._codec = codec
        encoded = [encode(codec, *of_tensor) for of_tensor in itertools.zip_longest(tensors, dropped)]
        self._lengths = [payload.shape[1] for payload in encoded]
        self.sent = encoded[0] if len(encoded) == 1 else torch.cat(encoded, dim=1)

    def decoded(self, received: Tensor) -> Iterator[Tensor]:
        """Decodes such payloads of any ranks, uint8 of shape ``[k, bytes]``, tensor by tensor; float32 of shape ``[k, n]``."""
        for payload in received.split(self._lengths, dim=1):
            yield decode(self._codec, payload.contiguous())


class ReduceScatter:
    """Sums the parts of all ranks, each rank its own: all-to-all of encoded parts, added up in FP32."""

    def __init__(self, parts: Payloads, group: dist.ProcessGroup | None) -> None:
        """Begins to send encoded ``parts``, a row for each rank that sums one."""
        self._parts, self._received = parts, torch.empty_like(parts.sent)
        self._work = dist.all_to_all_single(self._received, parts.sent, group=group, async_op=True)

    def result(self) -> Iterator[Tensor]:
        """Waits for the sums of this rank's parts; float32 of shape ``[1, n]`` each, computed when they are asked for."""
        self._work.wait()
        for decoded in self._parts.decoded(self._received):
            total, *others = decoded.split(1)
            # In rank order for each element, wherever in the vector it is: ranks that hold copies of it get the same bits.
            for other in others:
                total += other
            yield total


class AllGather:
    """Collects parts of each rank, encoded: the same bits on every rank, its own part included."""

    def __init__(self, parts: Payloads, group: dist.ProcessGroup | None) -> None:
        """Begins to send this rank's part of each vector, one row."""
        self._parts = parts
        self._received = parts.sent.new_empty(dist.get_world_size(group), parts.sent.shape[1])
        self._work = gather_into(self._received, parts.sent, group)

    def result(self) -> Iterator[Tensor]:
        """Waits for all parts; float32 of shape ``[ranks, n]`` of each vector, decoded when it is asked for."""
        self._work.wait()
        yield from self._parts.decoded(self._received)
