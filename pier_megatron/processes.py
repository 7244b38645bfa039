"""How processes end: those that a command starts, and those of a job that is refused or interrupted."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from pier_megatron.errors import PierConfigError

REFUSED, INTERRUPTED = 2, 130
"""Exit statuses: as of argparse, and as of a shell."""

_INTERRUPTED = "Pier: interrupted; what was not saved is lost. The job resumes from its last save, if it loads from there.\n"

# torchrun ends the other ranks of a node when the first one has failed. What only they refuse is still printed.
_SECONDS_BEHIND_RANK_0 = 5.0


@contextlib.contextmanager
def running(
    command: Sequence[str], log: IO[str] | int, environment: Mapping[str, str], before: Callable[[], None] = lambda: None
) -> Iterator["subprocess.Popen[str]"]:
    """Runs a command while the ``with`` block lasts; then asks it to end, and ends all that is left of it.

    Its environment is this process's own with more variables; its process calls ``before`` when it is forked.
    """
    import psutil

    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        # In a separate session: Ctrl-C is for the program that runs it.
        start_new_session=True,
        preexec_fn=before,
    )
    try:
        yield process
    finally:
        children: list[psutil.Process] = []
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also where somebody has lost patience meanwhile.
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait()


def rank() -> int:
    """Number of this process in its job, from what torchrun or Slurm tell it."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def refusal(error: PierConfigError) -> str:
    """What a job prints that is refused."""
    source = f"pier_megatron{f' (rank {rank()})' if rank() else ''}: error: "
    return "".join(
        f"{line}\n" for line in (*(f"{source}{message}" for message in error.args), *getattr(error, "__notes__", ()))
    )


@functools.cache
def end_with_one_message() -> None:
    """Ends this process with a message of rank 0 and an exit status where it is refused or interrupted.

    All other errors end it as before.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        try:
            end(kind, error, traceback)
        except KeyboardInterrupt as interrupt:
            # What ends this process is that another one was interrupted first, or it is interrupted twice.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            end(KeyboardInterrupt, interrupt, None)

    def end(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        if not isinstance(error, PierConfigError | KeyboardInterrupt):
            before(kind, error, traceback)
            return
        sys.stdout.flush()
        if isinstance(error, PierConfigError):
            status, said = REFUSED, refusal(error)
            time.sleep(_SECONDS_BEHIND_RANK_0 if rank() else 0)
            if rank() and os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
                # If one rank of a node refuses, for example for lack of host memory, the others do too.
                said = ""
        else:
            status, said = INTERRUPTED, "" if rank() else _INTERRUPTED
        # Not sys.stderr: when loading a checkpoint fails, nobody reads its buffer.
        print(said, end="", file=sys.__stderr__, flush=True)
        # A normal end of the interpreter would wait for communicators that others hold.
        os._exit(status)

    sys.excepthook = hook
