"""Which Megatron releases are supported, and how a seam takes hold of a symbol."""

import contextlib
import importlib
import inspect
import operator
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pier_megatron.megatron_api import run

# Tested in CI; CONTRIBUTING.md says how a release gets in here.
SUPPORTED = ("0.17", "0.18", "0.19")


class UnsupportedMegatronError(ImportError):
    """The installed Megatron lacks something that a seam needs."""


def megatron_version() -> str:
    """Returns the version of the megatron-core that this process imports, such as ``0.19.2``."""
    return str(importlib.import_module("megatron.core.package_info").__version__)


def release() -> str:
    """Returns the release of the megatron-core that this process imports, such as ``0.19``."""
    return ".".join(megatron_version().split(".")[:2])


def is_between(since: str | None, until: str | None, version: str | None = None) -> bool:
    """Whether a release is one from ``since`` to ``until``, both included; None is no bound, or this process's Megatron."""
    here = _numbers(release() if version is None else version)
    return (since is None or _numbers(since) <= here) and (until is None or here <= _numbers(until))


def _numbers(release: str) -> tuple[int, ...]:
    # A candidate of a release is called 0.20rc0, too.
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


def require(module: str, name: str) -> Any:
    """Returns ``module.name``; the name may be that of a method, such as ``RerunStateMachine._reduce_any``.

    Raises:
        UnsupportedMegatronError: If this Megatron has no such symbol.
    """
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise missing(f"{module}.{name}", error) from error


def assign(owner: object, name: str, value: object) -> None:
    """Sets an attribute of one of Megatron's objects or modules.

    Raises:
        UnsupportedMegatronError: If it has no such attribute, so that nothing would read the value.
    """
    if not hasattr(owner, name):
        raise missing(f"{getattr(owner, '__name__', type(owner).__qualname__)}.{name}")
    setattr(owner, name, value)


@contextlib.contextmanager
def replaced(owner: object, values: Mapping[str, object]) -> Iterator[None]:
    """Inside, a module or an object has other values of attributes; those of its class are only hidden.

    Raises:
        UnsupportedMegatronError: If it has no such attribute.
    """
    for name in values:
        if not hasattr(owner, name):
            raise missing(f"{getattr(owner, '__name__', type(owner).__qualname__)}.{name}")
    hidden = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        # At no moment without an attribute that another thread may ask for.
        vars(owner).update(hidden)
        for name in values.keys() - hidden.keys():
            del vars(owner)[name]


def given(function: Callable[..., object], args: Iterable[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of a call of one of Megatron's functions, by name, however they were passed."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def called_with[R](
    function: Callable[..., R], args: Iterable[object], kwargs: Mapping[str, object], changed: Mapping[str, object]
) -> R:
    """Calls one of Megatron's functions with some of its arguments changed, each passed as the caller has passed it."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.arguments.update(changed)
    return function(*bound.args, **bound.kwargs)


def is_training() -> bool:
    """Whether a training is under way, rather than a script that saves or loads a model without one."""
    return run.loop() is not None or require("megatron.training.global_vars", "_GLOBAL_ARGS") is not None


def megatron_args() -> Namespace:
    """Megatron's arguments of the training under way."""
    loop = run.loop()
    args: Namespace = require("megatron.training.global_vars", "get_args")() if loop is None else loop.arguments()
    return args


def with_megatron_args(values: Mapping[str, object]) -> contextlib.AbstractContextManager[None]:
    """Inside, some of these arguments have other values."""
    loop = run.loop()
    return replaced(megatron_args(), values) if loop is None else loop.with_arguments(values)


def missing(symbol: str, error: Exception | None = None) -> UnsupportedMegatronError:
    """Makes the error for a symbol that this Megatron does not have."""
    reason = "" if error is None else f" ({error})"
    return UnsupportedMegatronError(
        f"pier_megatron needs {symbol}, which Megatron {_version_or_unknown()} does not have{reason}. "
        f"Supported releases: {', '.join(SUPPORTED)}. Install one of them, for example "
        f"pip install 'megatron-core=={SUPPORTED[-1]}.*', or check that the Megatron-LM checkout on PYTHONPATH is one."
    )


def _version_or_unknown() -> str:
    try:
        return megatron_version()
    except (ImportError, AttributeError):
        return "(not found: is megatron-core installed?)"
