"""Finds words in pages, docstrings and help texts for which this project has one of the field.

Only words that never stand for anything else are listed, so that everything it finds is to be changed. Code is skipped.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_WORDS = {
    r"hangs? on (?:the|its|how|what|whether)": "depends on",
    r"foretold|foretells?|foresees?|foreseen|foreseeable": "predicted",
    r"misfortunes?": "faults",
    r"anew": "again, restart",
    r"(?:who|groups that|those that|those who|islands that) meets?": "participants",
    r"(?:groups?|islands?|ones?) that (?:do|does) not count": "excluded group",
    r"groups? (?:that (?:is|are|was|were) )?left out": "excluded group",
    r"what is left": "remainder, or say what",
    r"(?:has|have) come (?:together|to (?:an|the) outer step)": "reached, formed a quorum",
    r"in vain": "without effect",
    r"shar(?:e|es|ed|ing) (?:\w+ ){0,3}out": "divides, shards",
    r"(?:goes|go|gone|went) on(?: (?:exactly|at|from|with|without|where|until|bit|as if|alone)\b|(?=[.,;:)]))": "continues",
    r"(?:groups|islands|jobs)(?: that| can)? come and go": "elastic",
    r"worlds? of (?:its|their) own": "a separate Megatron world (island)",
    r"islands? (?:that (?:is|are) )?(?:jobs?|a job) of (?:its|their) own": "elastic",
    r"islands? with a job each|islands? that are jobs": "elastic",
    r"meets? in pairs": "gossip (NoLoCo) pairs",
    r"loss of loss": "degradation",
    r"the way alone": "the code path with an identity codec",
    r"which rank stands where": "rank placement",
    r"what of the paper": "not implemented from the paper",
    r"(?:is|are|be|was|were) taken again|takes? (?:that|the) (?:outer )?step again": "retried",
}
_ON_PAGES = _WORDS | {
    r"in (?:the )?place of": "instead of",
    r"beside": "next to, with, during, or drop it",
    r"some(?= \d)": "about",
    r"of which": "begin a new sentence",
    r"or else|(?<=, )else": "otherwise, or",
}
"""Words for pages, which translate well and read badly."""

_HELPERS = ("add_argument", "setting")


def blank(match: re.Match[str]) -> str:
    """As many characters and lines, which hold no word."""
    return re.sub(r"[^\n]", "#", match[0])


def found_in(text: str, words: dict[str, str] = _WORDS) -> Iterator[tuple[int, str, str]]:
    """Line within the text, word and replacement of each word that should be another one; code between backticks is skipped."""
    text = re.sub(r"``?[^`]+``?", blank, text)
    wrong = r"\b(?:" + "|".join(f"({word})" for word in words) + r")(?!\w)"
    for match in re.finditer(wrong, re.sub(r"\s", " ", text), re.IGNORECASE):
        yield text[: match.start()].count("\n"), match[0], list(words.values())[(match.lastindex or 1) - 1]


def of_page(text: str) -> Iterator[tuple[int, str, str]]:
    """Words in a page of Markdown, without blocks of code and without addresses of links."""
    for pattern in (r"^```.*?^```$", r"\]\([^)]*\)"):
        text = re.sub(pattern, blank, text, flags=re.MULTILINE | re.DOTALL)
    yield from ((line + 1, word, better) for line, word, better in found_in(text, _ON_PAGES))


def of_module(text: str) -> Iterator[tuple[int, str, str]]:
    """Words in the docstrings and help texts of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts = [child.value for child in node.body if isinstance(child, ast.Expr)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in _HELPERS:
            texts = [keyword.value for keyword in node.keywords if keyword.arg == "help"] + node.args[1:2]
        else:
            continue
        for value in texts:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from ((value.lineno + line, word, better) for line, word, better in found_in(value.value))


def main() -> int:
    """Prints what it finds in the files and folders of the command line; returns 1 if there is anything."""
    count = 0
    for argument in map(Path, sys.argv[1:]):
        paths = [argument] if argument.is_file() else sorted([*argument.rglob("*.md"), *argument.rglob("*.py")])
        for path in paths:
            found = of_page(path.read_text()) if path.suffix == ".md" else of_module(path.read_text())
            for line, word, better in found:
                count += 1
                print(f"{path}:{line}: {word}: write {better}")
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main())
