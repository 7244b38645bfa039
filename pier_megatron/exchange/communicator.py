"""The communicator between elastic islands: gloo on every device, in which nobody waits for an island that is gone.

NCCL's watchdog would end the process of a survivor. gloo takes CUDA tensors as well, for each collective that
:class:`~pier_megatron.exchange.collectives.GroupExchange` calls, through pinned memory of its own.
"""

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import torch
import torch.distributed as dist

from pier_megatron.exchange.authentication import listen_at

# Time between two checks of a waiting rank whether the exchange is lost.
_PERIOD_SECONDS = 0.5


def connect(
    store: tuple[str, int], prefix: str, place: tuple[int, int], address: str, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Connects this rank with the same rank of other islands.

    They find each other under a ``prefix`` in the store at an address and a port; the ``place`` is the index of this island
    among them, and their number. It listens at the ``address``, if that is this node's.

    Returns:
        Process group that PyTorch does not know by name, for CPU and CUDA tensors.

    Raises:
        RuntimeError: If they do not find each other within the ``timeout``, which then is that of every collective.
    """
    found = dist.TCPStore(*store, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    keys = dist.PrefixStore(prefix, found)  # type: ignore[attr-defined]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._devices = timeout, [device_at(address)]
    gloo = dist.ProcessGroupGloo(keys, *place, options)
    gloo._set_sequence_number_for_group()
    group = dist.ProcessGroup(keys, *place)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def store_at(address: str) -> Any:
    """A store that listens at one address only; an OSError if it is none of this node."""
    listener = listen_at(address)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def interrupt(group: dist.ProcessGroup) -> None:
    """Fails what this rank has under way in a communicator, and what others have with it. It is of no use afterwards.

    gloo's ``abort`` does nothing (PyTorch 2.13), but a receive that times out closes all connections of its rank.
    """
    for other in _others(group):
        # From a connection that is closed already nothing can be received, and nothing closes the others.
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], other, 0).wait(datetime.timedelta(milliseconds=1))


def is_closed(group: dist.ProcessGroup) -> bool:
    """Whether a connection of this rank is closed; gloo does not tell ranks that wait on other connections."""
    try:
        for other in _others(group):
            # Nobody sends it. Only where the connection is closed, asking for it fails.
            group.recv([torch.empty(1)], other, 0)
    except RuntimeError:
        return True
    return False


def completes(work: dist.Work, seconds: float) -> bool:
    """Whether a collective completes in some seconds. Not by its own wait: NCCL's would end it after them."""
    deadline = time.monotonic() + seconds
    while not (completed := work.is_completed()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return completed


def _others(group: dist.ProcessGroup) -> list[int]:
    return [other for other in range(group.size()) if other != group.rank()]


class Wait:
    """A collective under way that is waited for until its exchange is lost.

    gloo may forget a send whose connection closes meanwhile, which then ends by its time-out only (seen with PyTorch 2.13).
    """

    def __init__(self, work: dist.Work, watched: Callable[[Callable[[float], bool]], None]) -> None:
        self._work, self._watched, self.is_completed = work, watched, work.is_completed

    def wait(self) -> bool:
        """Waits for it; a RuntimeError if the exchange is lost before."""
        self._watched(self._wait_for)
        return self._work.wait()

    def _wait_for(self, seconds: float) -> bool:
        # Returns once the work is completed; its errors are reported later.
        with contextlib.suppress(RuntimeError):
            self._work.wait(datetime.timedelta(seconds=seconds))
        return self._work.is_completed()


class _Guarded(dist.ProcessGroup):
    """A process group in which nothing waits for a lost exchange."""

    def __init__(self, group: dist.ProcessGroup, watched: Callable[[Callable[[float], bool]], None]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group, self.watched = group, watched

    def _get_backend(self, device: torch.device) -> Any:
        return self.group._get_backend(device)


def _guarded(name: str) -> Callable[..., Wait]:
    return lambda guarded, *args: Wait(getattr(guarded.group, name)(*args), guarded.watched)


# Those that GroupExchange calls, by their names until PyTorch 2.12 and since.
for _name in (
    "allreduce",
    "broadcast",
    "_allgather_base",
    "alltoall_base",
    "all_gather_single",
    "all_to_all_single",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(_Guarded, _name, _guarded(_name))


class Communicator:
    """The connection of this rank with other islands.

    A wait in a lost exchange is interrupted: on all ranks of the island, and then on those connected with them.
    """

    def __init__(self, store: Any, timeout: datetime.timedelta) -> None:
        """Begins without a connection; by the ``store`` ranks of this island tell each other that an exchange is lost."""
        self._store, self._timeout = store, timeout
        self._group: dist.ProcessGroup | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._group is not None

    def begin(
        self, key: str, silence: Callable[[], str | None], connects: Callable[[], dist.ProcessGroup]
    ) -> dist.ProcessGroup:
        """Begins an exchange, over the connection of the one before unless that was closed.

        Its ``key`` in the store is the same on all ranks of the island. While this rank waits it asks about twice a second
        for the ``silence``: the reason why it thinks an island gone, or None.

        Raises:
            RuntimeError: If there is no connection, or the exchange is lost before it begins.
        """
        self._key, self._silence = key, silence
        if self._group is None:
            connected: futures.Future[dist.ProcessGroup] = futures.Future()

            def connect() -> None:
                try:
                    connected.set_result(connects())
                except Exception as error:
                    connected.set_exception(error)

            # What PyTorch connects cannot be interrupted: it is left to its own time-out.
            threading.Thread(target=connect, daemon=True).start()
            self.watched(lambda seconds: bool(futures.wait([connected], seconds).done))
            self._group = connected.result()
        return _Guarded(self._group, self.watched)

    def watched(self, waits: Callable[[float], bool]) -> None:
        """Waits for something in an exchange: ``waits`` for some seconds at most, and returns whether it is there.

        Raises:
            RuntimeError: If the exchange is lost before.
        """
        while not waits(_PERIOD_SECONDS):
            # A rank that has received everything may leave, and this rank may receive the rest in a moment.
            if (why := self._why_lost()) is not None and not waits(_PERIOD_SECONDS):
                raise RuntimeError(f"the exchange is interrupted: {why}")

    def close(self) -> None:
        """Closes a connection that is not needed any more."""
        self._group = None

    def leave(self, key: str) -> None:
        """Ends the connection, and the exchange with a ``key`` of all ranks of the island."""
        self._store.set(key, "")
        if self._group is not None:
            interrupt(self._group)
            # Whoever drops it last waits for what is under way in it, at most until that ends by its time-out.
            buried = threading.Timer(self._timeout.total_seconds() + _PERIOD_SECONDS, id, (self._group,))
            buried.daemon = True
            buried.start()
            self._group = None

    def _why_lost(self) -> str | None:
        try:
            if self._store.check([self._key]):
                return "another rank of this island has ended it"
            if self._group is not None and is_closed(self._group):
                return "another island has ended it"
            return self._silence()
        except (RuntimeError, OSError) as error:
            # The first rank of the island is gone, and its store with it.
            return str(error)


def device_at(address: str) -> Any:
    """The card of gloo with an address; without one, that of ``GLOO_SOCKET_IFNAME``, or gloo's own choice."""
    try:
        return dist.ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError:
        # The address of the island's first node, on another one of its nodes. PyTorch's default does not look at the variable.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if interface:
            return dist.ProcessGroupGloo.create_device(interface=interface)
        return dist.ProcessGroupGloo.create_default_device()
