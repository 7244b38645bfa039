"""Megatron's compiled dataset helper."""

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from pier_megatron.errors import PierConfigError
from pier_megatron.integration import own_world

_UTILS = "megatron.core.datasets.utils"
_HELPER = "helpers_cpp"


def compile_unless_shipped(compile_helpers: Callable[[], None]) -> None:
    """Skips compiling the helper where it is compiled and cannot be compiled, and refuses to compile it without effect.

    Megatron compiles it at every start with the Makefile of a source checkout. Its wheel holds the compiled helper but no
    Makefile, so that a run from the wheel would exit there.
    """
    helper = importlib.util.find_spec(f"megatron.core.datasets.{_HELPER}")
    utils = importlib.util.find_spec(_UTILS)
    folder = Path(str(utils.origin)).parent if utils else Path()
    if helper is None or (folder / "Makefile").exists():
        in_vain = compiled_for_another_python(folder)
        if in_vain:
            raise PierConfigError(in_vain)
        with own_world.first_group_first("helpers"):
            compile_helpers()


def compiled_for_another_python(folder: Path) -> str | None:
    """Why this Python could not import the helper that a checkout compiles, with the remedy; None if it can.

    The Makefile compiles for the ``python3`` on the PATH and names the result after the ``python3-config`` there. A virtual
    environment has the one and not the other.

    Args:
        folder: Folder of the Makefile, ``megatron/core/datasets`` of a checkout.
    """
    if not (folder / "Makefile").exists():
        return None
    if any((folder / f"{_HELPER}{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        return None
    python, config = shutil.which("python3"), shutil.which("python3-config")
    named = _printed(folder, config, "--extension-suffix") if config else ""
    asked = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    compiled = _printed(folder, python, "-c", asked) if python else ""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if named == compiled == suffix:
        return None
    return (
        f"{folder / 'Makefile'} compiles the dataset helper for {python or 'no python3'} and names it "
        f"{_HELPER}{named}, after {config or 'no python3-config'}; this Python imports {_HELPER}{suffix} only. Run once: "
        f"PATH={Path(sys.executable).parent}:$PATH make -C {folder} LIBEXT={suffix}"
    )


def _printed(folder: Path, *command: str) -> str:
    # In the folder where make runs: a shim on the PATH may choose its Python by that.
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout.strip()
    except OSError:
        # Found by a relative entry of the PATH, which leads nowhere from there.
        return ""
