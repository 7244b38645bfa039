"""What flags accept: numbers, paths and addresses, declared with the flag and checked when it is parsed.

Nothing heavy is imported, so that a refusal comes at once.
"""

import argparse
import dataclasses
import ipaddress
import math
import os
import re
from collections.abc import Collection
from pathlib import Path

from pier_megatron.errors import suggestion
from pier_megatron.schedules import MUON, NESTEROV

LARGEST = 2**31 - 1
"""Largest count, which Megatron, NumPy and gloo keep in 32 bits."""

LAST_PORT = 65535

LONGEST = 366 * 24 * 3600
"""Longest time-out in seconds, a year; far beyond it, clocks overflow."""


class Removed(argparse.Action):
    """A flag that is no more; ``const`` is the refusal, which says what to do instead."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Refuses the flag as the parser refuses what is wrong."""
        parser.error(str(self.const))


@dataclasses.dataclass(frozen=True)
class Number:
    """Numbers in a range, as the ``type`` of an argparse argument.

    Attributes:
        kind: ``int`` or ``float``; NaN and infinity are never accepted.
        low: Smallest accepted value.
        high: Largest accepted value.
        open_low: Whether ``low`` itself is refused.
        open_high: Whether ``high`` itself is refused.
        why: Reason for the range or remedy, appended to the message.
    """

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    why: str = ""

    def __call__(self, text: str) -> int | float:
        """Parses ``text``, or raises an :class:`argparse.ArgumentTypeError`; argparse adds the flag."""
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if problem := self.problem(value):
            raise argparse.ArgumentTypeError(f"{_shown(text)}: {problem}")
        return value

    def problem(self, value: float) -> str | None:
        """What is wrong with ``value`` and why, or None if it is accepted."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        fits = self.kind is float or value == value // 1
        if above and below and fits and -math.inf < value < math.inf:
            return None
        return f"must be {self}" + (f", {self.why}" if self.why else "")

    def __str__(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        if math.isinf(self.low) and math.isinf(self.high):
            return noun
        if self.high >= LARGEST:
            least = f"above {self.low:g}" if self.open_low else f"of at least {self.low:g}"
            return f"{noun} {least}" + ("" if math.isinf(self.high) else f" and at most {self.high}")
        low, high = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"{noun} in {low}{self.low:.15g}, {self.high:.15g}{high}"


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """One of several names, as the ``type`` of an argparse argument.

    Attributes:
        names: Names that are accepted; of a mapping, those that it has when it is asked.
    """

    names: Collection[str]

    def __call__(self, text: str) -> str:
        """Parses ``text``, or raises an :class:`argparse.ArgumentTypeError`; argparse adds the flag."""
        if problem := self.problem(text):
            raise _refusal(text, problem)
        return text

    def problem(self, value: str) -> str | None:
        """What is wrong with ``value``, or None if it is accepted."""
        if value in self.names:
            return None
        return f"not one of {', '.join(self.names)}{suggestion(str(value), self.names)}"


def whole(low: int = 1, high: float = LARGEST, why: str = "") -> Number:
    """Whole numbers from ``low`` to ``high``, both included."""
    return Number(int, low, high, why=why)


def positive(high: float = math.inf, why: str = "") -> Number:
    """Numbers above 0, up to ``high``."""
    return Number(float, 0.0, high, open_low=True, why=why)


def share(why: str = "") -> Number:
    """Numbers from 0 on and below 1."""
    return Number(float, 0.0, 1.0, open_high=True, why=why)


def existing_file(text: str) -> Path:
    """Path of a file that can be read, or an :class:`argparse.ArgumentTypeError`, as from all functions that follow."""
    if not os.path.isfile(text):
        raise _refusal(text, "a folder, not a file" if os.path.isdir(text) else "no such file")
    if not os.access(text, os.R_OK, effective_ids=True):
        raise _refusal(text, "cannot be read by this user")
    return Path(text)


def is_in_object_store(path: str) -> bool:
    """Whether a path is not one of a file system."""
    return re.match(r"\w+://", path) is not None


def any_path(text: str) -> str:
    """Path that need not exist where it is parsed."""
    if not text:
        raise _refusal(text, "no path")
    return text


def function_name(text: str) -> str:
    """A function in a module, as ``recipes:llama_tiny``."""
    return _in_module(text, "a function in it, such as recipes:llama_tiny")


OUTER_RULES = (NESTEROV, MUON)
"""Rules of outer steps that have a name."""


def outer_rule(text: str) -> str:
    """One of these, or a class in a module, as ``my_rules:HeavyBall``."""
    if text in OUTER_RULES:
        return text
    if ":" not in text:
        raise _refusal(text, f"neither {' nor '.join(OUTER_RULES)}, nor a class{suggestion(text, OUTER_RULES)}")
    return _in_module(text, "a class in it, such as my_rules:HeavyBall")


def _in_module(text: str, what: str) -> str:
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", text):
        raise _refusal(text, f"not the name of a module and {what}")
    return text


def existing_folder(text: str) -> Path:
    """Path of a folder that can be read."""
    if not os.path.isdir(text):
        raise _refusal(text, "a file, not a folder" if os.path.isfile(text) else "no such folder")
    if not os.access(text, os.R_OK | os.X_OK, effective_ids=True):
        raise _refusal(text, "cannot be read by this user")
    return Path(text)


def folder_to_write(text: str) -> Path:
    """Path of a folder that exists or can be made."""
    if not text:
        raise _refusal(text, "name a folder")
    _check_can_be_made(text, Path(text))
    return Path(text)


def file_to_write(text: str) -> Path:
    """Path of a file that exists or can be made."""
    if not text or os.path.isdir(text):
        raise _refusal(text, "a folder, not a file" if text else "name a file")
    _check_can_be_made(text, Path(text).parent)
    if os.path.exists(text) and not os.access(text, os.W_OK, effective_ids=True):
        raise _refusal(text, "this user cannot write to it")
    return Path(text)


def png_to_write(text: str) -> Path:
    """Path of a picture that exists or can be made."""
    if text and not text.endswith(".png"):
        raise _refusal(text, "must end in .png")
    return file_to_write(text)


def _check_can_be_made(text: str, folder: Path) -> None:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        raise _refusal(text, f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        raise _refusal(text, f"this user cannot write to {there}")


def address(text: str) -> str:
    """IP address or name of a node."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.rstrip(".").split(".")
        # A name that ends in digits would be taken for an address.
        if labels[-1].isdigit() or not all(re.fullmatch(r"[A-Za-z0-9]([\w-]{0,61}\w)?", label) for label in labels):
            raise _refusal(text, "must be an IP address or a host name, such as 10.0.0.1") from None
    return text


def url(text: str) -> str:
    """Address and port as ``http://HOST:PORT``."""
    found = re.fullmatch(r"https?://(?:\[(.+)\]|([^:/\[\]]+)):(\d{1,5})/?", text)
    if found is None or int(found[3]) > LAST_PORT:
        raise _refusal(text, "must be http://ADDRESS:PORT, such as http://10.0.0.1:29510")
    address(found[1] or found[2])
    return text


def numbers(text: str) -> str:
    """Whole numbers with commas between them."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise _refusal(text, "must be numbers with commas between them, as in 1,2,5")
    return text


def _refusal(text: str, what: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{_shown(text)}: {what}")


def _shown(text: str) -> str:
    return text or "(empty)"
