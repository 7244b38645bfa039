"""Plants small bugs, one at a time, runs the tests that reach them, and lists those that no test has seen.

``python tools/mutants.py [--number 200] [--seed 1] [--log FILE] [PLACE ...]``: in copies of the repository, which it changes
and throws away; folders and files below ``pier_megatron`` narrow the choice, which leaves out ``experiments``. A bug is one
comparison, operator, number, truth value or ``not`` that is another, or a statement that is missing; the rest of the file
stays as it is, to the letter.

First each file of tests runs without any bug, and shows which lines it reaches, also in the processes that it starts: one that
fails is left out, and named. Then a bug meets the quick unit tests of its line, and, if they pass, each file that reaches it,
the quickest first. It is ``seen`` when a test fails, and ``lives`` when all pass; on a line that no test runs it is
``unreached``; where a test did not end in time it is ``unknown``. The log keeps each outcome, and a second call continues:
200 bugs are a night. A bug that lives has no visible effect, or a test is missing: read each.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import coverage

_REPOSITORY = Path(__file__).resolve().parents[1]
_PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
_FOLDERS = ("unit", "processes", "loop", "distributed", "end_to_end", "pages")

# Time for quick unit tests, for a file of tests in relation to its time without a bug, and for all that one bug meets.
_SECONDS, _FACTOR, _SECONDS_OF_BUG = 120.0, 4.0, 1800.0

# What runs a line, in the processes that tests start too, which end in many ways. The context is the file of tests.
_COVERAGE = """
[run]
parallel = true
sigterm = true
patch = subprocess, fork, _exit
context = ${REACHED_BY}
source = {source}
data_file = {data}
"""

_TOKENS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}


@dataclasses.dataclass(frozen=True)
class Bug:
    """What a file becomes: the bytes from ``start`` to ``end`` are others."""

    path: str
    line: int
    start: int
    end: int
    new: str


@dataclasses.dataclass(frozen=True)
class Reach:
    """What the run without any bug has shown: seconds of each file of tests, and what runs a line (file, line)."""

    seconds: Mapping[str, float]
    quick: Mapping[tuple[str, int], Collection[str]]
    files: Mapping[tuple[str, int], Collection[str]]


def main() -> int:
    """Prints the bugs that were not seen, and a table by folder; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "places", nargs="*", metavar="PLACE", help="folders and files below pier_megatron; by default, the core"
    )
    parser.add_argument("--number", type=int, default=200, help="bugs to plant (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of their choice (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time (%(default)s)")
    parser.add_argument("--log", type=Path, default=_REPOSITORY / "runs" / "mutants.jsonl", help="outcomes (%(default)s)")
    options = parser.parse_args()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # Some tests ask as another user.
        Path(folder).chmod(0o755)
        trees = [_copy(Path(folder) / f"tree-{number}") for number in range(options.jobs)]
        bugs = list(_all_bugs(trees[0], options.places))
        chosen = random.Random(options.seed).sample(bugs, min(options.number, len(bugs)))
        print(f"{len(bugs):,} bugs can be planted, {len(chosen)} are tried", flush=True)
        reach = _reach(trees, options.log.with_suffix(".reach.json"))
        outcomes = _try_all(chosen, trees, reach, options.log)
    return _report(outcomes)


