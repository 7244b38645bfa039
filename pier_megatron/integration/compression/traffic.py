"""Which codecs are in force in the training under way, and the bytes that this rank has sent with them."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.collectives import Wire
from pier_megatron.exchange.policy import DIMENSIONS
from pier_megatron.integration import versions

_codecs: dict[str, Codec] = {}


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What this rank has sent until some moment, by dimension.

    Attributes:
        sent: Bytes on the wire.
        uncompressed: What they would have been.
    """

    sent: Counter[str] = dataclasses.field(default_factory=Counter)
    uncompressed: Counter[str] = dataclasses.field(default_factory=Counter)


_bytes = Bytes()
_logged: tuple[int | None, Bytes] = (None, Bytes())


def put_in_force(codecs: Mapping[str, Codec]) -> None:
    """Begins a training with these codecs, by dimension; the others are not compressed."""
    global _bytes, _logged
    _codecs.clear()
    _codecs.update(codecs)
    _bytes, _logged = Bytes(), (None, Bytes())


def codec_in_force(dimension: str) -> Codec | None:
    """The codec of a dimension; None if it is not compressed."""
    return _codecs.get(dimension)


def count(dimension: str, sent: float, uncompressed: float) -> None:
    """Counts what this rank sends, in bytes, and what it would have sent otherwise."""
    _bytes.sent[dimension] += round(sent)
    _bytes.uncompressed[dimension] += round(uncompressed)


def count_sum(dimension: str, wire: Wire, tensor: Tensor) -> None:
    """Counts what this rank sends for a sum of tensors like this one over all ranks, by the cost model of a ring."""
    count(dimension, wire.bytes_of_sum(tensor.numel()), 2 * (wire.groups - 1) / wire.groups * tensor.nbytes)


def counted() -> Bytes:
    """What has been counted until now."""
    return Bytes(_bytes.sent.copy(), _bytes.uncompressed.copy())


def table(since: Bytes, iterations: int = 1) -> list[str]:
    """Lists what this rank has sent since then, by dimension: a mean over so many iterations."""
    sent, uncompressed = _bytes.sent - since.sent, _bytes.uncompressed - since.uncompressed
    return [
        f"{dimension} ({DIMENSIONS[dimension]}): {sent[dimension] / iterations / 1e6:,.3f} MB in {_codecs[dimension].name}, "
        f"{uncompressed[dimension] / iterations / 1e6:,.3f} MB without"
        for dimension in sent
    ]


def log(training_log: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Adds the bytes that this rank has sent to Megatron's log."""
    global _logged
    result = training_log(*args, **kwargs)
    if not _codecs:
        return result
    iteration = versions.given(training_log, args, kwargs)["iteration"]
    if iteration % versions.megatron_args().log_interval:
        return result
    last, before = _logged
    # A run may have begun anywhere; until its first log it has taken the iterations that Megatron's loop remembers.
    iterations = iteration - (versions.megatron_args().iteration if last is None else last)
    writer = versions.require("megatron.training.global_vars", "get_tensorboard_writer")()
    for line in table(before, iterations):
        versions.require("megatron.training.utils", "print_rank_last")(f" sent by this rank per iteration, {line}")
    for dimension, sent in (_bytes.sent - before.sent).items() if writer is not None else ():
        writer.add_scalar(f"compressed/{dimension} bytes sent", sent / iterations, iteration)
    _logged = (iteration, counted())
    return result
