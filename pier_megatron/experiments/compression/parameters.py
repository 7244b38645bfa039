"""Parameters of the distributed optimizer: gathered in a codec's bytes, the same on all ranks of a group.

A rank's own part is replaced by what the others see of it, too; the FP32 main parameters stay what they are.
"""

import importlib
from collections.abc import Callable
from typing import Concatenate

import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.encoded import AllGather, Payloads
from pier_megatron.experiments.compression.buckets import BucketGroup, pieces_of
from pier_megatron.experiments.compression.layout import Piece
from pier_megatron.experiments.compression.traffic import codec_in_force, count
from pier_megatron.megatron_api import versions

_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"


def start[**P](
    start_param_sync: Callable[Concatenate[BucketGroup, P], None],
    bucket_group: BucketGroup,
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Gathers parameters in a codec's bytes."""
    codec = codec_in_force("gather")
    if codec is None or (group := bucket_group.intra_distributed_optimizer_instance_group).size() == 1:
        start_param_sync(bucket_group, *args, **kwargs)
        return
    listed: list[tuple[Tensor, Tensor]] = []

    def list_(whole: Tensor, own: Tensor, **_: object) -> None:
        listed.append((whole, own))

    with versions.replaced(importlib.import_module(_BUFFERS), {"dist_all_gather_func": list_}):
        start_param_sync(bucket_group, *args, **kwargs)
    if not listed:
        return
    handle = _Handle([gather for whole, own in listed for gather in _begin(codec, bucket_group, whole, own, group)])
    if bucket_group.param_gather_handle is None:
        handle.wait()
    else:
        bucket_group.param_gather_handle = handle


_Gather = tuple[Tensor, Piece, AllGather]


def _begin(codec: Codec, bucket_group: BucketGroup, whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> list[_Gather]:
    """Begins one of Megatron's gathers, in pieces: the parts of all ranks, what arrives of them, and the gather."""
    ranks, parts = group.size(), whole.view(group.size(), -1)
    laid_out = pieces_of(bucket_group, whole, ranks)
    count("gather", (ranks - 1) * sum(codec.nbytes(piece.numel) for piece in laid_out), (ranks - 1) * own.nbytes)
    rows = ((piece, piece.of(group.rank()).read(own.view(1, -1))) for piece in laid_out)
    return [(parts, piece, AllGather(Payloads([row], codec), group)) for piece, row in rows]


class _Handle:
    """What Megatron waits for."""

    def __init__(self, gathers: list[_Gather]) -> None:
        self._gathers = gathers

    def wait(self) -> None:
        for parts, piece, gather in self._gathers:
            [whole] = gather.result()
            piece.write(whole, parts)
