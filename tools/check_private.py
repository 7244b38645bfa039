"""Refuses tests that read what the package keeps to itself: ``python tools/check_private.py PACKAGE TESTS``.

A name with one underscore that the package defines is private to its module. Tests that know it break with every change inside,
and say nothing of what a user sees.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# What others call so, too.
_OF_OTHERS = {"_PARTS", "_actions", "_get_backend", "_quorum", "_timeout"}

# It plants bugs, which are inside.
_SABOTAGE = "sabotage.py"


def main() -> int:
    """Prints each place; returns 1 if there are any."""
    package, tests = map(Path, sys.argv[1:])
    private = {name for path in package.rglob("*.py") for name in _defined(ast.parse(path.read_text()))} - _OF_OTHERS
    found = [
        f"{path}:{line}: {name} is private to {package.name}"
        for path in sorted(tests.rglob("*.py"))
        if path.name != _SABOTAGE
        for line, name in _read(ast.parse(path.read_text()), package.name)
        if name in private
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _read(module: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Private names that a test imports of the package, or reads of anything but itself."""
    own = {*_defined(module)}
    imports = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    foreign = {
        alias.asname or alias.name
        for node in imports
        for alias in node.names
        if not str(getattr(node, "module", alias.name)).startswith(package)
    }
    for node in ast.walk(module):
        match node:
            case ast.ImportFrom(module=str(source), names=names) if source.partition(".")[0] == package:
                yield from ((node.lineno, alias.name) for alias in names if _is_private(alias.name))
            case ast.Attribute(value=ast.Name(id=name)) if name in ("self", "cls") or name in foreign:
                pass
            case ast.Attribute(attr=name) if _is_private(name) and name not in own:
                yield node.lineno, name


if __name__ == "__main__":
    sys.exit(main())
