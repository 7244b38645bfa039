"""Torture: a job is killed, paused and poisoned at random, and must end where an undisturbed one ends.

``make torture``, or ``python tests/end_to_end/torture.py [--kills N] [--seed S]``. Then the number of groups changes, where
no exactness is promised, and the loss must go on within noise.
"""

import argparse
import dataclasses
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from jobs import ITERATIONS, Job, differing, outer_checksums

from pier_megatron.commands.demo import corpus as demo_corpus

_FLAGS = "--save-interval 6 --no-check-for-nan-in-loss-and-grad --rerun-mode disabled"
# Part of the run that is compared: strikes at every attempt that trains this iteration.
_NAN = [{"fault": "parameter is nan", "rank": 1, "iteration": 11, "always": True}]
# Not part of it: an attempt that is to be killed does not end before, however long that takes to happen.
_WAITS = [{"fault": "waits", "rank": 0, "iteration": ITERATIONS - 1}]


@dataclasses.dataclass
class Outcome:
    """What was done to a job and what came of it.

    Attributes:
        kills: Times that one rank or all were killed.
        pauses: Times that a rank was stopped for a while.
        hangs: Attempts that had to be given up.
        lost: Iterations that had been saved and were trained again.
        differences: Between its end and that of the undisturbed job.
    """

    kills: int = 0
    pauses: int = 0
    hangs: int = 0
    lost: int = 0
    differences: list[str] = dataclasses.field(default_factory=list)


def torture(folder: Path, corpus: tuple[Path, Path], ranks: int, kills: int, seed: int) -> Outcome:
    """Hurts a job ``kills`` times, one rank or all, at random moments.

    Args:
        folder: Folder for checkpoints.
        corpus: Prefixes of the train and the validation dataset.
        ranks: Processes, in two groups.
        kills: Number of killed attempts.
        seed: Seed of the random choices.
    """
    chance, outcome = random.Random(seed), Outcome()
    reference, job = Job(folder / "reference", corpus, ranks, _FLAGS), Job(folder / "tortured", corpus, ranks, _FLAGS)
    losses = reference.run(faults=_NAN).losses()
    seen: dict[int, str] = {}
    for _ in range(kills):
        with job.started(faults=_NAN + _WAITS) as attempt:
            begin = job.last_saved() if job.has_saved() else 0
            attempt.wait_for_iteration(chance.randint(begin + 1, max(begin + 1, ITERATIONS - 2)))
            victims = range(ranks) if chance.random() < 0.3 else (chance.randrange(ranks),)
            if chance.random() < 0.5:
                attempt.send(signal.SIGSTOP, victims[0])
                time.sleep(2)
                attempt.send(signal.SIGCONT, victims[0])
                outcome.pauses += 1
            time.sleep(chance.random())
            attempt.send(signal.SIGKILL, *victims)
            outcome.kills += 1
            outcome.hangs += not _ends(attempt)
        saved = job.last_saved() if job.has_saved() else 0
        print(f"{outcome.kills} of {kills} killed, saved up to iteration {saved}", flush=True)
        seen |= attempt.losses()
        outcome.lost += bool(attempt.losses()) and min(attempt.losses()) <= begin
    last = job.run(faults=_NAN)
    seen |= last.losses()
    outcome.differences = [f"loss of iteration {t}" for t in losses if losses[t] != seen.get(t)]
    if job.last_saved() != ITERATIONS:
        return dataclasses.replace(outcome, differences=["did not end: " + last.log[-2000:]])
    outcome.differences += differing(job.weights(ITERATIONS), reference.weights(ITERATIONS))
    if outer_checksums(job, ITERATIONS) != outer_checksums(reference, ITERATIONS):
        outcome.differences.append("outer state")
    return outcome


def regroup(folder: Path, corpus: tuple[Path, Path], ranks: int) -> tuple[float, float]:
    """Lets the tortured job go on in one group from iteration 18.

    Returns:
        The loss three iterations later, and that of the undisturbed job.
    """
    job = Job(folder / "tortured", corpus, ranks, _FLAGS)
    regrouped = f"--pier-groups 1 --pier-override-checkpoint --ckpt-step {ITERATIONS - 6}"
    undisturbed = Job(folder / "reference", corpus, ranks, _FLAGS).run(faults=_NAN, flags=f"--ckpt-step {ITERATIONS - 6}")
    return float.fromhex(job.run(flags=regrouped).losses()[ITERATIONS - 3]), float.fromhex(undisturbed.losses()[ITERATIONS - 3])


def _ends(attempt: object) -> bool:
    import subprocess

    try:
        attempt.wait(120)  # type: ignore[attr-defined]
    except subprocess.TimeoutExpired:
        return False
    return True


def main() -> None:
    """Tortures as the command line says and prints the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="killed attempts (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes, in two groups (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        corpus = demo_corpus.write(folder / "corpus")
        outcome = torture(folder, corpus, options.ranks, options.kills, options.seed)
        changed, unchanged = regroup(folder, corpus, options.ranks)
    print(outcome)
    print(f"Loss three iterations after the groups were merged: {changed:.4f}; without: {unchanged:.4f}")
    sys.exit(bool(outcome.differences or outcome.hangs or outcome.lost or abs(changed / unchanged - 1) > 0.05))


if __name__ == "__main__":
    main()
