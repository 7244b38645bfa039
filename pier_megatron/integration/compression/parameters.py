"""Parameters of the distributed optimizer: gathered in a codec's bytes, the same on all ranks of a group.

A rank's own part is replaced by what the others see of it, too; the FP32 main parameters stay what they are.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.encoded import AllGather, as_rows, piece_numel
from pier_megatron.integration import versions
from pier_megatron.integration.compression.traffic import codec_in_force, count

_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"


def install() -> None:
    """Takes over Megatron's gathers of parameters."""
    versions.require(_BUFFERS, "dist_all_gather_func")
    versions.wrap(_BUFFERS, "_ParamAndGradBucketGroup.start_param_sync", _start)


def _start(start_param_sync: Callable[..., Any], bucket_group: Any, /, *args: Any, **kwargs: Any) -> None:
    codec = codec_in_force("gather")
    group = bucket_group.intra_distributed_optimizer_instance_group
    if codec is None or group.size() == 1:
        start_param_sync(bucket_group, *args, **kwargs)
        return
    listed: list[tuple[Tensor, Tensor]] = []

    def list_gather(whole: Tensor, own: Tensor, **given: Any) -> None:
        listed.append((whole, own))

    with versions.replaced(importlib.import_module(_BUFFERS), {"dist_all_gather_func": list_gather}):
        start_param_sync(bucket_group, *args, **kwargs)
    if not listed:
        return
    handle = _Handle([gather for whole, own in listed for gather in _begin(codec, whole, own, group)])
    if bucket_group.param_gather_handle is None:
        handle.wait()
    else:
        bucket_group.param_gather_handle = handle


def _begin(codec: Codec, whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[Tensor, AllGather]]:
    """Begins one of Megatron's gathers, in pieces: where a piece of all parts belongs, and what is on its way there."""
    ranks = group.size()
    size = piece_numel(ranks)
    for place, part in zip(whole.view(ranks, -1).split(size, dim=1), own.view(-1).split(size), strict=True):
        row = as_rows(part, 1)
        count("gather", (ranks - 1) * codec.nbytes(row.shape[1]), (ranks - 1) * part.nbytes)
        yield place, AllGather(row, codec, group)


class _Handle:
    """What Megatron waits for."""

    def __init__(self, gathers: list[tuple[Tensor, AllGather]]) -> None:
        self._gathers = gathers

    def wait(self) -> None:
        for place, gather in self._gathers:
            place.copy_(gather.result()[:, : place.shape[1]])
