"""What Megatron's evaluation looks at in the local phase, and what it says where groups never agree."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.integration import current
from pier_megatron.integration.communication import confined_to_group
from pier_megatron.megatron_api import log, versions
from pier_megatron.outer.report import SCALAR_PREFIX

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer

# What Megatron's evaluation returns: losses by name, None if its time was up, and what else there is.
_Evaluated = tuple[dict[str, torch.Tensor] | None, *tuple[object, ...]]


@current.in_pier_runs
def look_at_what_groups_agree_on[**P, R](
    evaluate: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Shows the anchor to evaluation where the groups hold different parameters by design."""
    loop = optimizer.loop
    with contextlib.nullcontext() if loop.is_synchronised else loop.anchor_in_model(as_mean=loop.config.evaluate_mean):
        return evaluate(*args, **kwargs)


@current.in_pier_runs
def evaluate_each[**P](
    evaluate: Callable[P, _Evaluated], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> _Evaluated:
    """Where each group evaluates weights of its own, on its share of the samples, says how far apart they are."""
    loop = optimizer.loop
    if not loop.is_local or loop.config.has_common_anchor or loop.config.evaluate_mean or loop.is_synchronised:
        return evaluate(*args, **kwargs)
    with confined_to_group(optimizer.model_chunks[0]):
        losses, *others = evaluate(*args, **kwargs)
    parallel_state = versions.require("megatron.core", "parallel_state")
    group = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    if losses is None or group is None:
        # The job's time ran out during the evaluation, or there is one group.
        return losses, *others
    of_groups: list[dict[str, float]] = [{}] * group.size()
    dist.all_gather_object(of_groups, {name: float(loss) for name, loss in losses.items()}, group=group)
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
