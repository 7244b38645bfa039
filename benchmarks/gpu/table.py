"""What a GPU run found: rows, kept as JSON by part, shown as Markdown."""

import dataclasses
import datetime
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
"""Between them a document shows the table."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    Attributes:
        what: Name of the thing.
        result: Finding.
        status: ``ok``, ``failed``, ``skipped``, or ``measured`` where nothing can fail.
        why: Reason for a failure or a skip.
    """

    what: str
    result: str = ""
    status: str = "measured"
    why: str = ""


class SkippedError(Exception):
    """A check cannot be made here; the text says why."""


Rows = Iterator[Row]


def checked(what: str, is_right: bool, result: str, why: str = "") -> Row:
    """A row that says whether something is as it must be."""
    return Row(what, result, "ok", "") if is_right else Row(what, result, "failed", why)


class Results:
    """Rows by part and check, in a file, which remains if the run ends early."""

    def __init__(self, path: Path) -> None:
        """Continues with what the file holds, if there is one."""
        self._path = path
        self.parts: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def begin(self, part: str, about: dict[str, str], forgets: bool) -> None:
        """Begins a part, which ``forgets`` what it has found before or replaces some of it."""
        kept = {} if forgets or part not in self.parts else self.parts[part]["checks"]
        self.parts[part] = {"about": about | {"date": datetime.date.today().isoformat()}, "checks": kept}
        self._write()

    def add(self, part: str, check: str, rows: list[Row]) -> None:
        """Keeps what a check has found."""
        self.parts[part]["checks"][check] = [dataclasses.asdict(row) for row in rows]
        self._write()

    def end(self, part: str) -> None:
        """Notes that all checks of a part have been made."""
        self.parts[part]["ended"] = True
        self._write()

    def unfinished(self, parts: Iterable[str], about: Mapping[str, str]) -> list[str]:
        """Those that have not ended on this device with this PyTorch, in order."""

        def has_ended(part: str) -> bool:
            found = self.parts.get(part, {})
            alike = all(found.get("about", {}).get(name) == about[name] for name in ("device", "PyTorch"))
            return alike and bool(found.get("ended"))

        return [part for part in parts if not has_ended(part)]

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, json.dumps(self.parts, indent=1) + "\n")
        write_whole(self._path.with_suffix(".md"), self.markdown())

    def backend(self, device: str, pytorch: str) -> str | None:
        """What ranks talked over in an earlier run on this device with this PyTorch, if there was one."""
        found = [part["about"] for part in self.parts.values()]
        return next((of["ranks over"] for of in found if (of["device"], of["PyTorch"]) == (device, pytorch)), None)

    def failed(self) -> list[str]:
        """What has failed in any part."""
        found = [Row(**row) for part in self.parts.values() for rows in part["checks"].values() for row in rows]
        return [f"{row.what}: {row.why}" for row in found if row.status == "failed"]

    def markdown(self) -> str:
        """The tables of all parts."""
        lines = []
        for part, found in sorted(self.parts.items()):
            about = ", ".join(f"{name} {value}" for name, value in found["about"].items() if name != "command")
            lines += [f"### Part {part}", "", about, "", f"`{found['about']['command']}`", ""]
            lines += ["| check | what | result | |", "|---|---|---|---|"]
            for check, rows in found["checks"].items():
                for row in (Row(**row) for row in rows):
                    status = f"{row.status}: {row.why}" if row.why else row.status
                    lines.append("| " + " | ".join(map(_cell, (check, row.what, row.result, status))) + " |")
            lines.append("")
        return "\n".join(lines)

    def write_into(self, document: Path) -> None:
        """Shows the tables between the marks of a document."""
        before, rest = document.read_text().split(BEGIN)
        _, after = rest.split(END)
        document.write_text(f"{before}{BEGIN}\n\n{self.markdown()}\n{END}{after}")


def write_whole(path: Path, text: str) -> None:
    """Writes a file that another process reads whole, or as it was before, even if this one is ended meanwhile."""
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_text(text)
    os.replace(new, path)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
