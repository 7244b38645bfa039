"""An island that does not have the secret proves nothing, whatever it has heard."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange import authentication
from pier_megatron.exchange.authentication import Door, ask, is_loopback, new_secret, read_secret

_SECRET, _ANOTHER = b"s" * 32, b"t" * 32


@pytest.fixture
def door() -> Door:
    return Door(3, "127.0.0.1", _SECRET, lambda: {"run": "this"})


def _raw(name: str, nonce: bytes) -> bytes:
    _, _, address, port = name.split("/")
    answer = b""
    with socket.create_connection((address, int(port)), 5) as connection:
        connection.sendall(nonce)
        while part := connection.recv(4096):
            answer += part
    return answer


@pytest.fixture
def fake() -> Iterator[Callable[[Callable[[bytes], bytes]], str]]:
    """Makes a door that answers a nonce as it is told to; gives its name."""
    listeners = []

    def make(answer: Callable[[bytes], bytes]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer(connection.recv(32)))

        threading.Thread(target=serve, daemon=True).start()
        return f"0003/{'0' * 16}/127.0.0.1/{listener.getsockname()[1]}"

    yield make
    for listener in listeners:
        listener.close()


def test_only_the_same_secret_is_believed(door: Door) -> None:
    assert door.name.startswith("0003/")
    assert ask([door.name], _SECRET, 5) == {door.name: {"run": "this"}}
    assert ask([door.name], _ANOTHER, 5) == {door.name: None}
    assert ask([door.name], b"", 5) == {door.name: None}


def test_nobody_answers_for_another_one(door: Door, fake: Callable[..., str]) -> None:
    renamed = door.name.replace("0003/", "0004/")
    heard = _raw(door.name, bytes(32))
    repeats, passes_on = fake(lambda nonce: heard), fake(lambda nonce: _raw(door.name, nonce))
    assert ask([renamed, repeats, passes_on], _SECRET, 5) == {renamed: None, repeats: None, passes_on: None}


def test_what_a_stranger_sends_is_bounded(fake: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []
    receive = authentication._receive
    monkeypatch.setattr(
        authentication,
        "_receive",
        lambda socket_, size, deadline: (asked_for.append(size), receive(socket_, size, deadline))[1],
    )
    endless = fake(lambda nonce: bytes(32) + b"\xff" * 4)
    assert ask([endless], _SECRET, 5) == {endless: None}
    assert asked_for == [32, 4]


def test_who_does_not_answer_costs_no_more_than_the_time_given(fake: Callable[..., str]) -> None:
    ended = threading.Event()
    silent = fake(lambda nonce: (ended.wait(30), b"")[1])
    gone = "0001/x/127.0.0.1/1"
    assert ask([silent, gone, "no name", "0001/x/127.0.0.1/70000"], _SECRET, 0.5) == {}
    ended.set()


def test_secret_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    new_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_secret(str(path))) == 64
    assert read_secret(None) == b""
    with pytest.raises(PierConfigError, match=r"--new-secret .*: File exists"):
        new_secret(path)
    path.chmod(0o640)
    with pytest.raises(PierConfigError, match=r"--pier-secret-file .*others can read it \(mode 640\). Run chmod 600"):
        read_secret(str(path))
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(PierConfigError, match="holds 5 bytes, must be at least 16"):
        read_secret(str(path))
    with pytest.raises(PierConfigError, match="No such file"):
        read_secret(os.fspath(tmp_path / "none"))


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.2", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("host", False)]
)
def test_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
