"""The lighthouse of many islands: open files, and how much torchft writes."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pier_megatron.exchange.membership import keep_quiet

pytestmark = pytest.mark.slow

_ISLANDS = 100


@contextlib.contextmanager
def lighthouse(soft: int, hard: int) -> Iterator[subprocess.Popen[str]]:
    """A lighthouse with limits on open files."""
    # Not between fork and exec of this process, whose other threads may hold locks.
    limited = f'ulimit -S -n {soft} && ulimit -H -n {hard} && exec "$@"'
    command = [sys.executable, "-m", "pier_megatron.cli", "lighthouse", "--islands", str(_ISLANDS), "--port", "0"]
    # A process of its own: a fork of a warm one has that one's limits.
    variables = os.environ | {"PIER_TEST_WARM": ""}
    process = subprocess.Popen(
        ["bash", "-c", limited, "bash", *command],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_lighthouse_serves_more_islands_than_open_files_were_allowed() -> None:
    with lighthouse(64, 4096) as process, contextlib.ExitStack() as stack:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[1].rstrip(":").rpartition(":")[2])
        for _ in range(_ISLANDS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        last = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        last.settimeout(60)
        last.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert last.recv(4) == b"HTTP"


def test_lighthouse_that_cannot_open_as_many_files_is_refused() -> None:
    with lighthouse(200, 200) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode
    assert "--islands 100: the lighthouse needs up to 264 open files (2 x 100 connections + 64), but" in said
    assert "may open 200 (ulimit -Hn). Raise the hard limit" in said


def test_torchft_is_kept_from_logging_quorums_of_many_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUST_LOG", raising=False)
    keep_quiet(4)
    assert "RUST_LOG" not in os.environ
    keep_quiet(100)
    assert os.environ["RUST_LOG"] == "warn"
    monkeypatch.setenv("RUST_LOG", "info")
    keep_quiet(100)
    assert os.environ["RUST_LOG"] == "info"
