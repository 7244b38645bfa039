"""How a process ends that is interrupted while it ends, the lighthouse, and all that a command has started."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pier_megatron.processes import INTERRUPTED

# By a signal that is seen only when the hook runs: it came during a collective, or while an interrupt was being handled.
_ENDING = """
import signal, sys
from pier_megatron.processes import end_with_one_message
{before}
end_with_one_message()
raise {error}
"""
_ENDINGS = {
    "RuntimeError('connection closed by peer')": "sys.excepthook = lambda *_: signal.raise_signal(signal.SIGINT)",
    "KeyboardInterrupt": "sys.stdout.flush = lambda: signal.raise_signal(signal.SIGINT)",
}


@pytest.mark.parametrize("error", _ENDINGS)
def test_an_interrupted_process_says_so_once(error: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDING.format(before=_ENDINGS[error], error=error)], capture_output=True, text=True
    )
    assert ended.returncode == INTERRUPTED
    assert ended.stderr.startswith("Pier: interrupted; what was not saved is lost")
    assert "Traceback" not in ended.stderr


_ISLANDS = 100


@contextlib.contextmanager
def open_lighthouse(soft: int, hard: int) -> Iterator[subprocess.Popen[str]]:
    """A lighthouse with limits on open files."""
    # Not between fork and exec of this process, whose other threads may hold locks.
    limited = f'ulimit -S -n {soft} && ulimit -H -n {hard} && exec "$@"'
    command = [sys.executable, "-m", "pier_megatron.cli", "lighthouse", "--islands", str(_ISLANDS), "--port", "0"]
    # A process of its own: a fork of a warm one has that one's limits.
    variables = os.environ | {"PIER_TEST_WARM": ""}
    process = subprocess.Popen(
        ["bash", "-c", limited, "bash", *command], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_lighthouse_serves_more_islands_than_open_files_were_allowed() -> None:
    with open_lighthouse(64, 4096) as process, contextlib.ExitStack() as stack:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[1].rstrip(":").rpartition(":")[2])
        for _ in range(_ISLANDS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        last = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        last.settimeout(60)
        last.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert last.recv(4) == b"HTTP"
        process.terminate()
        said, warned = process.communicate(timeout=60)
    # torchft would show each of them in every quorum.
    assert "[INFO]" not in said + warned


@pytest.mark.slow
def test_lighthouse_that_cannot_open_as_many_files_is_refused() -> None:
    with open_lighthouse(200, 200) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode
    assert "--islands 100: the lighthouse needs up to 264 open files (2 x 100 connections + 64), but" in said
    assert "may open 200 (ulimit -Hn). Raise the hard limit" in said
