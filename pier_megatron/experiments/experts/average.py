"""The cheap alternative to an ensemble of equal experts: one model, the mean of their weights."""

from collections.abc import Iterable
from pathlib import Path

from pier_megatron.experiments.experts.ensemble import DENSE
from pier_megatron.experiments.experts.planned import Plan
from pier_megatron.megatron_api.tracker import tracker_of

_FOLDER = "average"


def variants(plan: Plan) -> list[str]:
    """Variants whose experts are all of one size, and several."""
    return [
        variant
        for variant, members in plan.by_variant.items()
        if variant != DENSE and len(members) > 1 and {expert.size for expert in members} == {plan.homogeneous}
    ]


def name_of(variant: str) -> str:
    """Name of the average of a variant's experts."""
    return f"{_FOLDER}/{variant}"


def folder_of(plan: Plan, variant: str) -> Path:
    """Folder of its checkpoint."""
    return plan.checkpoints(name_of(variant))


def write_all(plan: Plan) -> None:
    """Writes the averages that are missing, as checkpoints of Megatron's."""
    for variant in variants(plan):
        experts = [plan.checkpoints(expert.name) for expert in plan.by_variant[variant]]
        if not _is_newer(folder_of(plan, variant), experts):
            from pier_megatron.experiments.experts.mean_weights import write_mean

            write_mean(experts, folder_of(plan, variant))


def _is_newer(folder: Path, than: Iterable[Path]) -> bool:
    def written(checkpoints: Path) -> float:
        tracker = tracker_of(checkpoints)
        return tracker.stat().st_mtime if tracker.exists() else 0.0

    return written(folder) > max(map(written, than))
