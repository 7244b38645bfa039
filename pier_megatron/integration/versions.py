"""Which Megatron releases are supported, and how a seam takes hold of a symbol."""

import contextlib
import functools
import importlib
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
    """Returns ``module.name``.

    Args:
        module: Full name of a Megatron module.
        name: An attribute of it.

    Raises:
        UnsupportedMegatronError: If this Megatron has no such symbol.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedMegatronError(_missing(module, name, error)) from error


def has(module: str, name: str) -> bool:
    """Whether this Megatron has ``module.name``, where releases differ."""
    return hasattr(importlib.import_module(module), name)


def wrap(module: str, name: str, make_wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function of Megatron by a wrapper around it, where Megatron looks the function up by name.

    Args:
        module: Full name of a Megatron module.
        name: A function of it.
        make_wrapper: Gets the original, returns its replacement.

    Raises:
        UnsupportedMegatronError: If this Megatron has no such function.
    """
    original = require(module, name)
    setattr(importlib.import_module(module), name, functools.update_wrapper(make_wrapper(original), original))


def wrap_method(owner: type, name: str, make_wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a method of a class of Megatron by a wrapper around it.

    Raises:
        UnsupportedMegatronError: If the class has no such method.
    """
    original = getattr(owner, name, None)
    if original is None:
        raise UnsupportedMegatronError(_missing(f"{owner.__module__}.{owner.__name__}", name, "no such method"))
    setattr(owner, name, functools.update_wrapper(make_wrapper(original), original))


@contextlib.contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a module or an object has other attributes; those of its class are only hidden.

    Args:
        owner: Of the attributes.
        values: By the attributes' names.
    """
    hidden = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(hidden)


def megatron_args() -> Any:
    """Megatron's arguments of the training under way."""
    return require("megatron.training.global_vars", "get_args")()


def _missing(owner: str, name: str, error: object) -> str:
    return (
        f"pier_megatron needs {owner}.{name}, which Megatron {_version_or_unknown()} does not have ({error}). "
        f"Supported releases: {', '.join(SUPPORTED)}. Install one of them, for example "
        f"pip install 'megatron-core=={SUPPORTED[-1]}.*', or check that the Megatron-LM checkout on PYTHONPATH is one."
    )


def _version_or_unknown() -> str:
    try:
        return megatron_version()
    except (ImportError, AttributeError):
        return "(not found: is megatron-core installed?)"
