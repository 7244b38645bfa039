"""Which codecs are in force in the training under way, and the bytes that this rank has sent with them."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.policy import DIMENSIONS
from pier_megatron.integration import versions

_TRAINING = "megatron.training.training"

_codecs: dict[str, Codec] = {}
_sent: collections.Counter[str] = collections.Counter()
_uncompressed: collections.Counter[str] = collections.Counter()
_first: int | None = None


def install() -> None:
    """Adds the bytes to what Megatron logs."""
    versions.wrap(_TRAINING, "training_log", _log)


def put_in_force(codecs: Mapping[str, Codec]) -> None:
    """Begins a training with these codecs, by dimension; the others are not compressed."""
    _codecs.clear()
    _codecs.update(codecs)
    forget()


def forget() -> None:
    """Begins to count anew."""
    global _first
    _sent.clear()
    _uncompressed.clear()
    _first = None


def codec_in_force(dimension: str) -> Codec | None:
    """The codec of a dimension; None if it is not compressed."""
    return _codecs.get(dimension)


def count(dimension: str, sent: float, uncompressed: float) -> None:
    """Counts what this rank sends, in bytes, and what it would have sent otherwise."""
    _sent[dimension] += round(sent)
    _uncompressed[dimension] += round(uncompressed)


def table(iterations: int = 1) -> list[str]:
    """Lists what this rank has sent since counting began, by dimension: a mean over so many iterations."""
    return [
        f"{dimension} ({DIMENSIONS[dimension][0]}): {sent / iterations / 1e6:,.3f} MB in {_codecs[dimension].name}, "
        f"{_uncompressed[dimension] / iterations / 1e6:,.3f} MB without"
        for dimension, sent in _sent.items()
    ]


def _log(training_log: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    global _first
    result = training_log(*args, **kwargs)
    iteration = versions.given(training_log, args, kwargs)["iteration"]
    _first = iteration if _first is None else _first
    if not _sent or iteration % versions.megatron_args().log_interval:
        return result
    iterations = iteration - _first + 1
    print_last = versions.require("megatron.training.utils", "print_rank_last")
    writer = versions.require("megatron.training.global_vars", "get_tensorboard_writer")()
    for line in table(iterations):
        print_last(f" sent by this rank per iteration, {line}")
    for dimension in _sent if writer is not None else ():
        writer.add_scalar(f"compressed/{dimension} bytes sent", _sent[dimension] / iterations, iteration)
        writer.add_scalar(f"compressed/{dimension} bytes without", _uncompressed[dimension] / iterations, iteration)
    forget()
    return result
