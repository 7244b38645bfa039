"""How a job ends that is interrupted or refused: what it prints and what it has saved."""

import re
import signal
from pathlib import Path

import pytest
from jobs import INTERVAL, Job

pytestmark = pytest.mark.processes

_LONG = "--train-iters 4000 --pier-lazy-start-iters 0 --save-interval 100000"
# What torchrun prints of its own.
_OF_TORCHRUN = 1


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Path, Path]) -> Job:
    return Job(tmp_path_factory.mktemp("endings"), corpus, flags=_LONG)


def interrupted(job: Job, flags: str = "") -> str:
    """Presses Ctrl-C while it trains."""
    with job.started(flags=flags) as attempt:
        attempt.wait_for(r"lm loss.* losses and norms: group 1 of 2 \|\n")
        attempt.send_to_all(signal.SIGINT)
        attempt.wait()
    return attempt.log


def test_interrupted_refused_and_interrupted_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    # As docs/deploy.md says: a save on a busy machine may take longer than the 30 s that torchrun leaves.
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "240")
    saves = interrupted(job, "--exit-signal-handler --exit-signal SIGINT")
    assert "--exit-signal-handler: at SIGINT the job saves and ends at the next multiple of 4\n" in saves
    assert job.has_saved(), saves[-6000:]
    saved = job.last_saved()
    assert saved > 0
    assert saved % INTERVAL == 0

    refused = job.run(flags="--pier-sync-interval 6").log
    # Megatron writes a line and its end apart, so that those of two ranks may be in one.
    said = re.findall(r"pier_megatron: error: .*--pier-sync-interval.*--pier-override-checkpoint", refused)
    assert len(said) == 1, refused[-6000:]
    assert refused.count("Traceback") == _OF_TORCHRUN
    assert "exitcode  : 2 " in refused

    # Cold, as users start it.
    monkeypatch.setenv("PIER_TEST_WARM", "")
    loses = interrupted(job)
    assert "With --exit-signal-handler the job saves" in loses
    assert loses.count("Pier: interrupted; what was not saved is lost. The job resumes from its last save") == 1
    assert loses.count("Traceback") == _OF_TORCHRUN
    assert job.last_saved() == saved
