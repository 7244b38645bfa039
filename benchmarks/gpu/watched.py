"""Pretrains as the demo's script does and writes down what it took: ``watched.py FILE`` and Megatron's arguments.

FILE gets JSON: the most bytes allocated, and how often the host waited for the device, by iteration and place. Counted are
the reads that PyTorch sees (``torch.cuda.set_sync_debug_mode``), and waits for events, streams and the device.
"""

import collections
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from megatron.training import get_args

from pier_megatron.commands.demo import pretrain_bytes

_SOURCES = ("pier_megatron", "megatron")


def _place() -> str:
    """The innermost lines of the plugin and of Megatron on the stack, and the line that waited."""
    found = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    frames = [frame for frame in found if not frame.filename.endswith(("watched.py", "traceback.py", "warnings.py"))]
    places = []
    for source in _SOURCES:
        own = [frame for frame in frames if f"/{source}/" in frame.filename and "/commands/" not in frame.filename]
        if own:
            # Innermost first.
            name = own[0].filename.rpartition(f"/{source}/")[2]
            places.append(f"{source}/{name}:{own[0].lineno} {own[0].name}")
    return " < ".join(places) or f"{frames[0].filename}:{frames[0].lineno}"


def _iteration() -> int:
    """Number of the present iteration. Megatron counts one when it is done, and has no arguments at first."""
    try:
        return int(getattr(get_args(), "curr_iteration", -1)) + 1
    except AssertionError:
        return 0


def main() -> None:
    """Trains."""
    answer = Path(sys.argv.pop(1))
    waits: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def count(what: str) -> None:
        waits[_iteration()][f"{what} {_place()}"] += 1

    def wait_seen(name: str, wait: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            count(name)
            return wait(*arguments, **named)

        return counted

    def show(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            count("read")

    if torch.cuda.is_available():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.synchronize = wait_seen("synchronize", torch.cuda.synchronize)
        for kind in (torch.cuda.Event, torch.cuda.Stream):
            kind.synchronize = wait_seen(f"{kind.__name__}.synchronize", kind.synchronize)
        torch.cuda.set_sync_debug_mode("warn")
    try:
        pretrain_bytes.main()
    finally:
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        if os.environ["RANK"] == "0":
            answer.write_text(json.dumps({"bytes": most, "waits": waits}))


if __name__ == "__main__":
    main()
