"""``pier-megatron experts score``: the log-likelihood of every token under every model, through Megatron's own evaluation."""

import argparse
import dataclasses
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from pier_megatron.commands.megatron_log import VALIDATION
from pier_megatron.errors import PierConfigError, Problems
from pier_megatron.experiments.experts.planned import Plan
from pier_megatron.experiments.experts.scoring_arguments import scoring_arguments
from pier_megatron.megatron_api.tracker import tracker_of
from pier_megatron.processes import INTERRUPTED

_GPUS = "CUDA_VISIBLE_DEVICES"

# Largest difference, relative, between the mean of an array and the loss that Megatron prints: of sums in another order.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Scored:
    """What is scored.

    Attributes:
        name: An expert's, or ``seed/SIZE``; also the folder of its scores below the plan's.
        checkpoints: Folder of its checkpoints.
        size: Name of its size.
    """

    name: str
    checkpoints: Path
    size: str


def run(options: argparse.Namespace) -> int:
    """Scores what is not scored yet; returns the exit status."""
    plan = Plan.read(options.folder)
    missing_experts = ", ".join(expert.name for expert in plan.untrained())
    if missing_experts:
        raise PierConfigError(
            f"{missing_experts}: not trained to the end. Run: bash {shlex.quote(str(plan.folder / 'train.sh'))}"
        )
    models = scored_models(plan)
    missing = [model for model in models if not is_scored(plan, model)]
    progress = f"{len(models) - len(missing)} of {len(models)} models are scored on {', '.join(plan.domains)}"
    if not missing:
        print(progress)
        return 0
    problems, free = Problems(), queue.SimpleQueue[Sequence[str]]()
    for devices in places(plan, missing):
        free.put(devices)
    jobs = _Jobs()
    # A scheduler's signal reaches this process alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with futures.ThreadPoolExecutor(free.qsize()) as pool:
        try:
            print(progress, flush=True)
            scored = [pool.submit(_score, plan, free, jobs, model) for model in missing]
            for model, job in zip(missing, scored, strict=True):
                with problems.collecting():
                    if status := job.result():
                        raise PierConfigError(f"{model.name}: ended with status {status}, log in {_log(plan, model)}")
                    accept(plan, model)
        except KeyboardInterrupt:
            for again in (signal.SIGINT, signal.SIGTERM):
                signal.signal(again, signal.SIG_IGN)
            pool.shutdown(wait=False, cancel_futures=True)
            jobs.end()
            print("Interrupted: start the same command again for the models that are not scored.")
            return INTERRUPTED
    problems.report()
    return 0


def scored_models(plan: Plan) -> list[Scored]:
    """All that is scored: the seed model of the homogeneous size, and the experts."""
    size = plan.homogeneous
    models = []
    seed = plan.models[size].seed
    if seed is not None:
        models.append(Scored(f"seed/{size}", Path(seed), size))
    models += [Scored(expert.name, plan.checkpoints(expert.name), expert.size) for expert in plan.experts]
    return models


def scores_file(plan: Plan, name: str, domain: str) -> Path:
    """Where the scores of a model on a domain are."""
    return plan.folder / name / "scores" / f"{domain}.npz"


def unchecked(file: Path) -> Path:
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


def is_scored(plan: Plan, model: Scored) -> bool:
    """Whether there are scores of a model that are newer than its last checkpoint."""
    tracker = tracker_of(model.checkpoints)
    if not tracker.exists():
        raise PierConfigError(f"{model.name}: no checkpoint in {model.checkpoints} ({tracker.name} does not exist).")
    files = [scores_file(plan, model.name, domain) for domain in plan.domains]
    return all(file.exists() and file.stat().st_mtime > tracker.stat().st_mtime for file in files)


