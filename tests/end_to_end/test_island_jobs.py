"""Elastic islands with real Megatron: one dies in an exchange, comes back, and all start again."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ITERATIONS, Attempt, Job, differing, outer_checksums
from launch import REPOSITORY

from pier_megatron.exchange.authentication import new_secret

pytestmark = pytest.mark.processes

_ISLANDS = 3
# Iterations: the others wait for an island before _START, it dies in _DEATH, and they wait for its return before _PAUSE.
_START, _DEATH, _PAUSE, _SAVE = 3, 8, 14, 22


class Island(Job):
    """A job that is one island."""

    def __init__(self, folder: Path, corpus: tuple[Path, Path], flags: str, index: int) -> None:
        super().__init__(folder / str(index), corpus, 1, f"{flags} --pier-island {index}")
        self._index = index

    def checkpoint(self, iteration: int) -> Path:
        part = f"islands/{self._index}" if self._index else ""
        return self.folder / "checkpoints" / part / f"iter_{iteration:07d}"


@contextlib.contextmanager
def lighthouse(least: int) -> Iterator[str]:
    """Its address; the lighthouse waits for ``islands``."""
    command = [sys.executable, "-m", "pier_megatron.cli", "lighthouse", "--islands", str(_ISLANDS), "--min-islands", str(least)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--heartbeat-timeout", "2"],
        cwd=REPOSITORY,
        env=os.environ | {"RUST_LOG": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    found = re.search(r"http://\S+:\d+", process.stdout.readline())
    assert found is not None
    try:
        yield f"--pier-lighthouse {found[0]}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@contextlib.contextmanager
def started(islands: Sequence[Island], **how: Any) -> Iterator[list[Attempt]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(island.started(**how)) for island in islands]


def check_that_all_go_on_exactly(
    islands: Sequence[Island], before: Sequence[Attempt], weights: Sequence[dict[str, torch.Tensor]]
) -> None:
    """Starts all together once more, from where they had trained apart since the last outer step."""
    losses = [attempt.losses() for attempt in before]
    with lighthouse(least=len(islands)) as place, started(islands, flags=f"{place} --ckpt-step {_SAVE}") as resumed:
        assert [attempt.wait() for attempt in resumed] == [0] * len(islands)
    later = [{iteration: loss for iteration, loss in each.items() if iteration > _SAVE} for each in losses]
    # All losses first: they tell which island went another way.
    assert [attempt.losses() for attempt in resumed] == later
    assert all(f"Pier resumes exactly from iteration {_SAVE}" in attempt.log for attempt in resumed)
    assert [differing(island.weights(ITERATIONS), final) for island, final in zip(islands, weights, strict=True)] == [
        [] for _ in islands
    ]


def check_that_the_last_step_is_taken_when_the_others_are_back(first: Island, second: Island) -> None:
    """The second dies in the outer step of the last iteration, and the first gives up waiting."""
    patience = {"fault": "loses patience", "rank": 0, "iteration": ITERATIONS - 1}
    death = {"fault": "dies among islands", "rank": 0, "iteration": ITERATIONS}
    with lighthouse(least=2) as place:
        saved = f"{place} --ckpt-step {_SAVE}"
        with (
            first.started(faults=[patience], flags=saved) as deserted,
            second.started(faults=[patience, death], flags=saved) as victim,
        ):
            assert victim.wait() != 0
            assert deserted.wait() != 0
    assert "too few islands for longer than --pier-island-wait 30 minutes" in deserted.log
    assert "ends with status 75" in deserted.log
    assert "outer step after iteration       24" not in deserted.log
    apart = first.weights(ITERATIONS)
    with lighthouse(least=2) as place:
        saved = f"{place} --ckpt-step {_SAVE}"
        with (
            first.started(flags=place) as waits,
            second.started(flags=f"{place} --load {first.folder}/checkpoints --clip-grad 0.5 --log-interval 2") as stranger,
        ):
            assert stranger.wait() != 0
            assert "/checkpoints has no checkpoint of island 1, which starts at iteration 0 " in stranger.log
            assert "add --pier-override-checkpoint" in stranger.log
            assert "--pier-island 1 is of another run than the other islands: --clip-grad 0.5 here and" in stranger.log
            assert "--log-interval" not in stranger.log.split("is of another run")[1].splitlines()[0]
            with second.started(flags=saved) as returns:
                assert [attempt.wait() for attempt in (waits, returns)] == [0, 0]
    assert "outer step after iteration       24" in waits.log
    final = [island.weights(ITERATIONS) for island in (first, second)]
    assert differing(*final) == []
    assert differing(final[0], apart) != []


def test_island_dies_and_comes_back(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    """With experts, whose routers balance by biases in each island; behind training, in two fragments and four bits."""
    flags = (
        "--num-experts 2 --disable-bias-linear --moe-router-load-balancing-type none --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid "
        f"--pier-groups {_ISLANDS} --global-batch-size {4 * _ISLANDS} --pier-lazy-start-iters 0 "
        f"--pier-island-timeout 60 --save-interval {_SAVE} --pier-overlap 1 --pier-fragments 2 --pier-exchange-dtype int4 "
    )
    islands = [Island(tmp_path, corpus, flags, index) for index in range(_ISLANDS)]
    waits = [{"fault": "waits", "rank": 0, "iteration": iteration} for iteration in (_START, _PAUSE)]
    dies = [{"fault": "dies among islands", "rank": 0, "iteration": _DEATH}]
    with (
        lighthouse(least=2) as place,
        started(islands[:2], faults=waits, flags=place) as others,
        islands[2].started(faults=dies, flags=place) as victim,
    ):
        # The others may begin without it. It joins them in their first outer step then.
        victim.wait_for(f"Pier: {_ISLANDS} islands")
        (tmp_path / f"go on with {_START}").touch()
        assert victim.wait() != 0
        begun = time.monotonic()
        others[0].wait_for_iteration(_DEATH + 1)
        print(f"{time.monotonic() - begun:.1f} s from death to the next iteration")
        with islands[2].started(flags=place) as again:
            again.wait_for(f"Pier: {_ISLANDS} islands")
            others[1].wait_for_iteration(_PAUSE - 1)
            (tmp_path / f"go on with {_PAUSE}").touch()
            assert [attempt.wait() for attempt in (*others, again)] == [0, 0, 0]
    # The step after iteration 14 is that of the others, who apply it after 15; it counts in the one after.
    assert "island 2 joins the others at iteration 15" in again.log
    assert min(again.losses()) == 16
    final = [island.weights(ITERATIONS) for island in islands]
    assert differing(final[0], final[1]) == differing(final[0], final[2]) == []
    apart = [island.weights(_SAVE) for island in islands]
    assert differing(apart[0], apart[1]) == []
    check_that_all_go_on_exactly(islands, (*others, again), final)


def test_slow_island_rests(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    """With Muon inside, and a secret; the second island joins the first, and rests in two intervals. All skip iterations."""
    new_secret(tmp_path / "secret")
    flags = (
        f"--pier-secret-file {tmp_path}/secret "
        "--pier-groups 2 --global-batch-size 8 --pier-lazy-start-iters 0 --pier-island-timeout 60 --pier-sync-seconds 1800 "
        "--pier-inner-optimizer muon --muon-fp32-matmul-prec high --lr-decay-style cosine --lr-decay-iters 40 "
        f"--save-interval {_SAVE} --iterations-to-skip 3 14 "
    )
    first, second = [Island(tmp_path, corpus, flags, index) for index in range(2)]
    waits = [{"fault": "waits", "rank": 0, "iteration": 6}]
    slow = [{"fault": "trained for an hour", "rank": 0, "iteration": iteration} for iteration in (13, 18)]
    with lighthouse(least=1) as place, first.started(faults=waits, flags=place) as alone:
        alone.wait_for_iteration(5)
        with second.started(faults=slow, flags=place) as joins:
            joins.wait_for("Start quorum")
            (tmp_path / "go on with 6").touch()
            assert [attempt.wait() for attempt in (alone, joins)] == [0, 0]
    assert "--exit-signal (SIGINT: Ctrl-C), and ends at once\n" in alone.log
    assert "island 1 joins the others at iteration 8" in joins.log
    assert "rests for 1 iterations, until the outer step after iteration 16" in joins.log
    assert "rests for 1 iterations, until the outer step after iteration 20" in joins.log
    assert "it rests for" not in alone.log
    assert list(joins.losses()) == [9, 10, 11, 12, 13, 16, 17, 18, 20, 21, 22, 23, 24]
    # The learning rate of both, and the samples that they have passed, are the same all the same.
    logged = re.compile(r"iteration +(\d+)/ .* consumed samples: +(\d+) .* learning rate: (\S+)")
    clocks = [{int(match[1]): match.groups() for match in logged.finditer(attempt.log)} for attempt in (alone, joins)]
    assert clocks[1]
    assert clocks[1].items() <= clocks[0].items()
    final = [island.weights(ITERATIONS) for island in (first, second)]
    assert differing(*final) == []
    check_that_all_go_on_exactly((first, second), (alone, joins), final)
    check_that_the_last_step_is_taken_when_the_others_are_back(first, second)


def test_island_that_only_evaluates_meets_nobody(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    nowhere = "--pier-lighthouse http://127.0.0.1:1 --pier-lazy-start-iters 0 --skip-train --save-interval 100"
    attempt = Island(tmp_path, corpus, nowhere, 0).run()
    assert "lm loss value" in attempt.log
    assert not (tmp_path / "0" / "losses1.txt").exists()


def train(
    folder: Path, corpus: tuple[Path, Path], until: int, loads: tuple[Job, int] | None = None, are_islands: bool = False
) -> tuple[Job, list[Attempt]]:
    """Trains two groups until an outer step, in one launch or as islands; returns what has saved, and what was started."""
    flags = "--pier-lazy-start-iters 0 --pier-override-checkpoint --save-interval 2 "
    flags += f"--exit-interval {until} --save {folder}/checkpoints "
    if loads is not None:
        flags += f"--load {loads[0].folder}/checkpoints --ckpt-step {loads[1]} "
    with contextlib.ExitStack() as stack:
        jobs: Sequence[Job] = [Job(folder, corpus, 2, flags)]
        if are_islands:
            flags += stack.enter_context(lighthouse(least=2)) + " --pier-island-timeout 60"
            jobs = [Island(folder, corpus, flags, index) for index in range(2)]
        attempts = [stack.enter_context(job.started()) for job in jobs]
        assert [attempt.wait() for attempt in attempts] == [0] * len(jobs), attempts[-1].log[-5000:]
    # All islands of a run share a folder.
    return Job(folder, corpus), attempts


def test_elastic_islands_and_other_runs_load_each_other(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    launch, _ = train(tmp_path / "launch", corpus, until=8)
    elastic, attempts = train(tmp_path / "islands", corpus, until=12, loads=(launch, 6), are_islands=True)
    # It depends on every group's parameters, moments, samples and random states, and on anchor and momentum.
    assert all("from iteration 6; with changes" in attempt.log for attempt in attempts)
    assert outer_checksums(elastic, 8) == outer_checksums(launch, 8) != outer_checksums(launch, 6)
    # Islands that load their own run are in the other tests.
    rows = "| one launch | elastic islands | own |\n| elastic islands | elastic islands | exact |"
    assert rows in (REPOSITORY / "docs" / "checkpoints.md").read_text()
    check_that_one_launch_begins_from_the_weights_only(tmp_path / "weights", corpus, elastic)
    check_that_a_third_island_starts_from_the_first(tmp_path / "three", corpus, elastic)


def check_that_one_launch_begins_from_the_weights_only(folder: Path, corpus: tuple[Path, Path], saved: Job) -> None:
    flags = "--pier-lazy-start-iters 0 --pier-override-checkpoint --save-interval 100 --exit-interval 2 --load "
    refused = Job(folder, corpus, 2, f"{flags}{saved.folder}/checkpoints").run()
    assert "/checkpoints: island 0 has saved its own part of a run there" in refused.log
    assert "Continue with elastic islands (--pier-lighthouse), or begin from the weights with --finetune" in refused.log
    with Job(folder, corpus, 2, f"{flags}{saved.folder}/checkpoints --finetune").started() as begun:
        assert begun.wait() == 0
    assert list(begun.losses()) == [1, 2]


def check_that_a_third_island_starts_from_the_first(folder: Path, corpus: tuple[Path, Path], saved: Job) -> None:
    """Two islands have saved; three load, and save before their next outer step."""
    flags = (
        "--pier-groups 3 --global-batch-size 12 --pier-lazy-start-iters 0 --pier-override-checkpoint --pier-island-timeout 60 "
        f"--override-opt_param-scheduler --load {saved.folder}/checkpoints --ckpt-step 10 "
        f"--save {folder}/checkpoints --save-interval {ITERATIONS} "
    )
    islands = [Island(folder, corpus, f"{flags} --exit-interval 11", index) for index in range(3)]
    with lighthouse(least=3) as place, started(islands, flags=place) as attempts:
        assert [attempt.wait() for attempt in attempts] == [0, 0, 0]
    for attempt, source in zip(attempts, (0, 1, 0), strict=True):
        assert "resumes exactly" not in attempt.log
        assert "with changes: --pier-groups 2 is now 3" in attempt.log
        assert f"the first group with the inner state of saved group {source}\n" in attempt.log
        assert ("of island 2, which takes the inner state of island 0" in attempt.log) == (attempt is attempts[2])
    # No outer step in between: those of the run that has saved.
    assert outer_checksums(Job(folder, corpus), 11) == outer_checksums(saved, 10)
