"""Proof that an elastic island belongs to a run, by the challenges of Python's multiprocessing: its asker's and then its own.

Each is keyed with the secret, a role, and the island's name, which holds its number, address and port; the island's also with
its text. So no answer serves twice, for another island or in the other direction. Nothing is unpickled.
"""

import contextlib
import functools
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from pier_megatron.errors import PierConfigError

# Largest description in bytes (an island's arguments take about 10 kB), shortest secret in bytes, threads, seconds.
_MOST_BYTES, LEAST_SECRET, _ASKED_AT_ONCE, _ANSWER_SECONDS = 1 << 20, 16, 32, 5.0

Description = dict[str, Any]
"""Description of an island by itself: plain values."""


def new_secret(path: Path) -> None:
    """Writes a random secret to a new file that only its owner can read, or raises :class:`PierConfigError`."""
    try:
        with open(path, "x", opener=functools.partial(os.open, mode=0o600)) as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        raise PierConfigError(f"--new-secret {path}: {error.strerror}. Name a new file in a writable folder.") from error


def read_secret(path: str | None) -> bytes:
    """Reads the secret in a file that only its owner can read, or raises :class:`PierConfigError`; empty without a file."""
    if path is None:
        return b""
    where = f"--pier-secret-file {path}"
    try:
        mode, secret = os.stat(path).st_mode & 0o777, Path(path).read_bytes().strip()
    except OSError as error:
        raise PierConfigError(f"{where}: {error.strerror}. Copy the file of the other islands here.") from error
    if mode & 0o077:
        raise PierConfigError(f"{where}: others can read it (mode {mode:o}). Run chmod 600 {path}.")
    if len(secret) < LEAST_SECRET:
        advice = "Make one with pier-megatron lighthouse --new-secret FILE."
        raise PierConfigError(f"{where}: holds {len(secret)} bytes, must be at least {LEAST_SECRET}. {advice}")
    return secret


def answer_peers(index: int, address: str, secret: bytes, describe: Callable[[], Description]) -> str:
    """Listens at one address, authenticates peers mutually, and sends them what ``describe`` returns.

    Returns:
        Name by which the lighthouse knows the island: its number, a random part, its address and port.
    """
    listener = listen_at(address)
    name = f"{index:04}/{secrets.token_hex(8)}/{address}/{listener.getsockname()[1]}"

    def answer(peer: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError), _until(_ANSWER_SECONDS, peer) as asker:
            deliver_challenge(asker, _key(secret, "asks", name))
            text = json.dumps(describe())
            asker.send_bytes(text.encode())
            answer_challenge(asker, _key(secret, "answers", name, text))

    def serve() -> None:
        while True:
            try:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()
            except (OSError, RuntimeError):
                # Too many open files or threads: later there may be fewer.
                time.sleep(0.1)

    threading.Thread(target=serve, daemon=True).start()
    return name


def island_of(name: str) -> int:
    """The number of the island that has announced itself under a name."""
    return int(name.split("/")[0])


def ask(names: Sequence[str], secret: bytes, seconds: float) -> dict[str, Description | None]:
    """Descriptions by name of the islands that answer in time; None for one with another secret than this island's."""
    deadline, pool = time.monotonic() + seconds, futures.ThreadPoolExecutor(_ASKED_AT_ONCE)
    answers = {pool.submit(_ask, name, secret, deadline): name for name in names}
    done, _ = futures.wait(answers, seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    return {answers[answer]: answer.result() for answer in done if not answer.exception()}


def _ask(name: str, secret: bytes, deadline: float) -> Description | None:
    _, _, address, port = name.split("/")
    peer = socket.create_connection((address, int(port)), deadline - time.monotonic())
    with _until(deadline - time.monotonic(), peer) as island:
        try:
            answer_challenge(island, _key(secret, "asks", name))
            text = island.recv_bytes(_MOST_BYTES).decode()
            deliver_challenge(island, _key(secret, "answers", name, text))
        except AuthenticationError:
            return None
    description: Description = json.loads(text)
    return description


def _key(secret: bytes, *parts: str) -> bytes:
    return hmac.digest(secret, json.dumps(parts).encode(), "sha256")


@contextlib.contextmanager
def _until(seconds: float, peer: socket.socket) -> Iterator[Connection]:
    """Messages over a socket that is shut down after ``seconds``: a Connection would wait for ever."""
    peer.setblocking(True)
    timer = threading.Timer(seconds, peer.shutdown, [socket.SHUT_RDWR])
    timer.daemon = True
    with peer, Connection(os.dup(peer.fileno())) as connection:
        timer.start()
        try:
            yield connection
        finally:
            timer.cancel()


def listen_at(address: str) -> socket.socket:
    """Socket that listens at one address only, on any free port; an OSError if the address is none of this node."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, 0), family=family)


def is_loopback(address: str) -> bool:
    """Whether an address reaches the node only that it is used on."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
