"""Two ranks on the device: overlap with real work, memory, and the death of one of them."""

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import limits
import one_gpu
from measuring import is_gpu
from table import Row, Rows, checked

_TOLERANCE = 0.05


def _ask(job: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, str(Path(__file__).with_name("rank.py")), job, str(answer)]
        one_gpu.run(command, 2, Path(folder), limits.left())
        return json.loads(answer.read_text())


def overlap() -> Rows:
    """Iterations that are matrix products, with and without an exchange at the same time."""
    found = _ask("overlap")
    alone = found["no exchange"]
    for name, seconds in found.items():
        yield Row(f"mean iteration, {name}", f"{seconds * 1e3:.2f} ms, {seconds / alone:.3f} x without exchange")


def memory() -> Rows:
    """The start-up block's figure against what was allocated at once."""
    counted = "PyTorch's count" if is_gpu() else "counted by operator"
    for name, (used, said) in _ask("memory").items():
        result = f"{used / 1e6:.1f} MB at once ({counted}), {said / 1e6:.1f} MB said: {used / said:.3f}"
        yield checked(name, abs(used - said) <= _TOLERANCE * said, result, f"off by more than {_TOLERANCE:.0%}")


def killed() -> Rows:
    """What the other rank prints, and how long it takes to end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("rank.py")), "killed", "no answer"]
        # NCCL's watchdog sees the death at once, then waits four times so long for its own dump before it ends the process.
        dump = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
        with one_gpu.started(command, 2, Path(folder), **dump) as (survivor, victim):
            victim.wait(limits.left() / 2)
            begin = time.monotonic()
            status, patience = None, limits.left()
            while status is None and time.monotonic() - begin < patience:
                time.sleep(0.02)
                status = survivor.poll()
            seconds = time.monotonic() - begin
        log = (Path(folder) / "rank0.log").read_text(errors="replace")
        printed = one_gpu.last_lines(Path(folder) / "rank0.log", 4)
    print(log, flush=True)
    what = f"a rank is killed between outer steps, {one_gpu.backend()}"
    result = (
        f"the other ended with {status} after {seconds:.1f} s"
        if status is not None
        else f"the other went on for {seconds:.0f} s"
    )
    yield checked(what, bool(status), result, "it did not end with an error")
    yield Row("what it printed", printed[:1500])
    # Over NCCL the watchdog ends the process: there is no error of Python's, and its own trace names the collective's caller.
    named = re.search(r"Pier: group 0 was in phase.*|#\d+ \S+ from \S*pier_megatron/outer/\S+", log)
    yield checked("it says where in the outer step", named is not None, named[0] if named else "", "neither phase nor trace")
