"""``pier-megatron`` many times in one process: a start of Megatron takes longer than a look at a job."""

import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from launch import REPOSITORY

_LOOP = """
import contextlib, io, json, sys
from pier_megatron import cli

for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(json.loads(line))
        except SystemExit as end:
            status = end.code
    print("SAID", json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""


class Said(NamedTuple):
    """Exit status, standard output and error of a command."""

    status: int
    out: str
    error: str


@functools.cache
def pier_megatron(**variables: str) -> Callable[[str], Said]:
    """Returns a function that runs a command line; equal ones are run once.

    Args:
        variables: Environment variables, added to those of this process that no scheduler sets.
    """
    alien = ("SLURM_", "NCCL_", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(alien)}
    process = subprocess.Popen(
        [sys.executable, "-c", _LOOP],
        cwd=REPOSITORY,
        env=environment | {"PYTHONPATH": str(REPOSITORY)} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to, back = process.stdin, process.stdout

    @functools.cache
    def run(line: str) -> Said:
        print(json.dumps(shlex.split(line)), file=to, flush=True)
        answer = next(said for said in back if said.startswith("SAID "))
        return Said(*json.loads(answer.removeprefix("SAID ")))

    return run
