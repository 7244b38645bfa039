"""``pier-megatron experts score``: the log-likelihood of every token under every model, through Megatron's own evaluation."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pier_megatron.commands.megatron_log import VALIDATION
from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts import average
from pier_megatron.experiments.experts.jobs import ExpertJob, gpu_environment, run_all
from pier_megatron.experiments.experts.planned import Plan, torchrun
from pier_megatron.experiments.experts.scoring_arguments import scoring_arguments
from pier_megatron.experiments.experts.train import untrained
from pier_megatron.megatron_api.tracker import tracker_of

# Largest difference, relative, between the mean of an array and the loss that Megatron prints: of sums in another order.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Scored:
    """What is scored.

    Attributes:
        name: An expert's, ``seed/SIZE``, or ``average/VARIANT``; also the folder of its scores below the plan's.
        checkpoints: Folder of its checkpoints.
        size: Name of its size.
    """

    name: str
    checkpoints: Path
    size: str


def run(options: argparse.Namespace) -> int:
    """Scores what is not scored yet; returns the exit status."""
    plan = Plan.read(options.folder)
    missing_experts = ", ".join(expert.name for expert in untrained(plan))
    if missing_experts:
        raise PierConfigError(f"{missing_experts}: not trained to the end. Run: pier-megatron experts train {plan.folder}")
    average.write_all(plan)
    models = scored_models(plan)
    missing = [model for model in models if not _is_scored(plan, model)]
    print(f"{len(models) - len(missing)} of {len(models)} models are scored on {', '.join(plan.domains)}", flush=True)
    failed = run_all([_job(plan, model, devices) for model, devices in zip(missing, _places(plan, missing), strict=True)])
    refused = []
    for model in missing:
        if model.name not in [job.name for job in failed]:
            try:
                accept(plan, model)
            except PierConfigError as error:
                refused.append(str(error))
    if refused:
        raise PierConfigError("\n".join(refused))
    return 1 if failed else 0


def scored_models(plan: Plan) -> list[Scored]:
    """All that is scored: the seed model of the homogeneous size, the experts, averages of equal experts."""
    size = plan.homogeneous
    models = []
    seed = plan.models[size].seed
    if seed is not None:
        models.append(Scored(f"seed/{size}", Path(seed), size))
    models += [Scored(expert.name, plan.checkpoints(expert.name), expert.size) for expert in plan.experts]
    for variant in average.variants(plan):
        models.append(Scored(average.name_of(variant), average.folder_of(plan, variant), size))
    return models


def scores_file(plan: Plan, name: str, domain: str) -> Path:
    """Where the scores of a model on a domain are."""
    return plan.folder / name / "scores" / f"{domain}.npz"


def _unchecked(file: Path) -> Path:
    """Where a job writes scores that become ``file`` once they are checked."""
    return file.parent / "unchecked" / file.name


def read_scores(plan: Plan, name: str, domain: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Log-likelihoods in nats and the tokens that they are of, both ``[sequences, tokens]``.

    Raises:
        PierConfigError: If they are not there.
    """
    path = scores_file(plan, name, domain)
    if not path.exists():
        raise PierConfigError(f"{path}: no such file. Run: pier-megatron experts score {plan.folder}")
    return _read(path)


def _read(path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    from pier_megatron.experiments.experts.scoring import LABELS, LOSSES

    with np.load(path) as stored:
        return -stored[LOSSES].astype(np.float64), stored[LABELS]


def _is_scored(plan: Plan, model: Scored) -> bool:
    tracker = tracker_of(model.checkpoints)
    if not tracker.exists():
        raise PierConfigError(f"{model.name}: no checkpoint in {model.checkpoints} ({tracker.name} does not exist).")
    files = [scores_file(plan, model.name, domain) for domain in plan.domains]
    return all(file.exists() and file.stat().st_mtime > tracker.stat().st_mtime for file in files)


def _places(plan: Plan, models: Sequence[Scored]) -> list[range]:
    """Devices of each model's job, which hold it once: jobs fill the node in order, then start again at its first device."""
    found, first = [], 0
    for model in models:
        ranks = plan.models[model.size].ranks
        if ranks > plan.gpus_per_node:
            raise PierConfigError(
                f"{model.name}: one replica takes {ranks} ranks (tensor x pipeline parallel), and a node has "
                f"{plan.gpus_per_node}. Scoring runs on one node: choose smaller --tensor-model-parallel-size or "
                "--pipeline-model-parallel-size."
            )
        if first + ranks > plan.gpus_per_node:
            first = 0
        found.append(range(first, first + ranks))
        first += ranks
    return found


def _job(plan: Plan, model: Scored, devices: Sequence[int]) -> ExpertJob:
    """The job that scores a model on all domains."""
    from pier_megatron.experiments.experts.scoring import VARIABLE

    size = plan.models[model.size]
    files = [scores_file(plan, model.name, domain) for domain in plan.domains]
    for file in [*files, *map(_unchecked, files)]:
        file.unlink(missing_ok=True)
    environment = {VARIABLE: os.pathsep.join(str(_unchecked(file)) for file in files)}
    if plan.device == "cuda":
        environment |= gpu_environment(devices)
    log = plan.folder / model.name / "scores" / "log.txt"
    log.unlink(missing_ok=True)
    arguments = scoring_arguments(size.arguments, size.micro_batch, str(model.checkpoints), list(plan.domains.values()))
    return ExpertJob(model.name, torchrun(plan, len(devices), arguments, f"{__package__}.scoring"), devices, log, environment)


def accept(plan: Plan, model: Scored) -> None:
    """Compares what a job has written with the losses that Megatron printed; only then are these the model's scores.

    Raises:
        PierConfigError: If they differ, and the model stays without scores.
    """
    log = plan.folder / model.name / "scores" / "log.txt"
    printed = [float(loss) for loss in VALIDATION.findall(log.read_text(errors="replace"))]
    if len(printed) != len(plan.domains):
        raise PierConfigError(
            f"{model.name}: Megatron printed {len(printed)} validation losses for {len(plan.domains)} domains, see {log}. The "
            "script must hand --multiple-validation-sets and --full-validation on to its datasets."
        )
    for domain, loss in zip(plan.domains, printed, strict=True):
        mean = -float(_read(_unchecked(scores_file(plan, model.name, domain)))[0].mean())
        if not abs(mean - loss) <= _TOLERANCE * abs(loss):
            raise PierConfigError(
                f"{model.name} on {domain}: the losses of all tokens have a mean of {mean:.6f}, Megatron printed {loss:.6f}. "
                "Megatron leaves out masked tokens: score without --eod-mask-loss and on text that is not padded."
            )
        print(f"{model.name} on {domain}: {loss:.4f} nats per token, as Megatron prints it", flush=True)
    for domain in plan.domains:
        file = scores_file(plan, model.name, domain)
        _unchecked(file).rename(file)
