"""What is sent of Megatron's buckets at once, in blocks that end with their parameters."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.experiments.compression.layout import Piece, pieces
from pier_megatron.megatron_api import run


class _Bucket(Protocol):
    """What is used of Megatron's ``_ParamAndGradBucket``."""

    grad_data: Tensor
    param_data: Tensor | None
    param_to_index: Mapping[Tensor, tuple[int, int]]
    gradient_scaling_factor: float


class _DataParallelConfig(Protocol):
    """What is used of Megatron's ``DistributedDataParallelConfig``."""

    overlap_grad_reduce: bool
    num_distributed_optimizer_instances: int


class BucketGroup(Protocol):
    """What is used of Megatron's ``_ParamAndGradBucketGroup``."""

    buckets: Sequence[_Bucket]
    ddp_config: _DataParallelConfig
    intra_distributed_optimizer_instance_group: dist.ProcessGroup
    communication_stream: torch.cuda.Stream
    grad_reduce_handle: "Handle | None"
    param_gather_handle: "Handle | None"


class Handle(Protocol):
    """What Megatron waits for."""

    def wait(self) -> object:
        """Waits for it."""


class _LaidOut(weakref.WeakKeyDictionary[_Bucket, dict[tuple[int, int, int], list[Piece]]]):
    """Pieces of what is sent, by bucket, and by where it begins, its size and its parts."""


def pieces_of(bucket_group: BucketGroup, sent: Tensor, parts: int) -> list[Piece]:
    """Lays out gradients or parameters.

    Args:
        bucket_group: Megatron's.
        sent: A bucket of it, or a part of one, flat.
        parts: Number of equal parts that it is cut into.
    """
    bucket, begin = next(found for bucket in bucket_group.buckets if (found := _place(bucket, sent)) is not None)
    known = run.part(_LaidOut).setdefault(bucket, {})
    key = (begin, sent.numel(), parts)
    if key not in known:
        end = begin + sent.numel()
        bounds = [(max(low, begin) - begin, min(high, end) - begin) for low, high in bucket.param_to_index.values()]
        known[key] = pieces(sent.numel(), parts, bounds)
    return known[key]


def _place(bucket: _Bucket, sent: Tensor) -> tuple[_Bucket, int] | None:
    """The bucket and where in it a tensor begins; None if it is not in the bucket."""
    for data in (bucket.grad_data, bucket.param_data):
        if data is None or data.untyped_storage().data_ptr() != sent.untyped_storage().data_ptr() or data.dtype != sent.dtype:
            continue
        begin = int(sent.storage_offset() - data.storage_offset())
        if begin >= 0 and begin + sent.numel() <= data.numel():
            return bucket, begin
    return None
