"""The part of torchft that islands call: its lighthouse, and the quorums that it forms."""

import datetime
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.topology import NAMED

# How often an island says that it is alive. The lighthouse gives it up after several of these.
HEARTBEAT = datetime.timedelta(milliseconds=200)
CONNECT_TIMEOUT = datetime.timedelta(seconds=10)

# How often torchft asks a lighthouse again that does not answer: so often that only the time of the question counts. It says
# nothing when it gives up, and who has asked would wait all that time although the lighthouse is back.
RETRIES = 1000


def torchft(module: str) -> Any:
    """Imports a module of torchft.

    Raises:
        PierConfigError: If it is not installed.
    """
    try:
        return importlib.import_module(f"torchft.{module}")
    except ImportError as error:
        raise PierConfigError(
            f"--pier-lighthouse needs torchft, which cannot be imported ({error}). Install it with pip install "
            "'torchft>=0.2,<0.3', the extra [islands] of this plugin."
        ) from error


def keep_quiet(islands: int) -> None:
    """Keeps torchft from logging every quorum in full, where many islands may be there; before its modules are imported.

    Each island logs all of them: 230 kB of each quorum of a thousand. RUST_LOG=info brings it back.
    """
    if islands > NAMED:
        os.environ.setdefault("RUST_LOG", "warn")


class Quorum(NamedTuple):
    """The islands that wait for each other.

    Attributes:
        id: Number by which the lighthouse knows it.
        islands: Names of the islands.
        step: Largest of the numbers that they have asked with.
    """

    id: int
    islands: list[str]
    step: int


class Announced:
    """An island that is known to the lighthouse as long as this lasts."""

    def __init__(self, name: str, lighthouse: str, address: str, store_port: int) -> None:
        """Makes it known by its name, and its store at an address and a port.

        Raises:
            PierConfigError: If torchft is missing, or asks for what this plugin does not know.
        """
        coordination = torchft("coordination")
        self._server = coordination.ManagerServer(
            replica_id=name,
            lighthouse_addr=lighthouse,
            hostname=address,
            bind=f"{address}:0",
            store_addr=f"{address}:{store_port}",
            world_size=1,
            heartbeat_interval=HEARTBEAT,
            connect_timeout=CONNECT_TIMEOUT,
            quorum_retries=RETRIES,
        )
        self._client = coordination.ManagerClient(self._server.address(), connect_timeout=CONNECT_TIMEOUT)
        # Now, where all ranks learn of it, rather than in the first quorum on the one that asks.
        known_arguments(self._client._quorum, {**QUORUM, "step": 0, "timeout": CONNECT_TIMEOUT, "commit_failures": 0})

    def quorum(self, step: int, failures: int, within: datetime.timedelta) -> Quorum:
        """Forms a quorum: ``step`` is larger than any before, ``failures`` the number of the last ones that came to nothing."""
        known = {**QUORUM, "step": step, "timeout": within, "commit_failures": failures}
        found = self._client._quorum(**known_arguments(self._client._quorum, known))
        return Quorum(found.quorum_id, found.replica_ids, found.max_step)


# torchft's nightly passes on how PyTorch connects a process group again: islands have connections of their own.
QUORUM = {"group_rank": 0, "checkpoint_metadata": "", "shrink_only": False, "init_sync": False, "reconfigure_handle": ""}


def known_arguments(function: Callable[..., object], known: Mapping[str, object]) -> dict[str, object]:
    """Those of the ``known`` arguments that a function of torchft takes: all but what older ones do without.

    Raises:
        PierConfigError: If it takes others.
    """
    asked = inspect.signature(function).parameters
    needed = {name for name, one in asked.items() if one.default is one.empty}
    if unknown := sorted((needed - known.keys()) | (known.keys() - asked.keys() - {"reconfigure_handle"})):
        raise PierConfigError(
            f"--pier-lighthouse: this torchft has another signature in {', '.join(unknown)} than this plugin was tested with. "
            "Install one that it was: pip install 'torchft>=0.2,<0.3'."
        )
    return {name: value for name, value in known.items() if name in asked}