def places(plan: Plan, models: Sequence[Scored]) -> list[Sequence[str]]:
    """Devices of the jobs that run at once: each holds any of the models once.

    Raises:
        PierConfigError: If there are too few for one.
    """
    shown = os.environ.get(_GPUS) if plan.device == "cuda" else None
    devices = [*map(str, range(plan.gpus_per_node))] if shown is None else [each for each in shown.split(",") if each.strip()]
    ranks = max((plan.models[model.size].ranks for model in models), default=1)
    if ranks > len(devices):
        raise PierConfigError(
            f"One replica of a model takes {ranks} ranks (tensor x pipeline parallel), and this node has {len(devices)} "
            f"({_GPUS if shown is not None else 'machines.gpus-per-node'}). Scoring runs on one node: show more GPUs, or "
            "choose smaller --tensor-model-parallel-size or --pipeline-model-parallel-size."
        )
    return [devices[begin : begin + ranks] for begin in range(0, len(devices) - ranks + 1, ranks)]


def _log(plan: Plan, model: Scored) -> Path:
    return plan.folder / model.name / "scores" / "log.txt"


class _Jobs:
    """Processes that several threads start, until they are ended: none starts afterwards."""

    def __init__(self) -> None:
        self._lock, self._started, self._is_over = threading.Lock(), list[subprocess.Popen[bytes]](), False

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            if self._is_over:
                return None
            self._started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            return self._started[-1]

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            for process in self._started:
                process.terminate()


def _score(plan: Plan, free: "queue.SimpleQueue[Sequence[str]]", jobs: _Jobs, model: Scored) -> int:
    """Scores a model on all domains, once devices are free; returns the exit status."""
    from pier_megatron.experiments.experts.scoring import VARIABLE

    size = plan.models[model.size]
    files = [scores_file(plan, model.name, domain) for domain in plan.domains]
    for file in [*files, *map(unchecked, files)]:
        file.unlink(missing_ok=True)
    defaults = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment = defaults | os.environ | {VARIABLE: os.pathsep.join(str(unchecked(file)) for file in files)}
    processes = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size.ranks)]
    script = ["-m", f"{__package__}.scoring", "--device", plan.device, plan.script]
    arguments = scoring_arguments(size.arguments, size.micro_batch, str(model.checkpoints), list(plan.domains.values()))
    _log(plan, model).parent.mkdir(parents=True, exist_ok=True)
    devices = free.get()
    try:
        if plan.device == "cuda":
            environment[_GPUS] = ",".join(devices)
        with _log(plan, model).open("w") as log:
            process = jobs.start([*processes, *script, *arguments], environment, log)
            return INTERRUPTED if process is None else process.wait()
    except OSError as error:
        raise PierConfigError(f"{model.name}: {error}") from error
    finally:
        free.put(devices)


def accept(plan: Plan, model: Scored) -> None:
    """Compares what a job has written with the losses that Megatron printed; only then are these the model's scores.

    Raises:
        PierConfigError: If they differ, and the model stays without scores.
    """
    log = _log(plan, model)
    printed = [float(loss) for loss in VALIDATION.findall(log.read_text(errors="replace"))]
    if len(printed) != len(plan.domains):
        raise PierConfigError(
            f"{model.name}: Megatron printed {len(printed)} validation losses for {len(plan.domains)} domains, see {log}. The "
            "script must hand --multiple-validation-sets and --full-validation on to its datasets."
        )
    for domain, loss in zip(plan.domains, printed, strict=True):
        mean = -float(_read(unchecked(scores_file(plan, model.name, domain)))[0].mean())
        if not abs(mean - loss) <= _TOLERANCE * abs(loss):
            raise PierConfigError(
                f"{model.name} on {domain}: the losses of all tokens have a mean of {mean:.6f}, Megatron printed {loss:.6f}. "
                "Megatron leaves out masked tokens: score without --eod-mask-loss and on text that is not padded."
            )
        print(f"{model.name} on {domain}: {loss:.4f} nats per token, as Megatron prints it", flush=True)
    for domain in plan.domains:
        file = scores_file(plan, model.name, domain)
        unchecked(file).rename(file)
