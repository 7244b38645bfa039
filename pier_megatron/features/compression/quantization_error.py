"""How far each codec is from what travels in the training under way: what the codec of a dimension is chosen by.

The error is that of a number, beside its own size. Root mean squares of whole tensors hide what an outlier does: it makes the
scale of its block so large that its neighbours become zero, and its own size hides them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, Codec
from pier_megatron.exchange.coding import decode, encode
from pier_megatron.features.compression.policy import DIMENSIONS
from pier_megatron.megatron_api import run, versions

BOUND = 0.1
"""Largest mean error of a codec that is proposed."""

# Numbers of a row that are looked at at once, so that what is made of them takes little memory.
_AT_ONCE = 2**15 * BLOCK


@dataclasses.dataclass
class _Measurement:
    """What is measured of the iteration under way.

    Attributes:
        codecs: Codecs that are tried, by dimension.
        is_due: Whether this iteration will be logged, or is the first one, in which kernels are compiled.
        errors: Sum of the errors and number of numbers, by dimension and name of the codec; float64 of shape ``[2]``.
    """

    codecs: Mapping[str, Sequence[Codec]] = dataclasses.field(default_factory=dict)
    is_due: bool = True
    errors: dict[tuple[str, str], Tensor] = dataclasses.field(default_factory=dict)


def try_codecs(codecs: Mapping[str, Sequence[Codec]]) -> None:
    """Measures these codecs, by dimension, from now on."""
    run.part(_Measurement).codecs = codecs


def is_due(dimension: str) -> bool:
    """Whether what travels in a dimension is measured now."""
    measurement = run.part(_Measurement)
    return measurement.is_due and dimension in measurement.codecs


@torch.no_grad()
def measure(dimension: str, rows: Iterable[Tensor]) -> None:
    """Adds what travels in a dimension to the errors of this iteration, where :func:`is_due`.

    Args:
        dimension: Parallel dimension.
        rows: What travels; float32 of shape ``[m, n]``, each n a multiple of :data:`BLOCK`.
    """
    measurement = run.part(_Measurement)
    for part in (part for row in rows for part in row.split(_AT_ONCE, dim=1)):
        for codec in measurement.codecs[dimension]:
            found = error(codec, part)
            key = (dimension, codec.name)
            measurement.errors[key] = measurement.errors[key] + found if key in measurement.errors else found


def error(codec: Codec, rows: Tensor) -> Tensor:
    """Errors of a codec, each as a share of the size of the number.

    Args:
        codec: Codec.
        rows: float32 of shape ``[m, n]``, n a multiple of :data:`BLOCK`. Zeros, and blocks with a number that is not finite, do
            not count.

    Returns:
        Sum of the errors and number of numbers, float64 of shape ``[2]``.
    """
    errors = decode(codec, encode(codec, rows)).sub_(rows).div_(rows).abs_()
    is_known = errors.isfinite()
    return torch.stack([errors.where(is_known, 0.0).sum(dtype=torch.float64), is_known.sum(dtype=torch.float64)])


def log[**P, R](training_log: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Adds the errors of the iteration that is logged to Megatron's log, means over the ranks of one model replica."""
    result = training_log(*args, **kwargs)
    measurement = run.part(_Measurement)
    iteration, interval = versions.given(training_log, args, kwargs)["iteration"], versions.megatron_args().log_interval
    if measurement.codecs and iteration % interval == 0:
        means = _means(measurement)
        for line in table(means):
            versions.require("megatron.training.utils", "print_rank_last")(line)
        writer = versions.require("megatron.training.global_vars", "get_tensorboard_writer")()
        for dimension, codecs in means.items() if writer is not None else ():
            for codec, mean in codecs.items():
                writer.add_scalar(f"compressed/{dimension} error of {codec}", mean, iteration)
    measurement.is_due = (iteration + 1) % interval == 0
    measurement.errors.clear()
    return result


def _means(measurement: _Measurement) -> dict[str, dict[str, float]]:
    """Mean errors by dimension and codec, of what travelled in this iteration."""
    keys = [(dimension, codec.name) for dimension, codecs in measurement.codecs.items() for codec in codecs]
    nothing = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    sums = torch.stack([measurement.errors.get(key, nothing) for key in keys])
    dist.all_reduce(sums, group=versions.require("megatron.core.parallel_state", "get_model_parallel_group")())
    means: dict[str, dict[str, float]] = {}
    for (dimension, codec), (total, count) in zip(keys, sums.tolist(), strict=True):
        if count:
            means.setdefault(dimension, {})[codec] = total / count
    return means


def table(means: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lists mean errors, by dimension and codec from the most bits on, and the fewest bits that keep them small."""
    lines = [
        f" mean error of a number in {dimension} ({DIMENSIONS[dimension]}): "
        + ", ".join(f"{codec} {mean:.2%}" for codec, mean in codecs.items())
        for dimension, codecs in means.items()
    ]
    within = {dimension: [codec for codec, mean in codecs.items() if mean <= BOUND] for dimension, codecs in means.items()}
    proposal = ",".join(f"{dimension}={codecs[-1]}" for dimension, codecs in within.items() if codecs)
    if proposal:
        lines.append(f" fewest bits within {BOUND:.0%}: --pier-compress {proposal}")
    return lines
