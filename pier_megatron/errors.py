"""Refusals: errors of configuration, and the parts that their messages have in common."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator


class PierConfigError(ValueError):
    """Settings with which Pier cannot work as the user would expect, a message each.

    A message names the flag, its value, the arithmetic and a remedy, because it is read at 3 a.m. next to a failed job.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


@dataclasses.dataclass
class Problems:
    """Messages of several checks, so that the user reads all of them after one start.

    Attributes:
        found: The messages.
    """

    found: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Keeps the messages of a refusal, so that the next check still runs."""
        try:
            yield
        except PierConfigError as error:
            self.found += [str(message) for message in error.args if message not in self.found]

    def report(self) -> None:
        """Raises one error with all messages, if there are any."""
        if self.found:
            raise PierConfigError(*self.found)


def division(value: int, by: int) -> str:
    """Writes a division with its remainder, as messages show it."""
    return f"{value} = {value // by} x {by} + {value % by}"


def no_multiple(given: str, value: int, interval: int, why: str, remedy: str = "") -> PierConfigError:
    """The error for an interval, ``given`` as a flag and its value, that is no multiple of the sync interval."""
    lower = value // interval * interval
    return PierConfigError(
        f"{given} is no multiple of --pier-sync-interval {interval} ({division(value, interval)}): {why}. "
        f"Use {f'{lower} or ' if lower else ''}{lower + interval}{remedy}."
    )


# More flags with the same beginning than this are no help.
_MOST_MEANT = 3


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> list[str]:
    """Known words that an unknown one may mean: those that begin with it; if there are none, the most similar one.

    Args:
        word: The unknown one.
        known: All that it may mean.
        likeness: Share of letters in common from which on a word is similar, 0 to 1.
    """
    # Here, because a command that is well typed does not need it.
    import difflib

    name, known = word.partition("=")[0], list(known)
    longer = [each for each in known if each.startswith(name)]
    return longer if 0 < len(longer) <= _MOST_MEANT else difflib.get_close_matches(name, known, n=1, cutoff=likeness)


def hint(meant: Iterable[str]) -> str:
    """The question whether one of some words was meant, or nothing if there are none."""
    said = " or ".join(meant)
    return f". Did you mean {said}?" if said else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """The question whether a known word was meant, or nothing if none is like the unknown one.

    argparse asks by itself from Python 3.14 on.
    """
    return hint(nearest(word, known))
