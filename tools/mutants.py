"""Plants small bugs, one at a time, runs the unit tests that reach them, and lists those that no test has seen.

``python tools/mutants.py [--number 200] [--seed 1] [FOLDER ...]``: in a copy of the package, which it changes and throws away;
folders and files below ``pier_megatron`` narrow the choice. A bug is one comparison, operator, number, truth value or ``not``
that is another, or a statement that is missing, on a line that a quick unit test runs. Lines that only launched trainings run
are counted, not tried. What the quick tests of its line do not see is tried on all unit tests and on those of the outer loop,
minutes each. A surviving bug has no visible effect, or a test is missing: read each.
"""

import argparse
import ast
import collections
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[1]
_PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
# Time for the tests of a bug, and how many of them run first.
_SECONDS, _FIRST = 120.0, 40

# What the bugs meet that those leave, and the time for it.
_REST, _SECONDS_OF_REST = ("tests/loop/test_loop.py", "tests/loop/test_crossings.py", "tests/unit"), 1200.0

_OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def main() -> int:
    """Prints the bugs that lived; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", metavar="FOLDER", help="folders and files below pier_megatron; by default, all")
    parser.add_argument("--number", type=int, default=200, help="bugs to plant (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of their choice (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        # Some tests ask as another user.
        Path(folder).chmod(0o755)
        shutil.copytree(_REPOSITORY, tree, ignore=shutil.ignore_patterns(".git", "runs", ".venv", "__pycache__", ".*_cache"))
        if not _pass(tree, _REST, _SECONDS_OF_REST):
            sys.exit(f"{' '.join(_REST)}: tests fail without any bug")
        reached = _tests_by_line(tree)
        bugs = list(_all_bugs(tree, options.places))
        tried = [(path, number) for path, number, line in bugs if (path, line) in reached]
        print(f"{len(bugs):,} bugs, {len(bugs) - len(tried):,} on lines that no quick unit test runs", flush=True)
        chosen = random.Random(options.seed).sample(tried, min(options.number, len(tried)))
        lived = []
        for number, bug in enumerate(chosen, start=1):
            lived += _outcome(tree, bug, reached)
            print(f"\r{number} of {len(chosen)} tried", end="", file=sys.stderr, flush=True)
    print(f"{len(lived)} of {len(chosen)} lived ({len(lived) / max(len(chosen), 1):.1%})")
    return int(bool(lived))


def _tests_by_line(tree: Path) -> dict[tuple[Path, int], list[str]]:
    """The tests that run each line of the package, by file and line."""
    import coverage

    command = [*_PYTEST, "-m", "not slow", "--cov=pier_megatron", "--cov-context=test", "--cov-report=", "tests/unit"]
    # It asks as another user, who cannot write what is measured.
    command.append("--ignore=tests/unit/test_values.py")
    subprocess.run(command, cwd=tree, env=_environment(tree), stdout=subprocess.DEVNULL, check=False)
    data = coverage.CoverageData(str(tree / ".coverage"))
    data.read()
    found: dict[tuple[Path, int], list[str]] = collections.defaultdict(list)
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = [context.partition("|")[0] for context in contexts if context]
            if tests:
                found[Path(file), line] = sorted(set(tests))
    return found


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def _all_bugs(tree: Path, places: Sequence[str]) -> Iterator[tuple[Path, int, int]]:
    """The bugs that can be planted: file, number among those of the file, and line."""
    package = tree / "pier_megatron"
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        if not places or any(name.startswith(place) for place in places):
            for number, (*_, line) in enumerate(_places(ast.parse(path.read_text()))):
                yield path, number, line


def _places(module: ast.Module) -> Iterator[tuple[ast.AST, str, object, int]]:
    """Nodes with an attribute to change, what it becomes, and their lines; docstrings, messages and types have none."""
    for node in ast.walk(module):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHERS:
            yield node, "ops", _with(node.ops, 0, _OTHERS[type(node.ops[0])]()), node.lineno
        elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _OTHERS and not _joins_texts(node):
            yield node, "op", _OTHERS[type(node.op)](), node.lineno
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "op", ast.UAdd(), node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "value", not node.value, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, "value", node.value + 1, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.With):
            for place, statement in enumerate(node.body):
                if isinstance(statement, ast.Expr | ast.AugAssign) and not _is_text(statement):
                    yield node, "body", _with(node.body, place, ast.copy_location(ast.Pass(), statement)), statement.lineno


def _with(nodes: Sequence[ast.AST], place: int, node: ast.AST) -> list[ast.AST]:
    return [*nodes[:place], node, *nodes[place + 1 :]]


def _joins_texts(node: ast.AST) -> bool:
    """Whether it makes a text, which is only told."""
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _planted(path: Path, number: int) -> tuple[str, int, str]:
    """The source with a bug; its line, and what it changes."""
    module = ast.parse(path.read_text())
    node, attribute, other, line = list(_places(module))[number]
    before = ast.unparse(node).splitlines()
    setattr(node, attribute, other)
    after = ast.unparse(node).splitlines()
    # A missing statement is shown itself.
    lost, new = next((pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]), (before[-1], "pass"))
    return ast.unparse(ast.fix_missing_locations(module)), line, f"{lost.strip()} -> {new.strip()}"


def _pass(tree: Path, tests: Sequence[str], seconds: float = _SECONDS) -> bool:
    """Whether all tests pass, in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        command, environment = [*_PYTEST, "-x", *tests], _environment(tree)
        ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=seconds, check=False)
        return ran.returncode == 0
    return False


def _outcome(tree: Path, bug: tuple[Path, int], reached: Mapping[tuple[Path, int], Sequence[str]]) -> list[str]:
    """The bug, which it prints, if it has lived; nothing if a test has failed."""
    path, number = bug
    source, line, change = _planted(path, number)
    tests = reached[path, line]
    files = collections.Counter(test.partition("::")[0] for test in tests)
    # Most bugs are seen by the tests that are about few lines.
    tests = sorted(tests, key=lambda test: (files[test.partition("::")[0]], test))
    whole = path.read_text()
    path.write_text(source)
    try:
        has_lived = all(_pass(tree, some) for some in (tests[:_FIRST], tests[_FIRST:]) if some)
        has_lived = has_lived and _pass(tree, _REST, _SECONDS_OF_REST)
    finally:
        path.write_text(whole)
    if not has_lived:
        return []
    told = f"{path.relative_to(tree)}:{line}: {change}"
    print(told, flush=True)
    return [told]


if __name__ == "__main__":
    sys.exit(main())
