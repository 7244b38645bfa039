"""Error of each codec on what the current training sends; with it a user chooses the codec of a dimension.

The error is relative to each number. A root mean square over a tensor would hide what an outlier does: it makes the scale of
its block so large that its neighbours become zero, and they hardly count against its own size.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, Codec
from pier_megatron.exchange.coding import decode, encode
from pier_megatron.experiments.compression.policy import DIMENSIONS
from pier_megatron.megatron_api import run, versions

BOUND = 0.1
"""Largest mean error of a codec that is proposed."""

# Numbers encoded at once, so that the temporary tensors stay small.
_AT_ONCE = 2**15 * BLOCK


@dataclasses.dataclass
class _Measurement:
    """What is measured of the iteration under way.

    Attributes:
        codecs: Codecs that are tried, by dimension.
        is_due: Whether an iteration is under way that will be logged.
        errors: Sum of the errors and number of numbers, by dimension and name of the codec; float64 of shape ``[2]``.
    """

    codecs: Mapping[str, Sequence[Codec]] = dataclasses.field(default_factory=dict)
    is_due: bool = False
    errors: dict[tuple[str, str], Tensor] = dataclasses.field(default_factory=dict)


def try_codecs(codecs: Mapping[str, Sequence[Codec]]) -> None:
    """Measures these codecs, by dimension, from now on."""
    run.part(_Measurement).codecs = codecs


def tried() -> set[Codec]:
    """The codecs that are tried in any dimension."""
    return {codec for codecs in run.part(_Measurement).codecs.values() for codec in codecs}


def step[**P, R](train_step: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Measures what travels in a training step that will be logged."""
    measurement = run.part(_Measurement)
    if not measurement.codecs:
        return train_step(*args, **kwargs)
    iteration = versions.given(train_step, args, kwargs)["iteration"] + 1
    measurement.errors.clear()
    measurement.is_due = iteration % versions.megatron_args().log_interval == 0
    try:
        return train_step(*args, **kwargs)
    finally:
        measurement.is_due = False


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
    for part in (part for row in rows for part in row.split(max(_AT_ONCE // len(row) // BLOCK, 1) * BLOCK, dim=1)):
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
    count = errors.isfinite().sum(dtype=torch.float64)
    return torch.stack([errors.nan_to_num_(0.0, 0.0, 0.0).sum(dtype=torch.float64), count])


def means() -> dict[str, dict[str, float]]:
    """Mean errors of the last iteration over the ranks of a model replica, which all call it, by dimension and codec."""
    measurement = run.part(_Measurement)
    keys = [(dimension, codec.name) for dimension, codecs in measurement.codecs.items() for codec in codecs]
    if not keys:
        return {}
    nothing = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    sums = torch.stack([measurement.errors.get(key, nothing) for key in keys])
    dist.all_reduce(sums, group=versions.require("megatron.core.parallel_state", "get_model_parallel_group")())
    found: dict[str, dict[str, float]] = {}
    for (dimension, codec), (total, count) in zip(keys, sums.tolist(), strict=True):
        if count:
            found.setdefault(dimension, {})[codec] = total / count
    return found


def table(found: Mapping[str, Mapping[str, float]], outer: Codec | None) -> list[str]:
    """Lists mean errors, and the fewest bits that keep them small.

    Args:
        found: Mean errors by dimension and codec, from the most bits on.
        outer: Codec between groups that the policy has chosen, which a proposal keeps; None if it has not.
    """
    lines = [
        f" mean error of a number in {dimension} ({DIMENSIONS[dimension]}): "
        + ", ".join(f"{codec} {mean:.2%}" for codec, mean in codecs.items())
        for dimension, codecs in found.items()
    ]
    within = {dimension: [codec for codec, mean in codecs.items() if mean <= BOUND] for dimension, codecs in found.items()}
    proposed = [f"{dimension}={codecs[-1]}" for dimension, codecs in within.items() if codecs]
    if proposed and outer is not None:
        proposed.append(f"outer={outer.name}")
    none = [f"none for {dimension}" for dimension, codecs in within.items() if not codecs]
    told = "; ".join([f"--pier-compress {','.join(proposed)}"] * bool(proposed) + none)
    return [*lines, f" fewest bits within {BOUND:.0%}: {told}"] if told else []
