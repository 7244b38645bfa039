"""Megatron's compiled dataset helper."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from pier_megatron.integration import versions

_UTILS = "megatron.core.datasets.utils"


def install() -> None:
    """Skips compiling the helper where it is already compiled and cannot be compiled.

    Megatron compiles it at every start with the Makefile of a source checkout. Its wheel holds the compiled helper but no
    Makefile, so that a run from the wheel would exit there.
    """
    versions.wrap(_UTILS, "compile_helpers", _compile_unless_shipped)


def _compile_unless_shipped(compile_helpers: Callable[[], None]) -> None:
    helper = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    utils = importlib.util.find_spec(_UTILS)
    has_makefile = utils is not None and (Path(str(utils.origin)).parent / "Makefile").exists()
    if helper is None or has_makefile:
        compile_helpers()
