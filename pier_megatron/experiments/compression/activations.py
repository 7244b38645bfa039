"""Activations and their gradients between pipeline stages, in a codec's bytes: in every schedule, whatever their shapes."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pier_megatron.exchange.codecs import Codec, padded
from pier_megatron.exchange.coding import decode, encode
from pier_megatron.exchange.encoded import saves_bytes
from pier_megatron.experiments.compression.buckets import Handle
from pier_megatron.experiments.compression.traffic import codec_in_force, count


def transfer(start: Callable[..., dict[str, Handle] | list[Handle]], /, **given: object) -> dict[str, Handle] | list[Handle]:
    """Sends activations between stages in a codec's bytes."""
    codec = codec_in_force("pp")
    if codec is None:
        return start(**given)
    tensors = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor) and saves_bytes(codec, tensor)}
    payloads = {}
    for name, tensor in tensors.items():
        if "_send_" in name:
            payloads[name] = pack(tensor, codec)
            count("pp", payloads[name].nbytes, tensor.nbytes)
        else:
            payloads[name] = tensor.new_empty(1, codec.nbytes(padded(tensor.numel())), dtype=torch.uint8)
    requests = start(**given | payloads)
    arrivals = {name: _Arrival(codec, payloads[name], tensor) for name, tensor in tensors.items() if "_recv_" in name}
    if isinstance(requests, dict):
        for name, arrival in arrivals.items():
            request = name.removeprefix("tensor_")
            requests[request] = arrival.after(requests[request])
        return requests
    # Megatron waits for the requests in order; a batch may return one request for all transfers.
    return [*requests, *arrivals.values()]


def transfer_along_route(send: Callable[..., object], start: Callable[..., dict[str, Handle]], /, **given: object) -> object:
    """Sends activations past skipped stages in a codec's bytes."""
    return send(functools.partial(transfer, start), **given)


def pack(tensor: Tensor, codec: Codec) -> Tensor:
    """Encodes a tensor of any shape and floating-point type, filled up with zeros to whole blocks; uint8, ``[1, bytes]``."""
    row = tensor.detach().reshape(1, -1).float()
    missing = padded(row.numel()) - row.numel()
    return encode(codec, torch.nn.functional.pad(row, (0, missing)) if missing else row)


def unpack(payload: Tensor, codec: Codec, into: Tensor) -> None:
    """Decodes what :func:`pack` has made of a tensor of that shape, in place."""
    with torch.no_grad():
        into.copy_(decode(codec, payload)[0, : into.numel()].view(into.shape))


class _Arrival:
    """What Megatron waits for before it uses a tensor that it receives."""

    def __init__(self, codec: Codec, payload: Tensor, tensor: Tensor) -> None:
        self._codec, self._payload, self._tensor = codec, payload, tensor
        self._request: Handle | None = None

    def after(self, request: Handle) -> "_Arrival":
        """Makes :meth:`wait` wait for ``request`` first; returns itself."""
        self._request = request
        return self

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
        unpack(self._payload, self._codec, self._tensor)
