"""What is found of a job, and the verdict that follows from it."""

import contextlib
import dataclasses
from collections.abc import Iterator

from pier_megatron.errors import Problems


@dataclasses.dataclass
class Findings:
    """What is known of a job.

    Attributes:
        notes: What it will be, line by line.
        warnings: What its user may not want.
        errors: What keeps it from starting.
    """

    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Takes a refusal as an error of the job, so that the next check still runs."""
        with Problems(self.errors).collecting():
            yield

    def lines(self) -> list[str]:
        """All findings, errors last."""
        warnings = [f"WARNING: {warning}" for warning in self.warnings]
        return [*self.notes, *warnings, *(f"ERROR: {error}" for error in self.errors)]

    @property
    def verdict(self) -> str:
        """The last line."""
        if self.errors:
            return "will not start"
        number = len(self.warnings)
        return f"{number} {'warning' if number == 1 else 'warnings'}" if number else "OK"
