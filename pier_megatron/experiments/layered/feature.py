"""Layered gradient accumulation (arXiv 2106.02679): micro-batches of a step pass a part of a model before any passes the next.

In a pipeline the parts are virtual stages (:mod:`pier_megatron.experiments.layered.breadth_first`), without one they are layers
(:mod:`pier_megatron.experiments.layered.accumulation`).
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType

from pier_megatron.experiments.layered import accumulation, breadth_first
from pier_megatron.features import Cost
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.megatron_api.seam import Seam
from pier_megatron.settings import setting
from pier_megatron.values import whole

REFUSED = (*breadth_first.REFUSED, *accumulation.REFUSED)
"""See :func:`prepare`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The setting of layered gradient accumulation."""

    layered: int | bool = setting(
        False,
        "Layered gradient accumulation (arXiv 2106.02679): all micro-batches of a step, or N at a time, pass a layer before "
        "any passes the next one; in a pipeline, all of them a virtual stage (breadth-first, arXiv 2211.05953). "
        "--overlap-grad-reduce hides more, and the ranks keep more activations. Losses equal those of the default bit for bit; "
        "with dropout micro-batches draw other random numbers. Without a pipeline, tied embeddings are added up in another "
        "order. Default: Megatron's order.",
        metavar="N",
        accepts=whole(1),
        alone=True,
    )


def is_used(args: argparse.Namespace) -> bool:
    """Whether this run was started with ``--pier-layered``."""
    return bool(getattr(args, "pier_layered", False))


def _order(args: argparse.Namespace) -> ModuleType:
    return breadth_first if args.pipeline_model_parallel_size > 1 else accumulation


def prepare(args: argparse.Namespace) -> None:
    """Refuses what is known before Megatron's own checks, whose reasons would not help.

    Raises:
        PierConfigError: With the flag, the values and a remedy.
    """
    _order(args).prepare(args)


def check(args: argparse.Namespace) -> None:
    """Refuses what cannot work, and in a pipeline sets the order of the virtual stages.

    Raises:
        PierConfigError: With the flag, the arithmetic and a remedy.
    """
    if args.pipeline_model_parallel_size > 1:
        breadth_first.check(args)


def seams() -> Sequence[Seam]:
    """What is put around Megatron's choice of a schedule."""
    return (Seam("megatron.training.training", "get_forward_backward_func", get_schedule),)


def get_schedule[**P, R](
    get_forward_backward_func: Callable[P, Callable[..., R]], /, *args: P.args, **kwargs: P.kwargs
) -> Callable[..., R]:
    """Runs Megatron's schedule in the other order."""
    schedule = get_forward_backward_func(*args, **kwargs)
    given = versions.megatron_args()
    return functools.partial(_order(given).run, schedule) if is_used(given) else schedule


def cost(args: argparse.Namespace) -> Cost:
    """Says how many activations of the largest step there are at once, as a multiple of those of Megatron's own order."""
    found: Cost = _order(args).cost(args)
    return found


def describe(args: argparse.Namespace) -> list[str]:
    """Says what the order will be and what it costs, line by line."""
    found: list[str] = _order(args).describe(args)
    return found


def warnings(args: argparse.Namespace) -> list[str]:
    """Says where the order gains nothing, one sentence each."""
    found = []
    if not args.overlap_grad_reduce:
        found.append(
            "--pier-layered without --overlap-grad-reduce: the order leaves more backward passes to hide the reduction of "
            "gradients behind, but without that flag none is hidden, and the memory for activations buys nothing. Add it."
        )
    groups = args.pier_groups if uses_pier(args) else 1
    if args.data_parallel_size * args.context_parallel_size == groups:
        found.append(
            f"--pier-layered with one model replica{' per group' if uses_pier(args) else ''}: no gradients are reduced between "
            f"replicas{' after the lazy start' if uses_pier(args) else ''}, so there is nothing to hide."
        )
    return [*found, *_order(args).warnings(args)]


def look() -> Callable[[], list[str]]:
    """Nothing to tell."""
    return list
