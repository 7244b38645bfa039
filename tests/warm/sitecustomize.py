"""What every Python process of a test runs first, if this folder is on PYTHONPATH: a copy of a warm process takes its place.

Importing Megatron takes a process four seconds, a training has many, and on two cores nothing else takes the suite as long. A
process that is started as below hands its command line, environment and standard streams to ``warm_process.py``, which has
imported what they all import, and whose fork runs in its stead. This one stays as its deputy: it passes signals on, and ends
as the fork ended.
"""

import os
import sys

# How a training is started, how its launcher, and the commands; by which of the warm processes each is run.
_STARTS = {
    ("worker",): "megatron",
    ("pier_megatron", "--device", "cpu"): "megatron",
    ("torch.distributed.run",): "torch",
    ("pier_megatron.commands.cli",): "torch",
}


def _warm_process() -> tuple[str, list[str]] | None:
    """Where the process listens that can run this one, and this one's module and arguments."""
    folder = os.environ.get("PIER_TEST_WARM")
    if not folder:
        return None
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    for start, name in _STARTS.items():
        if words[:1] == ["-m"] and tuple(words[1 : 1 + len(start)]) == start:
            return os.path.join(folder, name), words[1:]
    return None


def _run_by(address: str, words: list[str]) -> None:
    import json
    import signal
    import socket

    job = {
        "pid": os.getpid(),
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "is_unbuffered": "-u" in sys.orig_argv or bool(os.environ.get("PYTHONUNBUFFERED")),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        text = json.dumps(job).encode()
        socket.send_fds(connection, [len(text).to_bytes(8, "little")], [0, 1, 2])
        connection.sendall(text)
        pid = int.from_bytes(connection.recv(8), "little")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: os.killpg(pid, number))
        status = int.from_bytes(connection.recv(8), "little")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if (found := _warm_process()) is not None:
    _run_by(*found)
