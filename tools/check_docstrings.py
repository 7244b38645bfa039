"""Finds descriptions in docstrings that begin without their noun, where "Seed of the pairing" says more than "Of it".

Looks at the first words of a docstring, a variable's too, at each entry of the sections Args, Attributes, Returns and Yields of
Google's style, and at the help of flags.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_SECTIONS = ("Args:", "Attributes:", "Returns:", "Yields:")
_CLIPPED = re.compile(r"(Of|For|As|That|Whose|Who|When|Where|Which|In which|By which|To|From|With|At|On|By) ", re.IGNORECASE)
_CLIPPED_HELP = re.compile(r"((Of|For|As|That|Whose|When|By)|(After|Among|At|By|From|In|On|To|With) which) ", re.IGNORECASE)
_HELPERS = ("add_argument", "setting")


def clipped(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each description of a file that begins without its noun."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            line = node.body[0].lineno if node.body else 1
            for offset, text in _described(ast.get_docstring(node) or ""):
                if _CLIPPED.match(text):
                    yield line + offset, text
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if _CLIPPED_HELP.match(text := node.value.value.partition("\n")[0]):
                yield node.lineno, text
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in _HELPERS:
            for value in [keyword.value for keyword in node.keywords if keyword.arg == "help"] + node.args[1:2]:
                if isinstance(value, ast.Constant) and isinstance(value.value, str) and _CLIPPED_HELP.match(value.value):
                    yield value.lineno, value.value


def _described(docstring: str) -> Iterator[tuple[int, str]]:
    """Each first line of an entry in a section, without its name, and how far down it stands."""
    section = ""
    for offset, line in enumerate(docstring.splitlines()):
        if line and not line.startswith(" "):
            section = line if line in _SECTIONS else ""
            is_first = True
        elif section and line.startswith("    ") and not line.startswith("     "):
            named = re.match(r"    \*{0,2}\w+(?: \([^)]*\))?: (.*)", line)
            if named and section in ("Args:", "Attributes:"):
                yield offset, named[1]
            elif is_first and section in ("Returns:", "Yields:"):
                yield offset, line.strip()
            is_first = False


def main() -> int:
    """Prints what it finds in the folders of the command line; returns 1 if there is anything."""
    found = [(path, *each) for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py")) for each in clipped(path)]
    for path, line, text in found:
        print(f"{path}:{line}: begins without its noun: {text}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
