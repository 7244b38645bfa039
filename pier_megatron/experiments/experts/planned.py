"""A plan of an ensemble as it is stored: what ``pier-megatron experts plan`` writes and its other subcommands read."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts.budget import cost_of_seeds
from pier_megatron.megatron_api.tracker import tracker_of

PLAN = "plan.json"


@dataclasses.dataclass(frozen=True)
class Expert:
    """One job.

    Attributes:
        name: Variant and expert, such as ``MHe-IHo/code``; also its folder below the plan's.
        domains: Names of what it is trained on.
        size: Name of its size.
        iterations: Iterations of its training.
        operations: Operations of its training, by Megatron's own count.
        memory: Predicted memory of a rank, in bytes.
        hours: Predicted; None without a cluster.
    """

    name: str
    domains: tuple[str, ...]
    size: str
    iterations: int
    operations: float
    memory: float
    hours: float | None

    @property
    def variant(self) -> str:
        """Name of the variant that it belongs to."""
        return self.name.partition("/")[0]


@dataclasses.dataclass(frozen=True)
class Model:
    """What is needed to score models of one size.

    Attributes:
        arguments: Megatron's, without data, schedule and checkpoints.
        seed: Folder of the seed model's checkpoints, or None.
        ranks: Tensor- and pipeline-parallel ranks together: those that hold the model once.
        micro_batch: Sequences that are scored at once.
    """

    arguments: tuple[str, ...]
    seed: str | None
    ranks: int
    micro_batch: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """An ensemble that is ready to be trained.

    Attributes:
        folder: Folder of all its files.
        script: Training script.
        device: ``cuda`` or ``cpu``.
        gpus_per_node: Ranks that this node takes; on the CPU, processes.
        homogeneous: Name of the size of all experts where sizes do not differ.
        domains: Path prefixes of what is scored, by domain: those that are trained on first.
        trained: Names of the domains that are trained on.
        models: Models by the name of the size.
        experts: All jobs.
        seeds: Operations of the seed models' trainings, by the name of the size; a size is missing where they are unknown.
    """

    folder: Path
    script: str
    device: str
    gpus_per_node: int
    homogeneous: str
    domains: Mapping[str, str]
    trained: tuple[str, ...]
    models: Mapping[str, Model]
    experts: tuple[Expert, ...]
    # What has been trained does not hang on them.
    seeds: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, folder: Path, remedy: str | None = None) -> "Plan":
        """Reads a plan; ``remedy`` says what to do if that fails, by default to write one.

        Raises:
            PierConfigError: If there is none, or it is damaged.
        """
        file = folder / PLAN
        remedy = remedy or f"Write one: pier-megatron experts plan FILE --output {folder}"
        if not file.is_file():
            raise PierConfigError(f"{folder}: no {PLAN} in it. {remedy}")
        try:
            stored = json.loads(file.read_text())
            stored["models"] = {name: Model(**_tuples(model)) for name, model in stored["models"].items()}
            stored["experts"] = tuple(Expert(**_tuples(expert)) for expert in stored["experts"])
            return cls(folder=folder.resolve(), **_tuples(stored))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PierConfigError(f"{file}: no plan that this release wrote ({error}). {remedy}") from error

    def write(self) -> None:
        """Writes the plan."""
        stored = dataclasses.asdict(self)
        del stored["folder"]
        (self.folder / PLAN).write_text(json.dumps(stored, indent=1))

    @property
    def by_variant(self) -> dict[str, list[Expert]]:
        """The jobs of each variant, in order."""
        found: dict[str, list[Expert]] = {}
        for expert in self.experts:
            found.setdefault(expert.variant, []).append(expert)
        return found

    def operations(self, variant: str) -> tuple[float, float | None]:
        """Operations of a variant's experts, and of the seed models that they begin from; None where those are unknown."""
        members = self.by_variant[variant]
        sizes = {expert.size for expert in members}
        of_seeds = cost_of_seeds(self.seeds, sizes) if sizes <= self.seeds.keys() else None
        return math.fsum(expert.operations for expert in members), of_seeds

    def checkpoints(self, name: str) -> Path:
        """Folder of an expert's checkpoints."""
        return self.folder / name / "checkpoints"

    def untrained(self) -> list[Expert]:
        """Experts that are not trained to the end."""
        return [expert for expert in self.experts if iteration_of(self.checkpoints(expert.name)) < expert.iterations]


def iteration_of(checkpoints: Path) -> int:
    """Iteration of the last checkpoint in a folder, 0 if there is none."""
    tracker = tracker_of(checkpoints)
    return int(tracker.read_text()) if tracker.exists() else 0


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
