"""Which Megatron releases are supported, and how a seam takes hold of a symbol."""

import contextlib
import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Tested in CI; CONTRIBUTING.md says how a release gets in here.
SUPPORTED = ("0.17", "0.18", "0.19")


class UnsupportedMegatronError(ImportError):
    """The installed Megatron lacks something that a seam needs."""


def megatron_version() -> str:
    """Returns the version of the megatron-core that this process imports, such as ``0.19.2``."""
    return str(importlib.import_module("megatron.core.package_info").__version__)


def require(module: str, name: str) -> Any:
    """Returns ``module.name``; the name may be that of a method, such as ``RerunStateMachine._reduce_any``.

    Raises:
        UnsupportedMegatronError: If this Megatron has no such symbol.
    """
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise UnsupportedMegatronError(
            f"pier_megatron needs {module}.{name}, which Megatron {_version_or_unknown()} does not have ({error}). "
            f"Supported releases: {', '.join(SUPPORTED)}. Install one of them, for example "
            f"pip install 'megatron-core=={SUPPORTED[-1]}.*', or check that the Megatron-LM checkout on PYTHONPATH is one."
        ) from error


def wrap(module: str, name: str, around: Callable[..., Any]) -> None:
    """Puts a function around one of Megatron's, or around a method, where Megatron looks it up by name.

    Args:
        module: Full name of a Megatron module.
        name: As for :func:`require`.
        around: Called in its place, with the original and then its arguments, whose names must not be those of what comes
            before them: let that be positional only.

    Raises:
        UnsupportedMegatronError: If this Megatron has no such function.
    """
    original = require(module, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    *path, attribute = name.split(".")
    setattr(functools.reduce(getattr, path, importlib.import_module(module)), attribute, wrapper)


def wrap_validation(around: Callable[..., Any]) -> None:
    """Puts a function around Megatron's check of its arguments, see :func:`wrap`."""
    wrap("megatron.training.arguments", "validate_args", around)
    if hasattr(importlib.import_module("megatron.training.initialize"), "validate_args"):
        # megatron-core 0.17 validates there, and imported the function by name.
        wrap("megatron.training.initialize", "validate_args", around)


@contextlib.contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a module or an object has other attributes; those of its class are only hidden."""
    hidden = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        # At no moment without an attribute that another thread may ask for.
        vars(owner).update(hidden)
        for name in values.keys() - hidden.keys():
            del vars(owner)[name]


def given(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of one of Megatron's functions, by name, however they were passed."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def megatron_args() -> Any:
    """Megatron's arguments of the training under way."""
    return require("megatron.training.global_vars", "get_args")()


def _version_or_unknown() -> str:
    try:
        return megatron_version()
    except (ImportError, AttributeError):
        return "(not found: is megatron-core installed?)"
