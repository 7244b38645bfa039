"""Faults of jobs on clusters: nothing is lost beyond the last save, nothing hangs."""

import contextlib
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from jobs import ITERATIONS, Attempt, Job, differing, outer_checksums

pytestmark = pytest.mark.processes

_SAVING = "--save-interval 8"
_BEHIND_TRAINING = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"


def _orphans(seconds: float = 30) -> list[str]:
    """Processes that this test has started, and whose parents are gone, and that do not end by themselves in some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                of_test = process.environ().get("PYTEST_CURRENT_TEST", "").startswith("tests/end_to_end/test_faults.py")
                if of_test and process.ppid() == 1 and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def test_bad_week(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    """One job has one fault after the other and is restarted each time; it ends like its twin without faults."""
    undisturbed = Job(tmp_path / "undisturbed", corpus, flags=f"{_SAVING} --log-progress")
    job = Job(tmp_path / "job", corpus, flags=_SAVING)
    losses = undisturbed.run().losses()
    [progress] = (tmp_path / "undisturbed").rglob("progress.txt")
    # One group writes it, and Megatron finds the start of this job in it.
    assert [line.split("\t")[3] for line in progress.read_text().splitlines()] == ["Starting job", *["Saved checkpoint"] * 3]
    assert set(losses) == set(range(1, ITERATIONS + 1))
    seen: dict[int, str] = {}

    def compare(attempt: Attempt) -> None:
        """Its losses are those of the twin, so that the first fault that changes one is named."""
        found = attempt.losses()
        assert found == {iteration: losses[iteration] for iteration in found}
        seen.update(found)

    # A rank is killed in an exchange: the other one says where it was.
    attempt = job.run(faults=[{"fault": "dies in the exchange", "rank": 1, "iteration": 12}])
    assert attempt.wait() != 0
    assert "Fatal Python error: Aborted" in attempt.log
    assert "group 0 was in phase outer_step of the outer step after iteration 12" in attempt.log
    assert job.last_saved() == 8
    compare(attempt)

    # The disk is full where one group writes, then where the other does: no rank waits, and the checkpoint before is loaded.
    for rank in (1, 0):
        attempt = job.run(faults=[{"fault": "disk is full", "rank": rank, "iteration": 16}])
        assert attempt.wait() != 0
        assert "Pier: the checkpoint of iteration 16 is not whole. The ones before stay as they are" in attempt.log
        assert "Pier resumes exactly from iteration 8" in attempt.log
        assert job.last_saved() == 8
        compare(attempt)

    # The job ends by itself between outer steps, with an asynchronous save.
    attempt = job.run(flags=f"{_BEHIND_TRAINING} --exit-interval 13")
    assert attempt.wait() == 0, attempt.log[-5000:]
    assert "scheduled an async checkpoint save at iteration      13" in attempt.log
    assert "model weights are the anchor" in attempt.log
    assert job.last_saved() == 13
    compare(attempt)

    # What writes the checkpoints of a rank is killed: the rank ends, and says why.
    waits = [{"fault": "waits", "rank": rank, "iteration": 15} for rank in (0, 1)]
    with job.started(faults=waits, flags=_BEHIND_TRAINING) as attempt:
        attempt.wait_for_iteration(14)
        rank = psutil.Process(int((tmp_path / "job" / "rank1.pid").read_text()))
        # The child of the server that forks it.
        children = [child for child in rank.children(recursive=True) if "forkserver" in " ".join(child.cmdline())]
        [helper] = [child for child in children if child.ppid() != rank.pid]
        helper.kill()
        (tmp_path / "go on with 15").touch()
        assert attempt.wait(60) != 0
    ended = r"Pier: rank 1 ends: .* which helps it save checkpoints, was killed by signal 9\."
    assert re.search(ended, attempt.log), attempt.log[-5000:]
    assert job.last_saved() == 13
    compare(attempt)

    # A rank dies between the last byte of a checkpoint and its completion, and torchrun starts it again. Its time is over, then
    # the scheduler says so: it ends where the groups meet.
    faults = [{"fault": "started an hour ago", "rank": rank, "iteration": 14, "always": True} for rank in (0, 1)]
    dies = {"fault": "dies while saving", "rank": 0, "iteration": 16}
    attempt = job.run(faults=[*faults, dies], restarts=1, flags="--exit-duration-in-mins 30")
    assert attempt.wait() == 0, attempt.log[-5000:]
    assert attempt.log.count("Pier resumes exactly from iteration 13") == 2
    assert job.last_saved() == 16
    compare(attempt)
    with job.started(flags=f"{_BEHIND_TRAINING} --exit-signal-handler") as attempt:
        attempt.wait_for_iteration(17)
        attempt.send(signal.SIGTERM, 0, 1)
        assert attempt.wait() == 0, attempt.log[-5000:]
    assert job.last_saved() in (20, ITERATIONS)
    compare(attempt)

    # torchrun starts it again by itself, and the rank that was killed leaves no helper behind.
    attempt = job.run(
        faults=[{"fault": "dies in the exchange", "rank": 0, "iteration": 20}],
        restarts=1,
        flags=f"{_BEHIND_TRAINING} --ckpt-step 16",
    )
    assert attempt.wait() == 0, attempt.log[-5000:]
    assert attempt.log.count("Pier resumes exactly from iteration 16") == 2
    compare(attempt)

    # What the doctor says of the checkpoint before a job is queued.
    said = job.examined()[1]
    assert "whole, of iteration 24, " in said, said
    assert "--pier-preset pier is now diloco" in job.examined("--pier-preset diloco")[1]
    longer = "--train-iters 40 --pier-lazy-start-iters 8 --pier-override-checkpoint"
    assert "--train-iters 24 is now 40; if that changes the length of its schedules" in job.examined(longer)[1]

    assert seen == losses
    assert job.last_saved() == ITERATIONS
    assert outer_checksums(job, ITERATIONS) == outer_checksums(undisturbed, ITERATIONS)
    assert differing(job.weights(ITERATIONS), undisturbed.weights(ITERATIONS)) == []
    assert _orphans() == []