def _copy(tree: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", "runs", ".venv", "__pycache__", ".*_cache")
    shutil.copytree(_REPOSITORY, tree, ignore=ignored)
    # Some tests ask for the other releases of Megatron, by their folder.
    if (_REPOSITORY / ".venv").exists():
        (tree / ".venv").symlink_to(_REPOSITORY / ".venv")
    return tree


def _all_bugs(tree: Path, places: Sequence[str]) -> Iterator[Bug]:
    package = tree / "pier_megatron"
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        if any(name.startswith(place) for place in places) if places else not name.startswith("experiments"):
            yield from _bugs_of(str(path.relative_to(tree)), path.read_bytes())


def _bugs_of(name: str, source: bytes) -> Iterator[Bug]:
    """The bugs of a file; docstrings, types, and texts that are put together have none."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def begin(node: ast.AST) -> int:
        return starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(node: ast.AST) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def between(left: ast.AST, right: ast.AST, operator: ast.AST) -> Iterator[Bug]:
        if type(operator) in _TOKENS:
            pattern, new = _TOKENS[type(operator)]
            found = re.search(pattern.encode(), source[end(left) : begin(right)])
            if found is not None:
                at = end(left)
                yield Bug(name, left.end_lineno, at + found.start(), at + found.end(), new)  # type: ignore[attr-defined]

    for node in _without_messages(ast.parse(source)):
        if isinstance(node, ast.Compare):
            yield from between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.AugAssign):
            yield from between(node.target, node.value, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Bug(name, node.lineno, begin(node), begin(node), "not ")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            new = repr(not node.value) if isinstance(node.value, bool) else repr(node.value + 1)
            yield Bug(name, node.lineno, begin(node), end(node), new)
        elif isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.With):
            for statement in node.body:
                if isinstance(statement, ast.Expr | ast.AugAssign) and not _is_text(statement):
                    yield Bug(name, statement.lineno, begin(statement), end(statement), "pass")


def _without_messages(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, but not those of what is only told: texts that are put together, and when they are shown."""
    yield node
    for child in ast.iter_child_nodes(node):
        is_told = isinstance(child, ast.JoinedStr) or (isinstance(child, ast.keyword) and child.arg == "flush")
        joins_texts = isinstance(child, ast.BinOp) and any(
            isinstance(part, ast.Constant) and isinstance(part.value, str) for part in (child.left, child.right)
        )
        if not is_told and not joins_texts:
            yield from _without_messages(child)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _reach(trees: Sequence[Path], kept: Path) -> Reach:
    """What the tests reach, by running them all without a bug; kept for a second call on the same commit."""
    state = _state_of_repository()
    if kept.exists() and (found := json.loads(kept.read_text()))["state"] == state:
        quick, files = ({(path, line): tests for path, line, tests in found[name]} for name in ("quick", "files"))
        return Reach(found["seconds"], quick, files)
    tests = [path for folder in _FOLDERS for path in sorted((trees[0] / "tests" / folder).glob("test_*.py"))]
    names = [str(path.relative_to(trees[0])) for path in tests]
    seconds = {}
    for name, time_of_file in zip(names, _in_parallel(trees, names, _covered), strict=True):
        if time_of_file is None:
            print(f"{name} fails without any bug, and is left out", flush=True)
        else:
            seconds[name] = time_of_file
    files: dict[tuple[str, int], set[str]] = collections.defaultdict(set)
    for tree in trees:
        for key, found in _lines_of(tree, seconds).items():
            files[key] |= found
    quick = _quick_tests(trees[0])
    rows = {name: [[*key, sorted(tests)] for key, tests in part.items()] for name, part in (("quick", quick), ("files", files))}
    kept.write_text(json.dumps({"state": state, "seconds": seconds, **rows}))
    return Reach(seconds, quick, files)


def _state_of_repository() -> str:
    asked = (["rev-parse", "HEAD"], ["diff", "HEAD"])
    git = ["git", "-C", str(_REPOSITORY)]
    return "".join(subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout for words in asked)


def _in_parallel[Given, Result](
    trees: Sequence[Path], given: Sequence[Given], work: Callable[[Path, Given], Result]
) -> list[Result]:
    """Results of ``work(tree, given)``, each in a tree that nothing else uses at the time."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(value: Given) -> Result:
        tree = free.get()
        try:
            return work(tree, value)
        finally:
            free.put(tree)

    with concurrent.futures.ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(one, given))


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PIER_TEST_SEED": "1"}


def _run(tree: Path, words: Sequence[str], seconds: float, **environment: str) -> int | None:
    """The exit status of pytest, None if it did not end in time; what it has started ends with it."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=tree,
        env={**_environment(tree), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _covered(tree: Path, name: str) -> float | None:
    """Seconds of a file of tests without a bug; None if it fails."""
    data = tree / ".reached" / Path(name).stem
    data.mkdir(parents=True, exist_ok=True)
    settings = data / "coveragerc"
    settings.write_text(_COVERAGE.replace("{source}", str(tree / "pier_megatron")).replace("{data}", str(data / "data")))
    # Tests that ask as another user write too.
    data.chmod(0o777)
    began = time.monotonic()
    status = _run(tree, ["-m", "coverage", "run", f"--rcfile={settings}", *_PYTEST, name], 3600.0, REACHED_BY=name)
    return time.monotonic() - began if status == 0 else None


def _lines_of(tree: Path, names: Mapping[str, float]) -> dict[tuple[str, int], set[str]]:
    """Files of tests by the file and line that they reach."""
    found: dict[tuple[str, int], set[str]] = collections.defaultdict(set)
    for part in sorted((tree / ".reached").glob("*/data*")):
        data = coverage.CoverageData(str(part))
        try:
            data.read()
        except coverage.CoverageException:
            # Its process was killed while it wrote.
            continue
        tests = {context for context in data.measured_contexts() if context in names}
        for file in data.measured_files():
            for line in data.lines(file) or ():
                found[str(Path(file).relative_to(tree)), line] |= tests
    return found


def _quick_tests(tree: Path) -> dict[tuple[str, int], list[str]]:
    """The quick unit tests that run each line, by file and line."""
    words = [*_PYTEST, "-m", "not slow and not processes", "--cov=pier_megatron", "--cov-context=test", "--cov-report="]
    # It asks as another user, who cannot write what is measured.
    _run(tree, [*words, "tests/unit", "--ignore=tests/unit/test_values.py"], 1800.0)
    data = coverage.CoverageData(str(tree / ".coverage"))
    data.read()
    found: dict[tuple[str, int], list[str]] = {}
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = sorted({context.partition("|")[0] for context in contexts if context})
            if tests:
                found[str(Path(file).relative_to(tree)), line] = tests
    return found


def _try_all(chosen: Sequence[Bug], trees: Sequence[Path], reach: Reach, log: Path) -> list[tuple[Bug, str, str]]:
    """The bugs with their outcomes and what they change; those that the log has are not tried again."""
    known = {}
    if log.exists():
        for line in log.read_text().splitlines():
            row = json.loads(line)
            known[row["path"], row["line"], row["change"]] = row["outcome"]

    def one(tree: Path, bug: Bug) -> tuple[Bug, str, str]:
        change = _change(tree, bug)
        outcome = known.get((bug.path, bug.line, change))
        if outcome is None:
            outcome = _outcome(tree, bug, reach)
            with log.open("a") as file:
                file.write(json.dumps({"path": bug.path, "line": bug.line, "change": change, "outcome": outcome}) + "\n")
            print(f"{outcome}: {bug.path}:{bug.line}: {change}", flush=True)
        return bug, outcome, change

    return _in_parallel(trees, chosen, one)


def _change(tree: Path, bug: Bug) -> str:
    """The line as it was, and as it becomes."""
    source = (tree / bug.path).read_bytes()
    first = source.rfind(b"\n", 0, bug.start) + 1
    last = source.find(b"\n", bug.end)
    before, after = source[first : bug.start], source[bug.end : last]
    old = source[first:last].decode().strip()
    return " ".join(f"{old} -> {(before + bug.new.encode() + after).decode().strip()}".split())


def _outcome(tree: Path, bug: Bug, reach: Reach) -> str:
    key = (bug.path, bug.line)
    files = sorted(reach.files.get(key, ()), key=lambda name: reach.seconds[name])
    if not files:
        return "unreached"
    path, ends = tree / bug.path, time.monotonic() + _SECONDS_OF_BUG
    source = path.read_bytes()
    path.write_bytes(source[: bug.start] + bug.new.encode() + source[bug.end :])
    outcome = "lives"
    try:
        trials = [(reach.quick[key], _SECONDS)] if key in reach.quick else []
        trials += [([name], 60.0 + _FACTOR * reach.seconds[name]) for name in files]
        for tests, seconds in trials:
            status = _run(tree, [*_PYTEST, *tests], min(seconds, max(1.0, ends - time.monotonic())))
            if status not in (0, None):
                return "seen"
            if status is None:
                outcome = "unknown"
        return outcome
    finally:
        path.write_bytes(source)


def _report(outcomes: Sequence[tuple[Bug, str, str]]) -> int:
    names = ("seen", "lives", "unreached", "unknown")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for bug, outcome, _ in outcomes:
        counts[bug.path.split("/")[1].removesuffix(".py")][outcome] += 1
        counts["all"][outcome] += 1
    print("\n| place | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for place in sorted(counts, key=lambda place: (place == "all", place)):
        print(f"| {place} | " + " | ".join(str(counts[place][name]) for name in names) + " |")
    print()
    for bug, outcome, change in sorted(outcomes, key=lambda row: (row[1], row[0].path, row[0].line)):
        if outcome != "seen":
            print(f"{outcome}: {bug.path}:{bug.line}: {change}")
    return int(counts["all"]["seen"] < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
