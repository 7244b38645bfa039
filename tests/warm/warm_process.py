"""Imports what many processes of the tests would import, and runs each of them as a fork: see ``sitecustomize.py``.

``python warm_process.py ADDRESS MODULE`` prints a line when it listens at the socket ADDRESS.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from typing import Any

from pier_megatron.cpu.nodes import enter


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    left, parts = int.from_bytes(head, "little"), []
    while left:
        parts.append(connection.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), descriptors


def _become(job: dict[str, Any], descriptors: list[int]) -> None:
    """Makes this process what the one that asks would have been without its imports."""
    os.setsid()
    # The one that asks may be on an emulated node, which has cores of its own.
    enter(job["pid"])
    os.sched_setaffinity(0, os.sched_getaffinity(job["pid"]))
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=job["is_unbuffered"])  # type: ignore[union-attr]
    is_module = job["words"][0] == "-m"
    sys.argv = job["words"][is_module:]
    # Where Python looks first.
    first = job["folder"] if is_module else os.path.dirname(os.path.abspath(sys.argv[0]))
    sys.path[:] = [first, *(folder for folder in job["path"] if folder != first)]
    # Python warns of a module that is run after it was imported.
    sys.modules.pop(sys.argv[0], None)
    sys.modules["__main__"] = types.ModuleType("__main__")
    random.seed()


def _next_job(address: str) -> list[str]:
    """Returns in a fork that has become the asking process, with its command line."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(100)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    deputies: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is server:
                deputy, _ = server.accept()
                job, descriptors = _receive(deputy)
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for opened in (selector, server, deputy, *deputies.values()):
                        opened.close()
                    os.close(ended)
                    os.close(wake)
                    _become(job, descriptors)
                    return list(job["words"])
                for descriptor in descriptors:
                    os.close(descriptor)
                deputies[child] = deputy
                selector.register(deputy, selectors.EVENT_READ, child)
                deputy.sendall(child.to_bytes(8, "little"))
            elif key.fileobj == ended:
                os.read(ended, 4096)
                while deputies and (found := os.waitpid(-1, os.WNOHANG))[0]:
                    with deputies.pop(found[0]) as deputy, contextlib.suppress(KeyError, BrokenPipeError):
                        selector.unregister(deputy)
                        deputy.sendall(found[1].to_bytes(8, "little"))
            elif key.data in deputies:
                # Somebody has killed the deputy, and meant the one that it stands for.
                selector.unregister(deputies[key.data])
                os.killpg(key.data, signal.SIGKILL)


def _status_of(words: list[str]) -> int:
    """Runs a command line as Python does; returns the status with which it ends."""
    try:
        if words[0] == "-m":
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _end(status: int) -> None:
    """Ends this process with all that Python does at an exit, except for taking apart what was imported.

    That would copy the warm process's memory, page by page, which takes each fork a third of a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    place, imported = sys.argv[1:]
    importlib.import_module(imported)
    gc.collect()
    gc.freeze()
    _end(_status_of(_next_job(place)))
