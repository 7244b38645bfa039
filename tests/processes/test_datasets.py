"""The dataset helper of a Megatron-LM checkout, which is compiled for whatever Python the PATH has."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from pier_megatron.integration.datasets import compiled_for_another_python

_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").touch()
    return tmp_path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """First folder on the PATH: a virtual environment of this Python, which has a ``python3`` of its own and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def python_config(path: Path, suffix: str) -> None:
    (path / "python3-config").write_text(f"#!/bin/sh\necho {suffix}\n")
    (path / "python3-config").chmod(0o755)


def test_helper_named_for_another_python(checkout: Path, path: Path) -> None:
    python_config(path, ".cpython-39-x86_64-linux-gnu.so")
    said = compiled_for_another_python(checkout)
    assert said is not None
    assert f"names it helpers_cpp.cpython-39-x86_64-linux-gnu.so, after {path / 'python3-config'}" in said
    assert said.endswith(f"make -C {checkout} LIBEXT={_SUFFIX}")
    # What that leaves behind, and later starts find.
    (checkout / f"helpers_cpp{_SUFFIX}").touch()
    assert compiled_for_another_python(checkout) is None


def test_helper_compiled_for_another_python(checkout: Path, path: Path) -> None:
    python_config(path, _SUFFIX)
    (path / "python3").unlink()
    (path / "python3").write_text("#!/bin/sh\necho .cpython-39-x86_64-linux-gnu.so\n")
    (path / "python3").chmod(0o755)
    assert f"compiles the dataset helper for {path / 'python3'} " in str(compiled_for_another_python(checkout))


def test_nothing_in_the_way(checkout: Path, path: Path) -> None:
    # Like pyenv's, it chooses a Python by the folder that it is asked in.
    python_config(path, f"$(test $PWD = {checkout} && echo {_SUFFIX})")
    assert compiled_for_another_python(checkout) is None
    (checkout / "Makefile").unlink()
    python_config(path, "")
    assert compiled_for_another_python(checkout) is None
