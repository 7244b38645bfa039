"""The project's own tests of the outer loop and the exchange, on the device."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import inventory
import limits
import one_gpu
from table import Row, Rows, SkippedError

_REPOSITORY = Path(__file__).resolve().parents[2]
_SUMMARY = re.compile(r"\d+ (passed|failed|skipped|error|deselected).* in [\d.]+s")


def _run(*paths: str, needs: tuple[str, ...] = ()) -> Rows:
    missing = [module for module in ("pytest", "psutil", *needs) if not inventory.has(module)]
    if missing:
        raise SkippedError(f"missing: {', '.join(missing)}")
    command = [sys.executable, "-m", "pytest", "--device", one_gpu.device().type, "--maxfail", "5", *paths]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=_REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(limits.left())
        except subprocess.TimeoutExpired:
            process.kill()
        output.seek(0)
        printed = output.read()
    # Into the log of the check.
    print(printed, flush=True)
    summary = _SUMMARY.search(printed)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", printed, re.MULTILINE)
    progress = "".join(re.findall(r"^(?:tests/\S+ )?([.sFE]+)(?: +\[ *\d+%\])?$", printed, re.MULTILINE))
    in_time = f"{progress.count('.')} passed until the time was up"
    status, why = ("ok", "") if process.wait() == 0 else ("failed", "; ".join(failed) or "no end in time")
    yield Row(" ".join(paths), summary[0] if summary else in_time, status, why)


def unit() -> Rows:
    """Flat buffers, updates, codecs and their kernels, in one process."""
    codecs = ("tests/unit/test_codecs.py", "tests/unit/test_compression_feature.py", "tests/unit/test_kernels.py")
    yield from _run("tests/unit/test_outer.py", *codecs)


def exchange() -> Rows:
    """The exchange between four groups."""
    yield from _run("tests/loop/test_exchange.py")


def communicator() -> Rows:
    """The communicator between elastic islands."""
    yield from _run("tests/loop/test_lost_exchanges.py")


def loop() -> Rows:
    """The outer loop on four ranks, one thing at a time."""
    yield from _run("tests/loop/test_loop.py")


def crossings() -> Rows:
    """The outer loop on four ranks, everything at once."""
    yield from _run("tests/loop/test_crossings.py", needs=("hypothesis",))
