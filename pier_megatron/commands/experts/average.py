"""The cheap alternative to an ensemble of equal experts: one model, the mean of their weights."""

from collections.abc import Iterable
from pathlib import Path

from pier_megatron.commands.experts.description import DENSE
from pier_megatron.commands.experts.plan import Plan

_FOLDER = "average"


def variants(plan: Plan) -> list[str]:
    """Variants whose experts are all of one size, and several."""
    found = []
    for variant in dict.fromkeys(expert.variant for expert in plan.experts):
        sizes = [expert.size for expert in plan.experts if expert.variant == variant]
        if variant != DENSE and len(sizes) > 1 and set(sizes) == {plan.homogeneous}:
            found.append(variant)
    return found


def name_of(variant: str) -> str:
    """Name of the average of a variant's experts."""
    return f"{_FOLDER}/{variant}"


def folder_of(plan: Plan, variant: str) -> Path:
    """Folder of its checkpoint."""
    return plan.checkpoints(name_of(variant))


def write_all(plan: Plan) -> None:
    """Writes the averages that are missing, as checkpoints of Megatron's."""
    for variant in variants(plan):
        experts = [plan.checkpoints(expert.name) for expert in plan.experts if expert.variant == variant]
        if not _is_newer(folder_of(plan, variant), experts):
            from pier_megatron.integration.checkpoint.averaging import write_mean

            write_mean(experts, folder_of(plan, variant))


def _is_newer(folder: Path, than: Iterable[Path]) -> bool:
    def written(checkpoints: Path) -> float:
        tracker = checkpoints / "latest_checkpointed_iteration.txt"
        return tracker.stat().st_mtime if tracker.exists() else 0.0

    return written(folder) > max(map(written, than))
