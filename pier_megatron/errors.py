"""Refusals: errors of configuration, and the parts that their messages have in common."""

from collections.abc import Iterable


class PierConfigError(ValueError):
    """A setting with which Pier cannot work as the user would expect.

    Its message names the flag, its value, the arithmetic and a remedy, because it is read at 3 a.m. next to a failed job.
    """


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


def suggestion(word: str, known: Iterable[str]) -> str:
    """The question whether a known word was meant, or nothing if none is like the unknown one.

    argparse asks by itself from Python 3.14 on.
    """
    # Here, because a command that is well typed does not need it.
    import difflib

    found = difflib.get_close_matches(word.partition("=")[0], list(known), n=1)
    return f". Did you mean {found[0]}?" if found else ""
