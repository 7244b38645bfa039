"""What happens to jobs on clusters, and what is left of them: nothing is lost beyond the last save, nothing hangs."""

import signal
from pathlib import Path

import pytest
from jobs import ITERATIONS, Job, differing, outer_checksums

pytestmark = pytest.mark.processes

_SAVING = "--save-interval 5"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> tuple[Job, dict[int, str]]:
    job = Job(tmp_path_factory.mktemp("undisturbed"), corpus, flags=_SAVING)
    attempt = job.run()
    assert set(attempt.losses()) == set(range(1, ITERATIONS + 1)), attempt.log[-5000:]
    return job, attempt.losses()


@pytest.fixture
def job(tmp_path: Path, corpus: tuple[Path, Path]) -> Job:
    return Job(tmp_path / "job", corpus, flags=_SAVING)


def finishes_as_if_nothing_had_happened(job: Job, undisturbed: tuple[Job, dict[int, str]], saved: int) -> None:
    """Starts a hurt job again: it goes on from what it had saved, and ends where the other one has ended."""
    reference, losses = undisturbed
    assert job.last_saved() == saved
    attempt = job.run()
    assert f"Pier goes on exactly from iteration {saved}" in attempt.log, attempt.log[-5000:]
    assert attempt.losses() == {iteration: loss for iteration, loss in losses.items() if iteration > saved}
    ends_are_equal(job, reference)


def ends_are_equal(job: Job, reference: Job) -> None:
    assert job.last_saved() == reference.last_saved() == ITERATIONS
    assert outer_checksums(job, ITERATIONS) == outer_checksums(reference, ITERATIONS)
    assert differing(job.weights(ITERATIONS), reference.weights(ITERATIONS)) == []


def test_rank_killed_in_an_exchange(job: Job, undisturbed: tuple[Job, dict[int, str]]) -> None:
    attempt = job.run(faults=[{"fault": "dies in the exchange", "rank": 1, "iteration": 12}])
    assert attempt.wait() != 0
    assert "group 0 was in phase outer_step of the outer step after iteration 12" in attempt.log
    finishes_as_if_nothing_had_happened(job, undisturbed, saved=10)


def test_job_comes_back_by_itself(job: Job, undisturbed: tuple[Job, dict[int, str]]) -> None:
    attempt = job.run(faults=[{"fault": "dies in the exchange", "rank": 0, "iteration": 16}], restarts=1)
    assert attempt.wait() == 0, attempt.log[-5000:]
    assert "Pier goes on exactly from iteration 15" in attempt.log
    assert attempt.losses() == undisturbed[1]
    ends_are_equal(job, undisturbed[0])


@pytest.mark.parametrize(("fault", "rank"), [("dies while saving", 0), ("disk is full", 1)])
def test_failed_save_leaves_the_one_before(job: Job, undisturbed: tuple[Job, dict[int, str]], fault: str, rank: int) -> None:
    attempt = job.run(faults=[{"fault": fault, "rank": rank, "iteration": 10}])
    assert attempt.wait() != 0
    finishes_as_if_nothing_had_happened(job, undisturbed, saved=5)


def test_signal_saves_where_the_groups_meet(job: Job, undisturbed: tuple[Job, dict[int, str]]) -> None:
    with job.started(flags="--exit-signal-handler") as attempt:
        attempt.wait_for_iteration(9)
        attempt.send(signal.SIGTERM, 0, 1)
        assert attempt.wait() == 0, attempt.log[-5000:]
    saved = job.last_saved()
    assert saved % 4 == 0
    assert saved < ITERATIONS
    finishes_as_if_nothing_had_happened(job, undisturbed, saved)


def test_clock_ends_the_job_where_the_groups_meet(job: Job, undisturbed: tuple[Job, dict[int, str]]) -> None:
    faults = [{"fault": "started an hour ago", "rank": rank, "iteration": 9} for rank in (0, 1)]
    attempt = job.run(faults=faults, flags="--exit-duration-in-mins 30")
    assert attempt.wait() == 0, attempt.log[-5000:]
    finishes_as_if_nothing_had_happened(job, undisturbed, saved=12)


def test_exit_interval_ends_the_job_anywhere(job: Job, undisturbed: tuple[Job, dict[int, str]]) -> None:
    attempt = job.run(flags="--exit-interval 11")
    assert attempt.wait() == 0, attempt.log[-5000:]
    assert "model weights are the anchor" in attempt.log
    finishes_as_if_nothing_had_happened(job, undisturbed, saved=11)


def test_asynchronous_save(job: Job, undisturbed: tuple[Job, dict[int, str]]) -> None:
    attempt = job.run(flags="--async-save --exit-interval 13")
    assert attempt.wait() == 0, attempt.log[-5000:]
    finishes_as_if_nothing_had_happened(job, undisturbed, saved=13)


def test_all_groups_bad_is_a_clear_stop(job: Job) -> None:
    faults = [{"fault": "parameter is nan", "rank": rank, "iteration": 11} for rank in (0, 1)]
    flags = "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled"
    attempt = job.run(faults=faults, flags=flags)
    assert attempt.wait() != 0
    assert "After iteration 12 no group has a pseudo-gradient that can be used (group 0 not finite, group 1 not finite)" in (
        attempt.log
    )
    assert job.last_saved() == 10


def test_short_torture(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    from torture import torture

    outcome = torture(tmp_path, corpus, ranks=2, kills=3, seed=1)
    assert outcome.differences == []
    assert outcome.hangs == outcome.lost == 0
