"""Which symbols of Megatron's the package looks up by name, read from its source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pier_megatron

_FOLDER = Path(pier_megatron.__file__).parent
_MODULES = {"parallel_state": "megatron.core.parallel_state"}


def looked_up() -> dict[str, str]:
    """Where each symbol is looked up, by its full name.

    Raises:
        AssertionError: If a name is not a constant that can be read here.
    """
    found: dict[str, str] = {}
    for path in sorted(_FOLDER.rglob("*.py")):
        if path.stem in ("seam", "seams", "versions"):
            continue
        tree = ast.parse(path.read_text())
        constants = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
                constants[node.targets[0].id] = node.value.value
        for node in ast.walk(tree):
            for symbol in _of_node(node, constants, path):
                found[symbol] = f"{path.relative_to(_FOLDER)}:{node.lineno}"  # type: ignore[attr-defined]
    return found


def _of_node(node: ast.AST, constants: dict[str, str], path: Path) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="versions"), attr="require"), args=[module, name]):
            yield f"{_text(module, constants, path)}.{_text(name, constants, path)}"
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in _MODULES:
            yield f"{_MODULES[owner]}.{name}"


def _text(node: ast.expr, constants: dict[str, str], path: Path) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.JoinedStr(values=parts):
            expressions = (part.value if isinstance(part, ast.FormattedValue) else part for part in parts)
            return "".join(_text(part, constants, path) for part in expressions)
    raise AssertionError(f"{path}:{node.lineno}: {ast.unparse(node)} cannot be read without running it")
