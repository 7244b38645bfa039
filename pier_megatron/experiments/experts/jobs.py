"""Runs jobs on this machine, at once where they need different devices; the failure of one does not stop the others."""

import contextlib
import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pier_megatron.errors import PierConfigError
from pier_megatron.processes import running

_POLL = 0.2

_GPUS = "CUDA_VISIBLE_DEVICES"

# The last line of a traceback, of a rank or not.
_RAISED = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception): ")


@dataclasses.dataclass(frozen=True)
class ExpertJob:
    """A command.

    Attributes:
        name: Name for people.
        command: Its words.
        devices: Numbers of what it takes of the machine for itself.
        log: File that its output is appended to.
        environment: Environment variables, added to this process's.
    """

    name: str
    command: Sequence[str]
    devices: Sequence[int]
    log: Path
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def run_all(
    jobs: Sequence[ExpertJob], progress: Callable[[ExpertJob, str], str | None] = lambda job, log: None
) -> list[ExpertJob]:
    """Runs jobs to their end, each as soon as its devices are free, and says of each what becomes of it.

    Args:
        jobs: In the order in which they shall start.
        progress: Given a job and the lines that it has written since the last call, what to say of it, or None.

    Returns:
        Those that failed.
    """
    waiting, failed = list(jobs), []
    with contextlib.ExitStack() as stack:
        under_way: dict[str, tuple[ExpertJob, subprocess.Popen[str], _Log]] = {}
        while waiting or under_way:
            taken = {device for job, _, _ in under_way.values() for device in job.devices}
            for job in [*waiting]:
                if not taken & set(job.devices):
                    under_way[job.name] = _started(stack, job)
                    waiting.remove(job)
                # Those before it come first, also where they wait for more devices than it does.
                taken |= set(job.devices)
            for job, process, log in [*under_way.values()]:
                status = process.poll()
                line = progress(job, log.new_lines())
                if line:
                    print(f"{job.name}: {line}", flush=True)
                if status is None:
                    continue
                del under_way[job.name]
                if status:
                    failed.append(job)
                    print(f"{job.name}: failed with status {status}: {_cause(log.whole())} (whole log: {job.log})", flush=True)
                else:
                    print(f"{job.name}: done", flush=True)
            time.sleep(_POLL)
    return failed


def gpu_environment(devices: Sequence[int]) -> dict[str, str]:
    """The environment of a job that takes GPUs, by their numbers among those that this process sees.

    Raises:
        PierConfigError: If it sees fewer.
    """
    seen = os.environ.get(_GPUS)
    if seen is None:
        return {_GPUS: ",".join(map(str, devices))}
    names = [name.strip() for name in seen.split(",") if name.strip()]
    if max(devices) >= len(names):
        raise PierConfigError(
            f"{_GPUS}={seen} shows {len(names)} GPUs, but a job is planned for numbers {', '.join(map(str, devices))} of those "
            f"shown, counted from 0. Show more GPUs, or plan with machines.gpus-per-node {max(len(names), 1)}."
        )
    return {_GPUS: ",".join(names[device] for device in devices)}


def _started(stack: contextlib.ExitStack, job: ExpertJob) -> tuple[ExpertJob, "subprocess.Popen[str]", "_Log"]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    log = stack.enter_context(job.log.open("a"))
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    written = _Log(job.log)
    process = stack.enter_context(running(job.command, log, environment | dict(job.environment)))
    print(f"{job.name}: started", flush=True)
    return job, process, written


class _Log:
    """What a job appends to a file, from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin = self._read = path.stat().st_size

    def new_lines(self) -> str:
        """Whole lines that nobody has read; only an unfinished last line is read again."""
        found = self._since(self._read)
        lines = found[: found.rfind(b"\n") + 1]
        self._read += len(lines)
        return lines.decode(errors="replace")

    def whole(self) -> str:
        return self._since(self._begin).decode(errors="replace")

    def _since(self, place: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(place)
            return file.read()


def _cause(log: str) -> str:
    """The line of a log that says why."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # The first rank that failed counts: torchrun's own report follows it.
    errors = [line for line in lines if _RAISED.match(line) and "ChildFailedError" not in line]
    return (errors or lines[-1:] or ["it wrote nothing"])[0]
