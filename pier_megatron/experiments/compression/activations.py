"""Activations and their gradients between pipeline stages, in a codec's bytes: in every schedule, whatever their shapes."""

import functools
from collections.abc import Callable

from torch import Tensor

from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.encoded import pack, payload_like, saves_bytes, unpack
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
            payloads[name] = payload_like(tensor, codec)
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
