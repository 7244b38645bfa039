"""The demo's training script on a bad day: a user's own script around ``pretrain()``, with faults planted in it.

``PIER_TEST_FAULTS`` holds a JSON list of ``{"fault", "rank", "iteration"}``; they strike the first start of a job only, not
its restarts. Each rank leaves its process number in ``PIER_TEST_FOLDER``. Rank 0 listens at ``PIER_TEST_PORT`` if that is set,
one further at each restart.
"""

import functools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

import torch
from copies import compare_copies
from megatron.core.dist_checkpointing import serialization
from megatron.training import training
from writers import fork_what_hands_over_results

from pier_megatron.commands.demo import pretrain_bytes
from pier_megatron.integration import current
from pier_megatron.integration.inner.choice import owners
from pier_megatron.outer.rounds import OuterRound

_RANK = int(os.environ["RANK"])


def die(*args: Any) -> None:
    """What the kernel's out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_exchange(iteration: int) -> None:
    run = OuterRound.run

    def dying(round_: OuterRound) -> None:
        if _iteration() == iteration:
            # As NCCL's watchdog ends a process.
            os.abort()
        run(round_)

    OuterRound.run = dying  # type: ignore[method-assign]


def _die_among_islands(iteration: int) -> None:
    """After it has sent what the others need, and before they know that it has."""
    arrive = OuterRound.arrive

    def dying(round_: OuterRound) -> None:
        arrive(round_)
        if round_.begun == iteration:
            die()

    OuterRound.arrive = dying  # type: ignore[method-assign]


def _die_while_saving(iteration: int) -> None:
    save_config = serialization.save_config

    def dying(*args: Any) -> None:
        if _iteration() == iteration:
            die()
        save_config(*args)

    serialization.save_config = dying


def _disk_is_full(iteration: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    _before(iteration, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard)))


def _nan(iteration: int) -> None:
    def poison() -> None:
        optimizer = current.pier_optimizer()
        assert optimizer is not None
        next(iter(optimizer.loop.states[0].slices()))[0].detach()[0] = float("nan")

    _before(iteration, poison)


def _started_an_hour_ago(iteration: int) -> None:
    def backdate() -> None:
        training._TRAIN_START_TIME -= 3600

    _before(iteration, backdate)


def _trained_for_an_hour(iteration: int) -> None:
    """Since the last outer step."""

    def backdate() -> None:
        optimizer = current.pier_optimizer()
        assert optimizer is not None
        assert optimizer.clock is not None
        optimizer.clock.begin_iteration()
        optimizer.clock.begun -= 3600

    _before(iteration, backdate)


def _wait_for_islands_in_vain(iteration: int) -> None:
    """Takes the minutes of --pier-island-wait for seconds."""

    def lose_patience() -> None:
        optimizer = current.pier_optimizer()
        assert optimizer is not None
        optimizer.loop.steps.peers.wait_seconds = 3.0  # type: ignore[attr-defined]

    _before(iteration, lose_patience)


def _wait_for_the_others(iteration: int) -> None:
    def wait() -> None:
        while not (Path(os.environ["PIER_TEST_FOLDER"]).parent / f"go on with {iteration}").exists():
            time.sleep(0.05)

    _before(iteration, wait)


def _before(iteration: int, strike: Callable[[], None]) -> None:
    train_step = training.train_step

    @functools.wraps(train_step)
    def striking(*args: Any, **kwargs: Any) -> Any:
        if kwargs["iteration"] + 1 == iteration:
            strike()
        return train_step(*args, **kwargs)

    training.train_step = striking


def _note_losses(path: Path) -> None:
    """Writes what Megatron logs where other processes do not write into it."""
    training_log = training.training_log

    @functools.wraps(training_log)
    def noting(losses: Any, totals: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        result = training_log(losses, totals, rate, iteration, *args, **kwargs)
        if losses and int(os.environ["WORLD_SIZE"]) == _RANK + 1:
            with path.open("a") as file:
                file.write(f"{iteration} {float(losses['lm loss']).hex()}\n")
        return result

    training.training_log = noting


def _iteration() -> int:
    optimizer = current.pier_optimizer()
    return 0 if optimizer is None else optimizer.loop.iteration


_FAULTS = {
    "dies in the exchange": _die_in_exchange,
    "dies among islands": _die_among_islands,
    "dies while saving": _die_while_saving,
    "disk is full": _disk_is_full,
    "parameter is nan": _nan,
    "started an hour ago": _started_an_hour_ago,
    "trained for an hour": _trained_for_an_hour,
    "loses patience": _wait_for_islands_in_vain,
    "waits": _wait_for_the_others,
}


if __name__ == "__main__":
    folder = Path(os.environ["PIER_TEST_FOLDER"])
    (folder / f"rank{_RANK}.pid").write_text(str(os.getpid()))
    if "PIER_TEST_PORT" in os.environ:
        port = int(os.environ["PIER_TEST_PORT"]) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        os.environ["MASTER_PORT"] = str(port)
    faults = json.loads(os.environ.get("PIER_TEST_FAULTS", "[]"))
    if any(planned["fault"] == "dies in the exchange" for planned in faults):
        # torchrun ends the survivors as soon as it sees the death; they shall have their say first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for planned in faults:
        always = planned.get("always", False)
        if planned["rank"] == _RANK and (always or os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"):
            _FAULTS[planned["fault"]](planned["iteration"])
    if "--exit-signal-handler" not in sys.argv:
        # Elsewhere no signal reaches it.
        fork_what_hands_over_results()
    _note_losses(Path(os.environ["PIER_TEST_LOSSES"]))
    torch.set_num_threads(1)
    ended: SystemExit | None = None
    try:
        pretrain_bytes.main()
    except SystemExit as status:
        ended = status
    optimizer = current.pier_optimizer()
    if optimizer is not None:
        compare_copies(optimizer.model_chunks, owners(optimizer), optimizer)
    if ended is not None:
        raise ended
