"""What an unknown word may have been meant to be."""

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """The question whether a known word was meant, or nothing if none is like the unknown one.

    argparse asks by itself from Python 3.14 on.
    """
    found = difflib.get_close_matches(word.partition("=")[0], list(known), n=1)
    return f". Did you mean {found[0]}?" if found else ""
