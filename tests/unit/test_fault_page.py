"""Counts on the page of fault tests, against the tests that it counts."""

import ast
import re
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]


def entries(file: str, table: str) -> int:
    """How many keys a table of a test module has."""
    [found] = [
        node.value
        for node in ast.parse((_REPOSITORY / "tests" / file).read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and table in ast.unparse(node).split(" = ")[0]
    ]
    assert isinstance(found, ast.Dict)
    return len(found.keys)


@pytest.mark.parametrize(
    ("file", "table", "words"),
    [
        ("end_to_end/test_arguments.py", "_REFUSED", r"(\d+) command lines"),
        ("distributed/test_refusals.py", "_REFUSED", r"(\d+) checkpoints and set-ups"),
        ("loop/test_loop.py", "_CASES", r"(\d+) more runs"),
    ],
)
def test_page_counts_what_is_tested(file: str, table: str, words: str) -> None:
    page = " ".join((_REPOSITORY / "docs" / "reliability.md").read_text().split())
    assert set(re.findall(words, page)) == {str(entries(file, table))}
