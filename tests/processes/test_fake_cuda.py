"""Runs ``fake_cuda_cases.py`` in a process of its own: other tests make the device ``cuda`` the CPU, for all of theirs."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_on_a_gpu_that_is_not_there() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("fake_cuda_cases.py")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
