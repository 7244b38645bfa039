"""What is sent of Megatron's buckets at once, in blocks that end with their parameters."""

import weakref
from typing import Any

from torch import Tensor

from pier_megatron.exchange.layout import Piece, pieces
from pier_megatron.megatron_api import run


class _LaidOut(weakref.WeakKeyDictionary[Any, dict[tuple[int, int, int], list[Piece]]]):
    """Pieces of what is sent, by bucket, and by where it begins, its size and its parts."""


def pieces_of(bucket_group: Any, sent: Tensor, parts: int) -> list[Piece]:
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


def _place(bucket: Any, sent: Tensor) -> tuple[Any, int] | None:
    """The bucket and where in it a tensor begins; None if it is not in the bucket."""
    for data in (bucket.grad_data, bucket.param_data):
        if data is None or data.untyped_storage().data_ptr() != sent.untyped_storage().data_ptr() or data.dtype != sent.dtype:
            continue
        begin = sent.storage_offset() - data.storage_offset()
        if begin >= 0 and begin + sent.numel() <= data.numel():
            return bucket, begin
    return None
