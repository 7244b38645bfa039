"""What Megatron's evaluation looks at in the local phase, and what it says where groups never agree."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.integration import current
from pier_megatron.megatron_api import log, versions
from pier_megatron.outer import OuterLoop
from pier_megatron.outer.report import SCALAR_PREFIX

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer

Evaluated = tuple[dict[str, torch.Tensor] | None, *tuple[object, ...]]
"""What Megatron's evaluation returns: losses by name, None if its time was up, and what else there is."""


def evaluates_together(loop: OuterLoop) -> bool:
    """Whether all groups evaluate the same weights."""
    return not loop.is_local or loop.config.has_common_anchor or loop.config.evaluate_mean or loop.is_synchronised


@current.in_pier_runs
def evaluate_each[**P](
    evaluate: Callable[P, Evaluated], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> Evaluated:
    """Evaluates what the groups agree on, over all groups of the launch.

    That is the anchor, where the groups hold different parameters by design. Where each has an anchor of its own, the log says
    how far apart their losses are.
    """
    loop = optimizer.loop
    shown = contextlib.nullcontext() if loop.is_synchronised else loop.anchor_in_model(as_mean=loop.config.evaluate_mean)
    # Groups would disagree on whether the time is up. They ask each other after the iteration.
    with shown, versions.with_megatron_args({"exit_duration_in_mins": None} if loop.exchange.size > 1 else {}):
        if evaluates_together(loop):
            with optimizer.together():
                return evaluate(*args, **kwargs)
        losses, *others = evaluate(*args, **kwargs)
    if losses is None or loop.exchange.size == 1:
        return losses, *others
    of_groups: list[dict[str, float]] = [{}] * loop.exchange.size
    dist.all_gather_object(of_groups, {name: float(loss) for name, loss in losses.items()}, group=loop.exchange.process_group)
    _say_spread(of_groups, loop.iteration)
    device = torch.cuda.current_device()
    means = {name: sum(of_group[name] for of_group in of_groups) / len(of_groups) for name in losses}
    return {name: torch.tensor(mean, dtype=torch.float32, device=device) for name, mean in means.items()}, *others


def _say_spread(of_groups: Sequence[Mapping[str, float]], iteration: int) -> None:
    writer = log.tensorboard()
    for name in of_groups[0]:
        losses = [of_group[name] for of_group in of_groups]
        log.print_last(
            f" each group's slow weights on its share of the samples: {name} from {min(losses):.6E} to {max(losses):.6E}; what "
            "follows is the mean"
        )
        if writer is not None:
            writer.add_scalar(f"{SCALAR_PREFIX}{name} validation, largest less smallest", max(losses) - min(losses), iteration)
