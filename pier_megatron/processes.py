"""Programs that a command starts, and that end with it."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO


@contextlib.contextmanager
def running(
    command: Sequence[str], log: IO[str] | int, environment: Mapping[str, str], before: Callable[[], None] = lambda: None
) -> Iterator["subprocess.Popen[str]"]:
    """Runs a command while the ``with`` block lasts; then asks it to end, and ends all that is left of it.

    Args:
        command: The command.
        log: File for its output, as ``subprocess.Popen`` takes it.
        environment: Beside this process's own.
        before: Called in its process before it begins.
    """
    import psutil

    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        # Of a session of its own: Ctrl-C is for the program that runs it.
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
