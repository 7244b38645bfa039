"""Seams: functions that wrap one of Megatron's, their descriptions, and their installation together."""

import argparse
import dataclasses
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable

from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.args import uses_pier

# Attribute that marks a function as installed by a row.
_MARK = "_pier_seam"


@dataclasses.dataclass(frozen=True)
class Seam:
    """A function that is put around one of Megatron's, where Megatron looks it up by name.

    Attributes:
        module: Full name of a Megatron module.
        name: Name of the function, or of a method as ``RerunStateMachine._reduce_any``.
        around: Function called in its place, with the original and then its arguments. Names of arguments that come before
            those must be positional only. Its docstring says why.
        is_outermost: Whether it wraps whatever earlier rows have put there. Any other one must be the first.
        is_imported: Whether modules that have imported the function by name get the wrapper as well.
        used_by: Whether a run with some arguments needs it; by default, if it trains with Pier.
        since: First release that has the function; None if all supported ones until then do.
        until: Last release that has the function; None if the newest one does, so that the next one is expected to.
    """

    module: str
    name: str
    around: Callable[..., object]
    is_outermost: bool = False
    is_imported: bool = False
    used_by: Callable[[argparse.Namespace], bool] = uses_pier
    since: str | None = None
    until: str | None = None

    @property
    def exists(self) -> bool:
        """Whether this release has the function."""
        return versions.is_between(self.since, self.until)

    @property
    def is_installed(self) -> bool:
        """Whether the function is in place: two training loops may share what is replaced beneath them."""
        try:
            found = self.original()
        except versions.UnsupportedMegatronError:
            return False
        while hasattr(found, "__wrapped__"):
            if vars(found).get(_MARK) == self:
                return True
            found = found.__wrapped__
        return False

    def original(self) -> Callable[..., object]:
        """Returns the present function.

        Raises:
            UnsupportedMegatronError: If there is none.
        """
        module = importlib.import_module(self.module)
        found: Callable[..., object] = versions.require(self.module, self.name)
        owner, _, attribute = self.name.rpartition(".")
        if owner and attribute not in vars(operator.attrgetter(owner)(module)):
            raise versions.missing(f"{self.module}.{self.name} itself, not that of a base class")
        return found

    def install(self) -> None:
        """Puts the function in place."""
        original = self.original()
        called = _with_signature(original, _signature_of(self))

        @functools.wraps(original)
        def wrapper(*args: object, **kwargs: object) -> object:
            return self.around(called, *args, **kwargs)

        vars(wrapper)[_MARK] = self
        *path, attribute = self.name.split(".")
        setattr(functools.reduce(getattr, path, importlib.import_module(self.module)), attribute, wrapper)
        if self.is_imported:
            for module in [*sys.modules.values()]:
                if getattr(module, "__dict__", {}).get(attribute) is original:
                    setattr(module, attribute, wrapper)


@dataclasses.dataclass(frozen=True)
class Needed:
    """Symbols that Pier looks up by name while it runs.

    Attributes:
        module: Full name of a Megatron module.
        names: Names in it, separated by spaces.
        since: First release that has them; None if all supported ones do.
    """

    module: str
    names: str
    since: str | None = None

    @property
    def exist(self) -> bool:
        """Whether this release has the symbols."""
        return versions.is_between(self.since, None)


@functools.cache
def _signature_of(seam: Seam) -> inspect.Signature:
    """How the function is called, when it is first asked for: before the training script may have replaced it."""
    return inspect.signature(seam.original())


def _with_signature(function: Callable[..., object], signature: inspect.Signature) -> Callable[..., object]:
    if inspect.signature(function) == signature:
        return function

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    vars(called)["__signature__"] = signature
    return called


def check_there(seams: Iterable[Seam]) -> None:
    """Looks for every function that a run might replace, and how it is called.

    Raises:
        UnsupportedMegatronError: If this Megatron lacks one.
    """
    for seam in seams:
        if seam.exists:
            seam.original()
            _signature_of(seam)


class SeamOrderError(RuntimeError):
    """Two functions are put around the same one of Megatron's in an order in which they do not work."""


def install(seams: Iterable[Seam]) -> None:
    """Replaces Megatron's functions: all of them, or none if one is missing.

    Raises:
        UnsupportedMegatronError: If this Megatron lacks a function.
        SeamOrderError: If a function would be put around that of another row, and does not say so.
    """
    present = [seam for seam in seams if seam.exists and not seam.is_installed]
    wrapped: dict[tuple[str, str], Seam] = {}
    for seam in present:
        seam.original()
        beneath = wrapped.setdefault((seam.module, seam.name), seam)
        if beneath is not seam and not seam.is_outermost:
            first, second = (f"{row.around.__module__}.{row.around.__qualname__}" for row in (beneath, seam))
            raise SeamOrderError(f"{second} would be put around {first}, which is around {seam.module}.{seam.name}.")
    for seam in present:
        seam.install()
