"""What every Python process of a test runs first, if this folder is on PYTHONPATH: a copy of a warm process takes its place.

Importing Megatron takes a process four seconds, a training has many, and on two cores nothing else takes the suite as long. A
process that is started as below hands its command line, environment and standard streams to ``warm_process.py``, which has
imported what they all import, and whose fork runs in its stead. This one stays as its deputy: it passes signals on, and ends
as the fork ended.
"""

import os
import sys

# How trainings, their launchers, commands and scripts are started; by which of the warm processes each is run.
_STARTS = {
    ("-m", "worker"): "megatron",
    ("-m", "pier_megatron", "--device", "cpu"): "megatron",
    ("-m", "pier_megatron.experiments.experts.scoring", "--device", "cpu"): "megatron",
    ("-m", "torch.distributed.run"): "torch",
    ("-m", "pier_megatron.cli"): "torch",
    ("parse_arguments.py",): "megatron",
    ("megatron_logits.py",): "megatron",
    ("prepare_openwebtext.py",): "megatron",
    ("many_preparations.py",): "megatron",
    ("plain_pytorch.py",): "torch",
    ("census_worker.py",): "torch",
    ("exchange_worker.py",): "torch",
    ("communicator_worker.py",): "torch",
}


def _warm_process() -> tuple[str, list[str]] | None:
    """Where the process listens that can run this one, and this one's command line."""
    folder = os.environ.get("PIER_TEST_WARM")
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    if not folder or not words:
        return None
    begin = [os.path.basename(words[0]), *words[1:]]
    for start, name in _STARTS.items():
        if tuple(begin[: len(start)]) == start:
            return os.path.join(folder, name), words
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
