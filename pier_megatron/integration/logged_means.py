"""What Megatron logs in the local phase: means over all groups, exchanged only where they are logged."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pier_megatron.integration import current
from pier_megatron.integration.communication import confined_to_group, over_all_groups
from pier_megatron.megatron_api import log, versions
from pier_megatron.outer import OuterStepReport
from pier_megatron.outer.report import SCALAR_PREFIX

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer

# Where Megatron counts iterations among the sums of the losses.
_ADVANCED, _NAN = "advanced iterations", "nan iterations"


@dataclasses.dataclass(frozen=True)
class GroupLog:
    """What one group has to log.

    Attributes:
        losses: Losses of this iteration, by name.
        sums: Sums of the losses over the iterations since the last log that advanced, without this one, by name.
        advanced: Number of these iterations, without this one.
        skipped: Whether this iteration was skipped, for an overflow of the loss scaler for example.
        grad_norm: Gradient norm of this iteration; None if it was skipped before there was one.
        spread: Spread of the weights of the last participants, see ``OuterStepReport``.
    """

    losses: Mapping[str, float]
    sums: Mapping[str, float]
    advanced: int
    skipped: bool
    grad_norm: float | None
    spread: float | None = None


@dataclasses.dataclass(frozen=True)
class Means:
    """What all groups together have to log.

    Attributes:
        losses: Means over the groups that did not skip this iteration, over all groups if all did; by name.
        averages: Sums over the groups, divided by the number of iterations that advanced in any of them; by name.
        grad_norm: Mean over the groups that have one.
        spread: Root mean square of those of the groups that met others.
    """

    losses: Mapping[str, float]
    averages: Mapping[str, float]
    grad_norm: float | None
    spread: float | None = None


def means(groups: Sequence[GroupLog]) -> Means:
    """Averages over the groups, which may know different losses: one that skipped all iterations has no sums."""
    moved = [group for group in groups if not group.skipped]
    iterations = sum(group.advanced for group in groups) + len(moved)
    losses = _by_name(group.losses for group in moved or groups)
    sums = _by_name([*(group.sums for group in groups), *(group.losses for group in moved)])
    norms = [group.grad_norm for group in groups if group.grad_norm is not None]
    squares = [group.spread**2 for group in groups if group.spread is not None]
    return Means(
        losses={name: sum(found) / len(found) for name, found in losses.items()},
        averages={name: sum(found) / max(1, iterations) for name, found in sums.items()},
        grad_norm=sum(norms) / len(norms) if norms else None,
        spread=math.sqrt(sum(squares) / len(squares)) if squares else None,
    )


def _by_name(mappings: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, value in (item for mapping in mappings for item in mapping.items()):
        found.setdefault(name, []).append(value)
    return found


@current.in_pier_runs
def average_over_groups[R](training_log: Callable[..., R], optimizer: "PierOptimizer", /, *args: object, **kwargs: object) -> R:
    """Averages what Megatron logs over the groups."""
    if not optimizer.loop.is_local:
        with over_all_groups(optimizer.model_chunks[0]):
            return training_log(*args, **kwargs)
    given = inspect.signature(training_log).bind(*args, **kwargs)
    is_first = given.arguments.get("is_first_iteration", False)
    if not is_first and optimizer.loop.iteration % versions.megatron_args().log_interval:
        # Some statistics, those of experts among them, are reduced here in every iteration.
        with confined_to_group(optimizer.model_chunks[0]):
            return training_log(*args, **kwargs)
    group = _between_groups()
    if group is None:
        return training_log(*args, **kwargs)
    own = _of_own_group(given.arguments, optimizer.loop.reports.latest)
    everyone = [own] * group.size()
    # As objects: the groups need not know the same names, and a collective of another length in one of them would hang.
    dist.all_gather_object(everyone, own, group=group)
    found = means(everyone)
    _replace(given.arguments, own, found)
    if not optimizer.loop.config.has_common_anchor and found.spread is not None:
        _log_spread(found.spread, optimizer.loop.iteration)
    with over_all_groups(optimizer.model_chunks[0]):
        result = training_log(*given.args, **given.kwargs)
    if is_first:
        # Megatron goes on summing up from here.
        _restore_sums(given.arguments["total_loss_dict"], own)
    return result


def rehearse() -> None:
    """Gathers nothing between the groups, as means are gathered later: the first time connects them. Called by all ranks."""
    group = _between_groups()
    if group is not None:
        dist.all_gather_object([None] * group.size(), None, group=group)


def _between_groups() -> dist.ProcessGroup | None:
    parallel_state = versions.require("megatron.core", "parallel_state")
    found: dist.ProcessGroup | None = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    return found


def _log_spread(spread: float, iteration: int) -> None:
    """What no group sees of itself where they never meet all together."""
    log.print_last(f" spread of weights over the groups, in the outer steps before iteration {iteration:8d}: {spread:.3E}")
    writer = log.tensorboard()
    if writer is not None:
        writer.add_scalar(f"{SCALAR_PREFIX}spread of all groups", spread, iteration)


def _of_own_group(logged: Mapping[str, Any], last: OuterStepReport | None) -> GroupLog:
    sums = logged["total_loss_dict"]
    norm = logged["grad_norm"]
    return GroupLog(
        losses={name: float(value) for name, value in logged["loss_dict"].items()},
        # The counters among them are plain numbers.
        sums={name: float(value) for name, value in sums.items() if isinstance(value, torch.Tensor)},
        advanced=sums.get(_ADVANCED, 0),
        skipped=bool(logged["skipped_iter"]),
        grad_norm=None if norm is None else float(norm),
        spread=None if last is None else last.spread,
    )


def _replace(logged: dict[str, Any], own: GroupLog, everyone: Means) -> None:
    """Makes one call of ``training_log`` log the means, whatever the own group did.

    Megatron adds this iteration's losses to the sums, unless it was skipped, and divides by the number of iterations that
    advanced here. This number stays as it is, since the time per iteration comes from it too.
    """
    logged["loss_dict"] = {name: _tensor(loss) for name, loss in everyone.losses.items()}
    logged["grad_norm"] = everyone.grad_norm
    sums = logged["total_loss_dict"]
    divisor = max(1, own.advanced + (not own.skipped))
    added = {} if own.skipped else everyone.losses
    for name, average in everyone.averages.items():
        sums[name] = _tensor([average * divisor - added.get(name, 0.0)])
    if own.skipped:
        # Megatron counts a skipped iteration as nan if a loss is, and no longer sees the own ones.
        sums[_NAN] = sums.get(_NAN, 0) + _has_nan(own.losses) - _has_nan(everyone.losses)


def _restore_sums(sums: dict[str, torch.Tensor], own: GroupLog) -> None:
    for name, loss in own.losses.items():
        sums[name] = _tensor([own.sums.get(name, 0.0) + (0.0 if own.skipped else loss)])


def _has_nan(losses: Mapping[str, float]) -> bool:
    return not all(math.isfinite(loss) for loss in losses.values())


def _tensor(value: float | list[float]) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=torch.cuda.current_device())
