"""A test of this folder runs in one interpreter; one that starts another belongs in ``tests/processes``."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_START = subprocess.Popen.__init__
_INTERPRETER = Path(sys.executable).resolve()
_COMMANDS = {Path(sys.executable).with_name(name) for name in ("torchrun", "pier-megatron")}


@pytest.fixture(autouse=True)
def in_one_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: "subprocess.Popen[Any]", command: Any, *args: Any, **kwargs: Any) -> None:
        # The package itself asks bash what a job script hands over.
        first = shutil.which(command.split()[0] if isinstance(command, str) else command[0])
        if first and (Path(first).resolve() == _INTERPRETER or Path(first) in _COMMANDS):
            raise AssertionError(f"tests/unit starts {first}: see Tests in CONTRIBUTING.md")
        _START(process, command, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    monkeypatch.delattr(os, "fork")
