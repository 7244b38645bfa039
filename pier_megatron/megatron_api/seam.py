"""A function that is put around one of Megatron's: what it says of itself, and how many of them are installed together."""

import dataclasses
import functools
import importlib
import operator
from collections.abc import Callable, Iterable

from pier_megatron.megatron_api import versions

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
        over: Function that an earlier row has put around the same one; None if there is none.
        is_outermost: Whether it wraps whatever earlier rows have put there; ``over`` then does not count.
        since: First release that has the function; None if all supported ones until then do.
        until: Last release that has the function; None if the newest one does, so that the next one is expected to.
        imported_by: Module that imports the function by name in some releases.
    """

    module: str
    name: str
    around: Callable[..., object]
    over: Callable[..., object] | None = None
    is_outermost: bool = False
    since: str | None = None
    until: str | None = None
    imported_by: str | None = None

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
        """Returns the function that is there.

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

        @functools.wraps(original)
        def wrapper(*args: object, **kwargs: object) -> object:
            return self.around(original, *args, **kwargs)

        vars(wrapper)[_MARK] = self
        *path, attribute = self.name.split(".")
        owners = [functools.reduce(getattr, path, importlib.import_module(self.module))]
        if self.imported_by is not None and hasattr(other := importlib.import_module(self.imported_by), attribute):
            owners.append(other)
        for owner in owners:
            setattr(owner, attribute, wrapper)


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


class SeamOrderError(RuntimeError):
    """Two functions are put around the same one of Megatron's in an order in which they do not work."""


def install(seams: Iterable[Seam]) -> None:
    """Replaces Megatron's functions: all of them, or none if one of them is not there.

    Raises:
        UnsupportedMegatronError: If this Megatron lacks a function.
        SeamOrderError: If a function would be put around another one than its row says.
    """
    present = [seam for seam in seams if seam.exists and not seam.is_installed]
    outermost: dict[tuple[str, str], Callable[..., object]] = {}
    for seam in present:
        seam.original()
        symbol = seam.module, seam.name
        if not seam.is_outermost and outermost.get(symbol) is not seam.over:
            beneath, expected = (
                "nothing" if function is None else f"{function.__module__}.{function.__qualname__}"
                for function in (outermost.get(symbol), seam.over)
            )
            raise SeamOrderError(
                f"{seam.around.__module__}.{seam.around.__qualname__} around {seam.module}.{seam.name} finds {beneath} there, "
                f"must find {expected}: the rows of the table of seams are out of order."
            )
        outermost[symbol] = seam.around
    for seam in present:
        seam.install()
