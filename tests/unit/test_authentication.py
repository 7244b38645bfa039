"""An island that does not have the secret proves nothing, whatever it has heard."""

import contextlib
import os
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge
from pathlib import Path

import pytest

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange import authentication
from pier_megatron.exchange.authentication import answer_peers, ask, is_loopback, new_secret, read_secret

_SECRET, _ANOTHER = b"s" * 32, b"t" * 32


@pytest.fixture
def island() -> str:
    return answer_peers(3, "127.0.0.1", _SECRET, lambda: {"run": "this"})


def _connect(name: str) -> Connection:
    _, _, address, port = name.split("/")
    peer = socket.create_connection((address, int(port)), 5)
    peer.setblocking(True)
    return Connection(peer.detach())


@pytest.fixture
def fake() -> Iterator[Callable[[Callable[[Connection], object]], str]]:
    """Makes an island that does something with each connection; gives its name."""
    listeners = []

    def make(answer: Callable[[Connection], object]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    with Connection(listener.accept()[0].detach()) as asker:
                        answer(asker)

        threading.Thread(target=serve, daemon=True).start()
        return f"0003/{'0' * 16}/127.0.0.1/{listener.getsockname()[1]}"

    yield make
    for listener in listeners:
        listener.close()


def test_only_the_same_secret_is_believed(island: str) -> None:
    assert island.startswith("0003/")
    assert ask([island], _SECRET, 5) == {island: {"run": "this"}}
    assert ask([island], _ANOTHER, 5) == {island: None}
    assert ask([island], b"", 5) == {island: None}


def test_a_stranger_is_told_nothing(island: str) -> None:
    with _connect(island) as connection:
        with pytest.raises(AuthenticationError, match="rejected"):
            answer_challenge(connection, _ANOTHER)
        with pytest.raises((EOFError, ConnectionError)):
            connection.recv_bytes()


def _relay(asker: Connection, name: str, change: Callable[[bytes], bytes] = lambda message: message) -> None:
    """Passes each message on, in turn: the island's challenge, the answer, what it says of it, and the same the other way."""
    with _connect(name) as other:
        for sender, receiver in [(other, asker), (asker, other), (other, asker)] * 2:
            receiver.send_bytes(change(sender.recv_bytes()))


def test_nobody_answers_for_another_one(island: str, fake: Callable[..., str]) -> None:
    renamed = island.replace("0003/", "0004/")
    passes_on = fake(lambda asker: _relay(asker, island))
    assert ask([renamed, passes_on], _SECRET, 5) == {renamed: None, passes_on: None}


@pytest.mark.parametrize(("change", "believed"), [((b"", b""), {"run": "this"}), ((b"this", b"that"), None)])
def test_nobody_on_the_way_changes_what_an_island_says_of_itself(
    island: str,
    fake: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    change: tuple[bytes, bytes],
    believed: object,
) -> None:
    between = fake(lambda asker: _relay(asker, island, lambda message: message.replace(*change)))
    port, connect = int(between.rpartition("/")[2]), socket.create_connection
    redirected = {"create_connection": lambda address, seconds: connect((address[0], port), seconds)}
    monkeypatch.setattr(authentication, "socket", types.SimpleNamespace(**vars(socket) | redirected))
    assert ask([island], _SECRET, 5) == {island: believed}


def test_an_answer_heard_earlier_or_made_by_the_asker_proves_nothing(fake: Callable[..., str]) -> None:
    heard: list[bytes] = []

    def repeat(asker: Connection) -> None:
        asker.send_bytes(b"#CHALLENGE#{sha256}" + bytes(40))
        heard.append(asker.recv_bytes())
        asker.send_bytes(b"#WELCOME#")
        asker.send_bytes(b"{}")
        asker.recv_bytes()
        asker.send_bytes(heard[0])
        asker.recv_bytes()

    def reflect(asker: Connection) -> None:
        """Has an asker, the other one or this one, answer the challenge of this one."""
        asker.send_bytes(b"#CHALLENGE#{sha256}" + bytes(40))
        asker.recv_bytes()
        asker.send_bytes(b"#WELCOME#")
        asker.send_bytes(b"{}")
        challenge = asker.recv_bytes()
        challenges.append(challenge)
        other = threading.Thread(target=ask, args=([oracle], _SECRET, 5))
        other.start()
        other.join()
        asker.send_bytes(answers[0])
        asker.recv_bytes()

    challenges: list[bytes] = []
    answers: list[bytes] = []

    def answer_for(asker: Connection) -> None:
        asker.send_bytes(challenges[0])
        answers.append(asker.recv_bytes())

    repeats, reflects, oracle = fake(repeat), fake(reflect), fake(answer_for)
    for _ in range(2):
        assert ask([repeats], _SECRET, 5) == {repeats: None}
    assert ask([reflects], _SECRET, 5) == {reflects: None}
    assert answers


def test_what_a_stranger_sends_is_bounded(fake: Callable[..., str]) -> None:
    sent: list[int] = []

    def send_without_end(asker: Connection) -> None:
        asker.send_bytes(b"#CHALLENGE#{sha256}" + bytes(40))
        asker.recv_bytes()
        asker.send_bytes(b"#WELCOME#")
        with contextlib.suppress(OSError):
            os.write(asker.fileno(), b"\x7f" + b"\xff" * 3)
            while True:
                sent.append(os.write(asker.fileno(), bytes(1 << 16)))

    endless = fake(send_without_end)
    assert ask([endless], _SECRET, 5) == {}
    time.sleep(0.1)
    # What fits into the buffers of the connection that was closed.
    assert sum(sent) < 1 << 24


def test_who_does_not_answer_costs_no_more_than_the_time_given(island: str, fake: Callable[..., str]) -> None:
    ended = threading.Event()

    def drip(asker: Connection) -> None:
        os.write(asker.fileno(), bytes(3) + b"\xf0")
        while not ended.wait(0.05):
            os.write(asker.fileno(), bytes(1))

    silent = [fake(lambda _: ended.wait(120)) for _ in range(40)]
    gone = ["0001/x/127.0.0.1/1", "no name", "0001/x/127.0.0.1/70000"]
    begun = time.monotonic()
    assert ask([island, fake(drip), *gone, *silent], _SECRET, 2) == {island: {"run": "this"}}
    assert time.monotonic() - begun < 30
    # No thread of a question outlives it.
    while any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate()):
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    ended.set()


def test_a_silent_asker_holds_nobody(island: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_ANSWER_SECONDS", 0.5)
    with _connect(island) as silent:
        assert ask([island], _SECRET, 5) == {island: {"run": "this"}}
        silent.recv_bytes()
        assert silent.poll(3)
        with pytest.raises(EOFError):
            silent.recv_bytes()


def test_an_island_listens_at_one_address_only() -> None:
    listener = authentication.listen_at("127.0.0.2")
    port = listener.getsockname()[1]
    assert listener.getsockname()[0] == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)
    listener.close()
    with pytest.raises(OSError, match="assign"):
        authentication.listen_at("192.0.2.1")


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
