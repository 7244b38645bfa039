"""The text of a training script and of the modules that it imports, without running any of it."""

import ast
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pier_megatron.commands.launch_command import LaunchCommand


@dataclasses.dataclass(frozen=True)
class Sources:
    """What a script says.

    Attributes:
        script: Its file; None if there is none.
        texts: For the script and each module that it imports, file and text; packages on the way among them.
    """

    script: Path | None
    texts: dict[Path, str]

    @classmethod
    def of(cls, command: LaunchCommand) -> "Sources":
        """Reads the script of a job."""
        if command.is_module:
            script = _file(command.script.split("."), [Path.cwd(), *map(Path, sys.path)])
        else:
            script = Path(command.script) if Path(command.script).is_file() else None
        if script is None:
            return cls(None, {})
        texts = {script: _text(script)}
        roots = [script.resolve().parent, *map(Path, sys.path)]
        for module in _imported(texts[script]):
            parts = module.split(".")
            if parts[0] == "pier_megatron":
                continue
            # The packages around it are imported, too.
            for length in range(1, len(parts) + 1):
                file = _file(parts[:length], roots)
                if file:
                    texts.setdefault(file, _text(file))
        return cls(script, texts)

    def files_with(self, *words: str) -> list[Path]:
        """Files that contain all of the words."""
        return [file for file, text in self.texts.items() if all(word in text for word in words)]


def _imported(text: str) -> Iterator[str]:
    """Full names of what a script may import; of ``from a import b`` that is a, and a.b in case it is a module."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file(parts: Sequence[str], roots: Iterable[Path]) -> Path | None:
    """File of a module or a package, in the first folder that has it."""
    name = Path(*parts)
    places = (root / place for root in roots for place in (name.with_suffix(".py"), name / "__init__.py"))
    return next(filter(Path.is_file, places), None)


def _text(file: Path) -> str:
    return file.read_text(errors="replace")
