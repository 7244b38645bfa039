"""Sums of activations and their gradients over tensor-parallel ranks, in a codec's bytes: of Megatron's own layers only.

Transformer Engine's layers talk to each other where nobody else can reach.
"""

from collections.abc import Callable
from typing import Concatenate

import torch.distributed as dist
from torch import Tensor, nn

from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.encoded import saves_bytes
from pier_megatron.experiments.compression.traffic import codec_in_force, count_sum
from pier_megatron.megatron_api import versions


def build[**P](init: Callable[Concatenate[nn.Module, P], None], layer: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Leaves the sum of a layer's input gradient to :func:`sum_encoded`."""
    init(layer, *args, **kwargs)
    if codec_in_force("tp") is not None:
        # Otherwise the gradient of its input would be summed inside its own backward pass.
        versions.assign(layer, "allreduce_dgrad", False)


def sum_encoded(reduce: Callable[[Tensor, dist.ProcessGroup], Tensor], /, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums over tensor-parallel ranks in a codec's bytes."""
    codec = codec_in_force("tp")
    if codec is None or group.size() == 1 or not saves_bytes(codec, tensor, group.size()):
        return reduce(tensor, group)
    exchange = GroupExchange(group, codec)
    count_sum("tp", exchange.wire, tensor)
    vector = tensor.detach().float().flatten()
    total = exchange.sum([vector])
    total.advance()
    total.finish()
    # In place, as Megatron's.
    tensor.detach().copy_(vector.view(tensor.shape))
    return tensor
