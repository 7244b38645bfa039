"""The text of a training script and of the modules that it imports, by way of the user's own, without running any of it."""

import ast
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pier_megatron.commands.launch_command import LaunchCommand


@dataclasses.dataclass(frozen=True)
class ScriptSources:
    """What a script says.

    Attributes:
        script: Its file; None if there is none.
        texts: File and text of the script and of each module that it imports, packages on the way among them.
    """

    script: Path | None
    texts: dict[Path, str]

    @classmethod
    def of(cls, command: LaunchCommand) -> "ScriptSources":
        """Reads the script of a job."""
        if command.is_module:
            script = _file(command.script.split("."), [Path.cwd(), *map(Path, sys.path)])
        else:
            script = Path(command.script) if Path(command.script).is_file() else None
        if script is None:
            return cls(None, {})
        texts = {script: _text(script)}
        roots = [script.resolve().parent, *map(Path, sys.path)]
        pending = [script]
        while pending:
            importing = pending.pop()
            for level, module in _imported(texts[importing]):
                parts = module.split(".")
                if parts[0] == "pier_megatron":
                    continue
                folders = [importing.resolve().parents[level - 1]] if level else roots
                # The packages around it are imported, too.
                for length in range(1, len(parts) + 1):
                    file = _file(parts[:length], folders)
                    if file and file not in texts:
                        texts[file] = _text(file)
                        pending += [file] if _is_of_the_user(parts[0], file) else []
        return cls(script, texts)

    def files_with(self, *words: str) -> list[Path]:
        """Files that contain all of the words."""
        return [file for file, text in self.texts.items() if all(word in text for word in words)]


def _imported(text: str) -> Iterator[tuple[int, str]]:
    """Level and name of modules that a file may import; of ``from a import b`` that is a, and a.b in case it is a module."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            within = [node.module] if node.module else []
            yield from ((node.level, name) for name in within)
            yield from ((node.level, ".".join([*within, alias.name])) for alias in node.names)


def _is_of_the_user(package: str, file: Path) -> bool:
    """Whether to look at what a file imports in turn: hundreds of Megatron's and of installed ones would take seconds."""
    return package not in (*sys.stdlib_module_names, "megatron") and "site-packages" not in file.parts


def _file(parts: Sequence[str], roots: Iterable[Path]) -> Path | None:
    """File of a module or a package, in the first folder that has it."""
    name = Path(*parts)
    places = (root / place for root in roots for place in (name.with_suffix(".py"), name / "__init__.py"))
    return next(filter(Path.is_file, places), None)


def _text(file: Path) -> str:
    return file.read_text(errors="replace")
