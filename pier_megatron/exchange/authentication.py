"""Proof that an elastic island belongs to a run, before anything of it is used.

An island that meets another one sends it a nonce. The answer says who the other is, and its HMAC (RFC 2104) is keyed with the
secret that both have. It covers the nonce, so that an answer heard earlier proves nothing, and the name under which the
lighthouse knows the other, which holds its number, address and port, so that nobody passes on the answer of another island.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from pier_megatron.errors import PierConfigError

_NONCE, _MAC, _LENGTH = 32, hashlib.sha256().digest_size, 4

# Bytes: what an island says of itself is its arguments, some ten kilobytes.
_MOST_SAID = 1 << 20
_LEAST_SECRET = 16
_ASKED_AT_ONCE = 32

Said = dict[str, Any]
"""What an island says of itself, plain values."""


def new_secret(path: Path) -> None:
    """Writes a random secret to a new file that only its owner can read.

    Raises:
        PierConfigError: If the file cannot be created, or is there.
    """
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        raise PierConfigError(f"--new-secret {path}: {error.strerror}. Name a new file in a writable folder.") from error


def read_secret(path: str | None) -> bytes:
    """Secret in a file, without white space around it; nothing without a file.

    Raises:
        PierConfigError: If the file cannot be read, others can read it, or it holds fewer than 16 bytes.
    """
    if path is None:
        return b""
    where = f"--pier-secret-file {path}"
    try:
        mode, secret = os.stat(path).st_mode, Path(path).read_bytes().strip()
    except OSError as error:
        raise PierConfigError(f"{where}: {error.strerror}. Copy the file of the other islands here.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PierConfigError(f"{where}: others can read it (mode {stat.S_IMODE(mode):o}). Run chmod 600 {path}.")
    if len(secret) < _LEAST_SECRET:
        raise PierConfigError(
            f"{where}: holds {len(secret)} bytes, must be at least {_LEAST_SECRET}. Make one with pier-megatron lighthouse "
            "--new-secret FILE."
        )
    return secret


class Door:
    """Port where an island proves to other islands that it belongs to the run.

    Attributes:
        name: Number, a random part, address and port of the island, by which the lighthouse knows it.
    """

    def __init__(self, index: int, address: str, secret: bytes, said: Callable[[], Said]) -> None:
        """Listens at the address, and nowhere else.

        Args:
            index: Number of the island.
            address: IP address or name of this node.
            secret: Key of all islands of the run.
            said: What the island says of itself, asked for in a thread.

        Raises:
            OSError: If the address is none of this node.
        """
        listener = listen_at(address)
        port = listener.getsockname()[1]
        self.name = name = f"{index:04}/{secrets.token_hex(8)}/{address}/{port}"

        class Answer(socketserver.BaseRequestHandler):
            timeout = 10.0

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    nonce = _receive(self.request, _NONCE, time.monotonic() + self.timeout)
                    text = json.dumps(said()).encode()
                    self.request.sendall(_mac(secret, nonce, name, text) + len(text).to_bytes(_LENGTH) + text)

        server = socketserver.ThreadingTCPServer(("", 0), Answer, bind_and_activate=False)
        server.socket.close()
        server.socket, server.daemon_threads = listener, True
        threading.Thread(target=server.serve_forever, daemon=True).start()


def island_of(name: str) -> int:
    """The number of the island that has announced itself under a name."""
    return int(name.split("/")[0])


def ask(names: Sequence[str], secret: bytes, seconds: float) -> dict[str, Said | None]:
    """What islands say of themselves.

    Args:
        names: Names under which the lighthouse knows them.
        secret: Key of all islands of the run.
        seconds: Time for all of them.

    Returns:
        What those say who answer in time, by name; None for those who do not prove that they have the secret.
    """
    deadline = time.monotonic() + seconds
    pool = futures.ThreadPoolExecutor(_ASKED_AT_ONCE)
    answers = {name: pool.submit(_ask, name, secret, deadline) for name in names}
    futures.wait(answers.values(), seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    return {name: answer.result() for name, answer in answers.items() if answer.done() and not answer.exception()}


def _ask(name: str, secret: bytes, deadline: float) -> Said | None:
    _, _, address, port = name.split("/")
    nonce = secrets.token_bytes(_NONCE)
    with socket.create_connection((address, int(port)), deadline - time.monotonic()) as connection:
        connection.sendall(nonce)
        mac = _receive(connection, _MAC, deadline)
        length = int.from_bytes(_receive(connection, _LENGTH, deadline))
        if length > _MOST_SAID:
            return None
        text = _receive(connection, length, deadline)
    if not hmac.compare_digest(mac, _mac(secret, nonce, name, text)):
        return None
    said: Said = json.loads(text)
    return said


def _mac(secret: bytes, nonce: bytes, name: str, text: bytes) -> bytes:
    # Of fixed length, or its length before it: no two messages are the same bytes.
    named = name.encode()
    return hmac.digest(secret, nonce + len(named).to_bytes(_LENGTH) + named + text, "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("closed")
        received += part
    return received


def listen_at(address: str) -> socket.socket:
    """Socket that listens at one address only, on any free port.

    Raises:
        OSError: If the address is none of this node.
    """
    family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        listener.bind(place)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(address: str) -> bool:
    """Whether an address reaches the node only that it is used on."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
