"""Finds words that this project replaces with the field's: in pages, docstrings, comments, help texts and messages.

Only words that never stand for anything else are listed, so every finding is a mistake. Code is skipped. Tests quote
messages and name files, so only their docstrings and comments count.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_WORDS = {
    r"hangs? on (?:the|its?|how|what|whether)": "depends on",
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
    r"in (?:the )?place of": "instead of",
    r"beside": "next to, with, during, or drop it",
    r"some(?= \d)": "about",
    r"of which": "begin a new sentence",
    r"or else|(?<=[,;:.] )else|all else (?:is|of|that)": "otherwise, or: everything else, the rest",
    r"but for": "except",
    r"(?:has|have) all of it": "received all of it",
    r"(?:that|what|who) (?:is|are|was|were) there(?! to)|that there (?:is|are) at": "existing, present, or drop it",
    r"(?:what|that) there (?:is|are)(?= to be| to count|[.,:;])": "existing, present, or drop it",
    r"(?<!every )(?<!are )so many": "that many, or name the number",
    r"(?:is|are|was|were|be|been) (?:said|told)": "is logged, reports, is given",
    r"the same of|the same is (?:said|told)|that that(?= has| is)": "repeat the noun",
    r"made (?:\w+ ){1,3}of (?:them|it|others|different ones)": "say what happened",
    r"(?<=[.;:!?] )(?:By|Of|From|To|At) (?:it|them|this)": "the agent comes first",
    r"whom": "say who does it",
    r"com(?:e|es) together|com(?:e|es) to the same|(?:has|have) come to|com(?:e|es) to (?:a|this step's) collective": (
        "form a quorum, compute, reach"
    ),
    r"(?:say|says|said|tell|tells) of (?:itself|themselves)": "describes",
    r"nobody's business": "does not matter",
    r"stands? still": "stops, pauses",
    r"where (?:\w+ ){1,4}stands?": "place of",
    r"may go on differently": "may continue with other settings",
    r"way (?:that )?(?:\w+ ){0,3}(?:has|have) gone": "progress",
    r"(?:^|(?<=[.:;] ))Who (?:waits|has|reaches|reads|is|takes|skips)": "a noun, or the agent, first",
    r"who (?:met|will meet|meet|waits looks|is at which|speaks|are left|have met)": "participants, or name them",
    r"(?<!so )(?<!now )that (?:[\w'-]+ ){1,6}?(?<!and )(?<!or )(?<!so )(?<!saying )(?<!says )that(?! of\b| the\b| is\b)": (
        "two sentences: a relative clause stands in another one"
    ),
    r"(?:that|which|whose) (?:[\w'-]+ ){1,7}?(?:(?:in|of|by|from|to|with|at|on|over|after|before) )?(?:which|whose|whom)": (
        "two sentences: a relative clause stands in another one"
    ),
}

_CLIPPED = re.compile(r"\s*((?:Of (?!these\b|\w+:)|Whose |(?:After|Among|At|By|From|In|On|To|With) (?:which|whom|whose) )\w+)")
"""Beginning of a comment without its noun."""


def blank(match: re.Match[str]) -> str:
    """Text of as many characters and lines without a word."""
    return re.sub(r"[^\n]", "#", match[0])


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Line within the text, word and replacement of each word that should be another one; code between backticks is skipped."""
    text = re.sub(r"``?[^`]+``?", blank, text)
    wrong = r"\b(?:" + "|".join(f"({word})" for word in _WORDS) + r")(?!\w)"
    lines, line = [], 0
    for piece in re.finditer(r"\s+|\S", text):
        lines.append(line)
        line += piece[0].count("\n")
    squeezed = re.sub(r"\s+", lambda space: "\n" if space[0].count("\n") > 1 else " ", text)
    for match in re.finditer(wrong, squeezed, re.IGNORECASE):
        yield lines[match.start()], match[0], list(_WORDS.values())[(match.lastindex or 1) - 1]


def of_page(text: str) -> Iterator[tuple[int, str, str]]:
    """Words in a page of Markdown, without blocks of code and without addresses of links."""
    for pattern in (r"^```.*?^```$", r"\]\([^)]*\)"):
        text = re.sub(pattern, blank, text, flags=re.MULTILINE | re.DOTALL)
    yield from ((line + 1, word, better) for line, word, better in found_in(text))


def of_module(text: str, is_test: bool = False) -> Iterator[tuple[int, str, str]]:
    """Words in the docstrings and comments of a module, and in its other strings unless it is a test."""
    for first, comment in _comments(text):
        if match := _CLIPPED.match(comment):
            yield first, match[1], "a noun, or the agent, first"
    for first, sentence in sorted({*_comments(text), *_strings(ast.parse(text), is_test)}):
        yield from ((first + line, word, better) for line, word, better in found_in(sentence))


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """First line and text of each comment; lines below each other are one comment."""
    block: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            (line, column), words = token.start, token.string.removeprefix("#")
            if block and block[-1][:2] != (line - 1, column):
                yield block[0][0], "\n".join(words for *_, words in block)
                block = []
            block.append((line, column, words))
    if block:
        yield block[0][0], "\n".join(words for *_, words in block)


def _strings(module: ast.Module, only_docstrings: bool) -> Iterator[tuple[int, str]]:
    """Line and text of each string of several words, without what an f-string computes and without names of parameters."""
    parts_of_f_strings = {part for node in ast.walk(module) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(module):
        if node in parts_of_f_strings:
            continue
        if isinstance(node, ast.Expr) or not only_docstrings:
            node = node.value if isinstance(node, ast.Expr) else node
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if any(isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value for part in parts):
                found = "".join(str(part.value) if isinstance(part, ast.Constant) else "#" for part in parts)
                yield node.lineno, re.sub(r"^ +\w+: ", blank, found, flags=re.MULTILINE)


def main() -> int:
    """Prints what it finds in the files and folders of the command line; returns 1 if there is anything."""
    count = 0
    for argument in map(Path, sys.argv[1:]):
        paths = [argument] if argument.is_file() else sorted([*argument.rglob("*.md"), *argument.rglob("*.py")])
        for path in paths:
            if path.samefile(__file__):
                continue
            text, is_test = path.read_text(), "tests" in path.parts
            for line, word, better in of_page(text) if path.suffix == ".md" else of_module(text, is_test):
                count += 1
                print(f"{path}:{line}: {word}: write {better}")
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main())
