"""Runs ``examples/prepare_openwebtext.py`` once for each command line of the JSON on stdin, and prints what each came to."""

import concurrent.futures
import contextlib
import io
import json
import sys
from typing import Any

import prepare_openwebtext


def threads(workers: int, *_: Any, **__: Any) -> concurrent.futures.Executor:
    """Starts threads: each process would import Megatron for a few documents."""
    return concurrent.futures.ThreadPoolExecutor(workers)


if __name__ == "__main__":
    concurrent.futures.ProcessPoolExecutor = threads  # type: ignore[assignment,misc]
    said = []
    for argv in json.load(sys.stdin):
        sys.argv = argv
        out = io.StringIO()
        with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
            try:
                prepare_openwebtext.main()
                status = 0
            except SystemExit as end:
                status = end.code
        said.append([status, out.getvalue()])
    print("SAID", json.dumps(said))
