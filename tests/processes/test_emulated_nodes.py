"""Nodes that the demo emulates, and that nothing on them lives on."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pier_megatron.cpu.nodes import INTERFACE, EmulatedNodes, NoNetworkError
from pier_megatron.processes import running


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[EmulatedNodes]:
    try:
        with EmulatedNodes(2) as emulated:
            yield emulated
    except NoNetworkError as error:
        pytest.skip(str(error))


_SERVER = """
import socket
connection, _ = socket.create_server(("0.0.0.0", 5000)).accept()
while connection.recv(2**16):
    pass
"""
_CLIENT = """
import socket, sys, time
from pier_megatron.cpu.nodes import sent_bytes
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
before = sent_bytes()
connection.sendall(bytes(4_000_000))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(sent_bytes() - before)
"""


def test_emulated_link_has_its_rate(two_nodes: EmulatedNodes, tmp_path: Path) -> None:
    two_nodes.set_rate(40)
    with (tmp_path / "log").open("w+") as log:
        serve, ask = ([sys.executable, "-c", code, two_nodes.address(0)] for code in (_SERVER, _CLIENT))
        with two_nodes.running_on(0)(serve, log, {}), two_nodes.running_on(1)(ask, log, {}) as client:
            assert client.wait(120) == 0
        log.seek(0)
        assert 4_000_000 < int(log.read()) < 4_400_000
        with two_nodes.running_on(1)(["tc", "-statistics", "qdisc", "show", "dev", INTERFACE], log, {}) as shown:
            assert shown.wait(60) == 0
        log.seek(0)
        found = re.search(r"qdisc tbf .* rate 40Mbit .*\n Sent (\d+) bytes", log.read())
    assert found
    # The limit was in the way of all of it.
    assert int(found[1]) > 4_000_000


def test_what_runs_ends_with_all_that_it_has_started() -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(100)"
    starts = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); time.sleep(100)"
    with running([sys.executable, "-c", starts], subprocess.DEVNULL, {}) as process:
        deadline = time.monotonic() + 60
        while not (children := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert process.returncode == -signal.SIGTERM
    assert psutil.wait_procs(children, 60)[1] == []
