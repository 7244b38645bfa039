"""Runs jobs on this machine, at once where they need different devices; the failure of one does not stop the others."""

import contextlib
import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pier_megatron.cpu.nodes import running

_POLL = 0.2

# The last line of a traceback, of a rank or not.
_RAISED = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception): ")


@dataclasses.dataclass(frozen=True)
class Job:
    """A command.

    Attributes:
        name: For people.
        command: Its words.
        devices: Numbers of what it takes of the machine for itself.
        log: File that its output is appended to.
        environment: Beside this process's.
    """

    name: str
    command: Sequence[str]
    devices: Sequence[int]
    log: Path
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def run_all(jobs: Sequence[Job], progress: Callable[[Job, str], str | None] = lambda job, log: None) -> list[Job]:
    """Runs jobs to their end, each as soon as its devices are free, and says of each what becomes of it.

    Args:
        jobs: In the order in which they shall start.
        progress: Given a job and what it has written since it was started, what to say of it, if that is new.

    Returns:
        Those that failed.
    """
    waiting, failed, said = list(jobs), [], {job.name: "" for job in jobs}
    with contextlib.ExitStack() as stack:
        under_way: dict[str, tuple[Job, subprocess.Popen[str], int]] = {}
        while waiting or under_way:
            taken = {device for job, _, _ in under_way.values() for device in job.devices}
            for job in [*waiting]:
                if not taken & set(job.devices):
                    under_way[job.name] = _started(stack, job)
                    waiting.remove(job)
                # Those before it come first, also where they wait for more devices than it does.
                taken |= set(job.devices)
            for job, process, begin in [*under_way.values()]:
                status = process.poll()
                log = _since(job.log, begin)
                line = progress(job, log)
                if line and line != said[job.name]:
                    said[job.name] = line
                    print(f"{job.name}: {line}", flush=True)
                if status is None:
                    continue
                del under_way[job.name]
                if status:
                    failed.append(job)
                    print(f"{job.name}: failed with status {status}: {_cause(log)} (whole log: {job.log})", flush=True)
                else:
                    print(f"{job.name}: done", flush=True)
            time.sleep(_POLL)
    return failed


def _started(stack: contextlib.ExitStack, job: Job) -> tuple[Job, "subprocess.Popen[str]", int]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    begin = job.log.stat().st_size if job.log.exists() else 0
    log = stack.enter_context(job.log.open("a"))
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    process = stack.enter_context(running(job.command, log, environment | dict(job.environment)))
    print(f"{job.name}: started", flush=True)
    return job, process, begin


def _since(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def _cause(log: str) -> str:
    """The line of a log that says why."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # Of the first rank that failed: torchrun's own report comes after it.
    errors = [line for line in lines if _RAISED.match(line) and "ChildFailedError" not in line]
    return (errors or lines[-1:] or ["it wrote nothing"])[0]
