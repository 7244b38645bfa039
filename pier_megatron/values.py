"""The numbers and paths that flags accept: declared beside the flag, checked when it is parsed, before anything is imported."""

import argparse
import dataclasses
import math
from pathlib import Path


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
        """Parses ``text``.

        Raises:
            argparse.ArgumentTypeError: If it is no such number; argparse adds the flag.
        """
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if problem := self.problem(value):
            raise argparse.ArgumentTypeError(f"{text or '(empty)'}: {problem}")
        return value

    def problem(self, value: float) -> str | None:
        """What is wrong with ``value`` and why, or None if it is accepted."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if above and below and math.isfinite(value):
            return None
        return f"must be {self}" + (f", {self.why}" if self.why else "")

    def __str__(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        if math.isinf(self.low) and math.isinf(self.high):
            return noun
        if math.isinf(self.high):
            return f"{noun} above {self.low:g}" if self.open_low else f"{noun} of at least {self.low:g}"
        low, high = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"{noun} in {low}{self.low:.15g}, {self.high:.15g}{high}"


def whole(low: int = 1, high: float = math.inf, why: str = "") -> Number:
    """Whole numbers from ``low`` to ``high``, both included."""
    return Number(int, low, high, why=why)


def positive(high: float = math.inf, why: str = "") -> Number:
    """Numbers above 0, up to ``high``."""
    return Number(float, 0.0, high, open_low=True, why=why)


def existing_file(text: str) -> Path:
    """Path of a file that can be read, as the ``type`` of an argparse argument.

    Raises:
        argparse.ArgumentTypeError: If there is none, or it is no file.
    """
    path = Path(text)
    if not path.is_file():
        what = "a folder, not a file" if path.is_dir() else "no such file"
        raise argparse.ArgumentTypeError(f"{text or '(empty)'}: {what}")
    return path


def existing_folder(text: str) -> Path:
    """Path of a folder, as :func:`existing_file`."""
    path = Path(text)
    if not text or not path.is_dir():
        what = "a file, not a folder" if path.is_file() else "no such folder"
        raise argparse.ArgumentTypeError(f"{text or '(empty)'}: {what}")
    return path
