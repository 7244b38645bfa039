"""Which codecs are in force in the training under way, and the bytes that this rank has sent with them."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.coding import compile_for
from pier_megatron.exchange.wire import Wire
from pier_megatron.experiments.compression.policy import DIMENSIONS
from pier_megatron.megatron_api import log as megatron_log
from pier_megatron.megatron_api import run, versions


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What this rank has sent until some moment, by dimension.

    Attributes:
        sent: Bytes on the wire.
        uncompressed: What they would have been.
    """

    sent: Counter[str] = dataclasses.field(default_factory=Counter)
    uncompressed: Counter[str] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass
class Traffic:
    """Codecs and bytes of the training under way.

    Attributes:
        codecs: Codecs in force, by dimension; the others are not compressed.
        bytes: What has been counted.
        logged: Iteration of the last log, and what had been counted then.
    """

    codecs: Mapping[str, Codec] = dataclasses.field(default_factory=dict)
    bytes: Bytes = dataclasses.field(default_factory=Bytes)
    logged: tuple[int | None, Bytes] = dataclasses.field(default_factory=lambda: (None, Bytes()))


def put_in_force(codecs: Mapping[str, Codec]) -> None:
    """Compresses with these codecs, by dimension, from now on."""
    run.part(Traffic).codecs = dict(codecs)


def compile_codecs[**P, R](get_megatron_optimizer: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Compiles the codecs before the first iteration."""
    optimizer = get_megatron_optimizer(*args, **kwargs)
    for codec in set(run.part(Traffic).codecs.values()):
        compile_for(codec, torch.device(torch.cuda.current_device()))
    return optimizer


def codec_in_force(dimension: str) -> Codec | None:
    """The codec of a dimension; None if it is not compressed."""
    return run.part(Traffic).codecs.get(dimension)


def count(dimension: str, sent: float, uncompressed: float) -> None:
    """Counts what this rank sends, in bytes, and what it would have sent otherwise."""
    counted = run.part(Traffic).bytes
    counted.sent[dimension] += round(sent)
    counted.uncompressed[dimension] += round(uncompressed)


def count_sum(dimension: str, wire: Wire, tensor: Tensor) -> None:
    """Counts what this rank sends for a sum of tensors like this one over all ranks, by the cost model of a ring."""
    count(dimension, wire.bytes_of_sum(tensor.numel()), 2 * (wire.groups - 1) / wire.groups * tensor.nbytes)


def counted() -> Bytes:
    """What has been counted until now."""
    so_far = run.part(Traffic).bytes
    return Bytes(so_far.sent.copy(), so_far.uncompressed.copy())


def table(since: Bytes, iterations: int = 1) -> list[str]:
    """Lists what this rank has sent since then, by dimension: a mean over ``iterations``."""
    traffic = run.part(Traffic)
    sent, uncompressed = traffic.bytes.sent - since.sent, traffic.bytes.uncompressed - since.uncompressed
    return [
        f"{dimension} ({DIMENSIONS[dimension]}): {nbytes / iterations / 1e6:,.3f} MB in {traffic.codecs[dimension].name}, "
        f"{uncompressed[dimension] / iterations / 1e6:,.3f} MB without"
        for dimension, nbytes in sent.items()
    ]


def look() -> Callable[[], list[str]]:
    """See :meth:`pier_megatron.features.Feature.look`."""
    before = counted()
    return lambda: [f"compressed, {line}" for line in table(before)]


def log[**P, R](training_log: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Adds the bytes that this rank has sent to Megatron's log."""
    result = training_log(*args, **kwargs)
    traffic = run.part(Traffic)
    if not traffic.codecs:
        return result
    iteration = versions.given(training_log, args, kwargs)["iteration"]
    if iteration % versions.megatron_args().log_interval:
        return result
    last, before = traffic.logged
    # A run may have begun anywhere; until its first log it has taken the iterations that Megatron's loop remembers.
    iterations = iteration - (versions.megatron_args().iteration if last is None else last)
    for line in table(before, iterations):
        megatron_log.print_last(f" sent by this rank per iteration, {line}")
    if (writer := megatron_log.tensorboard()) is not None:
        for dimension, sent in (traffic.bytes.sent - before.sent).items():
            writer.add_scalar(f"compressed/{dimension} bytes sent", sent / iterations, iteration)
    traffic.logged = (iteration, counted())
    return result
