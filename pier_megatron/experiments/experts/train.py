"""``pier-megatron experts train``: runs the jobs that are missing here, or hands them to Slurm."""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence

from pier_megatron.commands.megatron_log import PROGRESS
from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.experts.jobs import ExpertJob, gpu_environment, run_all
from pier_megatron.experiments.experts.planned import Expert, Plan
from pier_megatron.megatron_api.tracker import tracker_of

# How often it says how far an expert is.
_TENTHS = 10


def run(options: argparse.Namespace) -> int:
    """Trains what is missing; returns the exit status."""
    plan = Plan.read(options.folder)
    missing = untrained(plan)
    print(f"{len(plan.experts) - len(missing)} of {len(plan.experts)} experts are trained", flush=True)
    if options.submit:
        return submit(plan, missing)
    elsewhere = [expert.name for expert in missing if len(expert.nodes) > 1 or expert.nodes[0] > 0]
    if elsewhere:
        raise PierConfigError(
            f"{', '.join(elsewhere)}: planned for other nodes than this one. Hand them to Slurm with --submit, start their "
            "launch.sh there, or plan with machines.nodes 1."
        )
    jobs = [_job(plan, expert) for expert in missing]
    # Asked to end in either way, and also in the background of a shell, which ignores the first: end the jobs.
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.default_int_handler)
    try:
        run_all(jobs, _Progress())
    except KeyboardInterrupt:
        print("\nInterrupted. Run the command again: every expert resumes from its last checkpoint.", file=sys.stderr)
        return 130
    # Also jobs that ended well but early, on a signal or at the end of their time.
    unfinished = untrained(plan)
    for expert in unfinished:
        print(f"{expert.name}: saved at iteration {trained(plan, expert)} of {expert.iterations}", file=sys.stderr)
    if unfinished:
        print("Run the command again: these experts resume from there.", file=sys.stderr)
    return 1 if unfinished else 0


def _job(plan: Plan, expert: Expert) -> ExpertJob:
    """The job that trains an expert on this machine."""
    folder = plan.folder / expert.name
    environment = gpu_environment(expert.devices) if plan.device == "cuda" else {}
    return ExpertJob(expert.name, [str(folder / "launch.sh")], expert.devices, folder / "log.txt", environment)


def untrained(plan: Plan) -> list[Expert]:
    """Experts that are not trained to the end."""
    return [expert for expert in plan.experts if trained(plan, expert) < expert.iterations]


def trained(plan: Plan, expert: Expert) -> int:
    """Iterations of an expert's last checkpoint, 0 if there is none."""
    tracker = tracker_of(plan.checkpoints(expert.name))
    return int(tracker.read_text()) if tracker.exists() else 0


def submit(plan: Plan, experts: Sequence[Expert]) -> int:
    """Hands jobs to Slurm, says what it answers, and returns the exit status."""
    status = 0
    for expert in experts:
        command = ["sbatch", str(plan.folder / expert.name / "launch.slurm")]
        try:
            answer = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise PierConfigError("--submit: no sbatch on the PATH. Run it where jobs are submitted to Slurm.") from None
        print(f"{expert.name}: {(answer.stdout or answer.stderr).strip()}", flush=True)
        status = status or answer.returncode
    return status


class _Progress:
    """How far trainings are, to a tenth of each, beginning with the first iteration that is logged."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def __call__(self, job: ExpertJob, lines: str) -> str | None:
        said = None
        for done, of, loss in PROGRESS.findall(lines):
            if int(done) * _TENTHS // int(of) > (int(done) - 1) * _TENTHS // int(of) or job.name not in self._begun:
                said = f"iteration {done} of {of}, loss {float(loss):.3f}"
            self._begun.add(job.name)
        return said
