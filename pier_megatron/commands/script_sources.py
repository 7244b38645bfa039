"""The text of a training script and of the modules that it imports, by way of the user's own, without running any of it."""

import ast
import dataclasses
import re
import sys
import sysconfig
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

    def may_add_unseen_flags(self) -> bool:
        """Whether a flag that stands in no text may still be the script's: by a name that is computed, or from elsewhere."""
        own = {file: text for file, text in self.texts.items() if _can_add(file)}
        literal, others = set[bool](), False
        for text in own.values():
            literal |= set(map(_names_its_flag, _calls_of(text, "add_argument")))
            others = others or "extra_args_provider" in text
        return self.script is None or False in literal or (others and not literal)

    def files_with(self, *words: str) -> list[Path]:
        """Files that contain all of the words."""
        return [file for file, text in self.texts.items() if all(word in text for word in words)]


def _can_add(file: Path) -> bool:
    """Whether flags in a file may be the script's own: those of Megatron's parser are known."""
    is_installed = "site-packages" in file.parts or file.is_relative_to(sysconfig.get_path("stdlib"))
    return not is_installed and not re.search(r"megatron/(core|training)/", file.as_posix())


def _calls_of(text: str, method: str) -> list[ast.Call]:
    """Calls of a method in a file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == method]


def _names_its_flag(call: ast.Call) -> bool:
    return bool(call.args) and all(isinstance(word, ast.Constant) for word in call.args)


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
