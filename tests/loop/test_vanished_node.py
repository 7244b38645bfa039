"""A node that vanishes closes no connection: its link is cut while the other islands wait for its part of a sum."""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lone_island import ISLANDS, TIMEOUT_SECONDS

from pier_megatron.cpu.nodes import EmulatedNodes, NoNetworkError

pytestmark = pytest.mark.processes

_WORKER, _VICTIM, _PORT = Path(__file__).with_name("lone_island.py"), ISLANDS - 1, 29510


def _wait(condition: Callable[[], bool], seconds: float, log: Path) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, log.read_text()[-3000:]
        time.sleep(0.05)


def test_islands_continue_without_a_node_that_vanishes(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(EmulatedNodes(ISLANDS))
        except NoNetworkError as error:
            pytest.skip(str(error))
        path = tmp_path / "log"
        log = stack.enter_context(path.open("w"))
        flags = f"--islands {ISLANDS} --min-islands 1 --address {nodes.address(0)} --heartbeat-timeout 2"
        command = [sys.executable, "-m", "pier_megatron.cli", "lighthouse", *flags.split(), "--port", str(_PORT)]
        stack.enter_context(nodes.running_on(0)(command, log, {"RUST_LOG": "error"}))
        _wait(lambda: "--pier-lighthouse" in path.read_text(), 120, path)
        for index in range(ISLANDS):
            halts_at = 2 if index == _VICTIM else -1
            island = [index, f"http://{nodes.address(0)}:{_PORT}", nodes.address(index), halts_at, tmp_path]
            stack.enter_context(nodes.running_on(index)([sys.executable, str(_WORKER), *map(str, island)], log, {}))
        _wait((tmp_path / "halts").exists, 120, path)
        agreed = [tmp_path / f"agreed-{index}" for index in range(_VICTIM)]
        before = [file.read_text() for file in agreed]
        assert all("012" in text for text in before)
        nodes.set_links(False, [_VICTIM])

        def have_continued() -> bool:
            later = [file.read_text()[len(text) :] for file, text in zip(agreed, before, strict=True)]
            return all("01\n" in text for text in later)

        # Less than a collective waits for one that is silent.
        _wait(have_continued, TIMEOUT_SECONDS / 2, path)
