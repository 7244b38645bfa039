"""A stranger that reaches the lighthouse and the islands, and has heard all their messages, but lacks their secret."""

import contextlib
import datetime
import secrets
import socket
import threading
import time
from multiprocessing.connection import Client, Connection, wait
from typing import Any

from torchft import coordination

from pier_megatron.exchange import torchft_api

_SECOND = datetime.timedelta(seconds=1)


class Stranger:
    """Stays in every quorum while the ``with`` block lasts, and answers at a port of its own.

    Attributes:
        name: Name by which the lighthouse knows it.
        quorums: Number of quorums that it was in.
    """

    def __init__(self, url: str, passes_on: bool) -> None:
        """Comes to the lighthouse.

        Args:
            url: Address of the lighthouse.
            passes_on: Whether it passes challenges on to another island, or answers with what it has heard before.
        """
        self.quorums = 0
        self._url, self._passes_on = url, passes_on
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.name = f"0002/{secrets.token_hex(8)}/127.0.0.1/{self._listener.getsockname()[1]}"
        self._others: list[str] = []
        self._heard = b""
        self._has_others, self._ended = threading.Event(), threading.Event()

    def __enter__(self) -> "Stranger":
        self._server = coordination.ManagerServer(
            replica_id=self.name,
            lighthouse_addr=self._url,
            hostname="127.0.0.1",
            bind="127.0.0.1:0",
            store_addr="127.0.0.1:1",
            world_size=1,
            heartbeat_interval=_SECOND / 5,
            connect_timeout=3 * _SECOND,
            quorum_retries=0,
        )
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._answer, self._meet)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._server.shutdown()
        self._listener.close()

    def _meet(self) -> None:
        client = coordination.ManagerClient(self._server.address(), connect_timeout=3 * _SECOND)
        while not self._ended.is_set():
            try:
                known = {**torchft_api.QUORUM, "step": time.time_ns(), "timeout": 5 * _SECOND, "commit_failures": 0}
                quorum = client._quorum(**torchft_api.known_arguments(client._quorum, known))
            except RuntimeError:
                continue
            self._others = [name for name in quorum.replica_ids if name != self.name]
            self.quorums += 1
            self._has_others.set()

    def _answer(self) -> None:
        while not self._ended.is_set():
            try:
                asker = Connection(self._listener.accept()[0].detach())
            except OSError:
                return
            # An asker ends it when it has heard enough.
            with asker, contextlib.suppress(OSError, EOFError):
                # It may be asked before it knows the others.
                self._has_others.wait(2)
                if self._passes_on:
                    self._relay(asker)
                else:
                    self._repeat(asker)

    def _relay(self, asker: Connection) -> None:
        _, _, address, port = self._others[0].split("/")
        with Client((address, int(port))) as island:
            while not self._ended.is_set():
                for one in wait([asker, island], 1):
                    (island if one is asker else asker).send_bytes(one.recv_bytes())

    def _repeat(self, asker: Connection) -> None:
        asker.send_bytes(b"#CHALLENGE#{sha256}" + bytes(40))
        self._heard = self._heard or asker.recv_bytes()
        asker.send_bytes(b"#WELCOME#")
        asker.send_bytes(b"{}")
        asker.send_bytes(self._heard)
        while True:
            asker.recv_bytes()
