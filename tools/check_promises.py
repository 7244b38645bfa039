"""Holds sentences of the pages to tests: ``python tools/check_promises.py PAGE ...``; ``--list`` prints each with its tests.

A sentence or a row of a table that says "bit for bit", "bitwise", "exactly", "always" or "never" is a promise.
``tests/pages/promises.toml`` names, for each page, words of it and the tests that fail when it is broken. A promise without
tests is an error, and so are words that no promise of the page contains any more, and tests that do not exist.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[1]
_PROMISES = _REPOSITORY / "tests" / "pages" / "promises.toml"
_WORDS = re.compile(r"\b(?:bit for bit|bitwise|exactly|always|never)\b", re.IGNORECASE)


def main() -> int:
    """Prints each fault, or the list; returns 1 if there is a fault."""
    is_list = "--list" in sys.argv
    pages = [path for given in sys.argv[1:] if given != "--list" for path in _pages(Path(given))]
    kept: Mapping[str, Mapping[str, Sequence[str]]] = tomllib.loads(_PROMISES.read_text())
    faults = [f"{_PROMISES.name}: {page} is no page" for page in kept if not (_REPOSITORY / page).exists()]
    for path in pages:
        name = str(path.resolve().relative_to(_REPOSITORY))
        tests_by_words = kept.get(name, {})
        promises = [*_promises(path.read_text())]
        for sentence in promises:
            tests = [test for words, tests in tests_by_words.items() if words in sentence for test in tests]
            if not tests:
                faults.append(f'{name}: no test is named for "{sentence}"')
            elif is_list:
                print(f"- {name}: {sentence}\n  ({', '.join(tests)})")
        faults += [
            f'{_PROMISES.name}: {name}: no promise contains "{words}"'
            for words in tests_by_words
            if not any(words in sentence for sentence in promises)
        ]
    tests = sorted({test for page in kept.values() for tests in page.values() for test in tests})
    faults += [f"{_PROMISES.name}: {test} does not exist" for test in tests if not _exists(test)]
    print("\n".join(faults), end="\n" if faults else "")
    return int(bool(faults))


def _pages(path: Path) -> Iterator[Path]:
    yield from sorted(path.glob("*.md")) if path.is_dir() else [path]


def _promises(page: str) -> Iterator[str]:
    """Sentences, and rows of tables, that promise."""
    # Headings name a subject, links a place.
    text = re.sub(r"^```.*?^```|^#.*?$", "", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    # A row and an entry of a list end before the next, a paragraph with an empty line.
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*|>] ?)", text):
        line = " ".join(block.split())
        parts = [line] if line.startswith("|") else re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", line)
        yield from (part for part in parts if _WORDS.search(part))


def _exists(test: str) -> bool:
    name, _, function = test.partition("::")
    path = _REPOSITORY / "tests" / name
    return path.exists() and any(
        isinstance(node, ast.FunctionDef) and node.name == function for node in ast.parse(path.read_text()).body
    )


if __name__ == "__main__":
    sys.exit(main())
