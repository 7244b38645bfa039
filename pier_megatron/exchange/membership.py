"""Which islands are there when groups are jobs that come and go: torchft's lighthouse, quorum and process groups.

Nothing here decides anything together with others; all of that is torchft's (https://github.com/pytorch/torchft, in the extra
``islands``). What islands send each other is tensors and the texts of torchft's own messages: nothing is unpickled.
"""

import datetime
import socket
import uuid
from typing import Any

import torch
import torch.distributed as dist

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.collectives import GroupExchange

# How often an island says that it is alive. The lighthouse gives it up after several of these.
_HEARTBEAT = datetime.timedelta(milliseconds=200)
_CONNECT = datetime.timedelta(seconds=10)


def torchft(module: str) -> Any:
    """Imports a module of torchft.

    Raises:
        PierConfigError: If it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(f"torchft.{module}")
    except ImportError as error:
        raise PierConfigError(
            f"--pier-lighthouse needs torchft, which cannot be imported ({error}). Install it with pip install "
            "'pier-megatron[islands]'."
        ) from error


class Membership:
    """The membership of this rank's island, and its communicator with the same rank of the other islands."""

    def __init__(
        self, index: int, lighthouse: str, address: str, world: dist.ProcessGroup, codec: Codec, timeout: datetime.timedelta
    ) -> None:
        """Makes the island known; called by all of its ranks.

        Args:
            index: Of the island among all that may be there.
            lighthouse: Where torchft's lighthouse is, such as ``http://host:29510``.
            address: Of this node, at which other islands reach it.
            world: The ranks of the island.
            codec: What sums look like on the wire.
            timeout: For a meeting to come about, and for every collective in it.
        """
        self._codec, self._timeout, self._world = codec, timeout, world
        self._members: tuple[int, tuple[str, ...]] | None = None
        self._failures = 0
        manager: list[Any] = [None]
        if world.rank() == 0:
            self._store = _store_at(address)
            self._server = torchft("coordination").ManagerServer(
                replica_id=f"{index}:{uuid.uuid4()}",
                lighthouse_addr=lighthouse,
                hostname=address,
                bind=f"{address}:0",
                store_addr=f"{address}:{self._store.port}",
                world_size=world.size(),
                heartbeat_interval=_HEARTBEAT,
                connect_timeout=_CONNECT,
                quorum_retries=0,
            )
            manager = [self._server.address()]
        dist.broadcast_object_list(manager, src=dist.get_global_rank(world, 0), group=world)
        self._client = torchft("coordination").ManagerClient(manager[0], connect_timeout=_CONNECT)
        groups = torchft("process_group")
        kind = groups.ProcessGroupNCCL if dist.get_backend(world) == "nccl" else groups.ProcessGroupGloo
        self._group = kind(timeout=timeout)

    def meet(self) -> GroupExchange:
        """Waits until the islands that are there have come together; called by all ranks of each.

        Returns:
            Collectives with the same rank of all of them, groups numbered by island.

        Raises:
            RuntimeError: If they did not, for whatever reason: see :meth:`agree`.
        """
        quorum = self._client._quorum(
            group_rank=self._world.rank(),
            step=1,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=self._timeout,
            commit_failures=self._failures,
            init_sync=False,
        )
        islands = [int(name.split(":")[0]) for name in quorum.replica_ids]
        members = (quorum.quorum_id, tuple(quorum.replica_ids))
        if members != self._members:
            self._members = None
            store = f"{quorum.store_address}/pier/{quorum.quorum_id}/{self._world.rank()}"
            self._group.configure(store, quorum.replica_ids[quorum.replica_rank], quorum.replica_rank, len(islands))
            self._members = members
        return GroupExchange(self._group.parent if len(islands) > 1 else None, self._codec, islands)

    def agree(self, meeting: GroupExchange | None, succeeded: bool) -> bool:
        """Whether what a meeting was for has succeeded on all ranks of all islands; called by all ranks of the island.

        After a failure the next meeting is another one, of those who are left then.

        Args:
            meeting: None if there was none.
            succeeded: On this rank.
        """
        if meeting is not None and succeeded:
            try:
                meeting.gather(torch.ones(1)).result()
            except (RuntimeError, ValueError):
                succeeded = False
        verdict = torch.tensor([succeeded], dtype=torch.int32, device=_device_of(self._world))
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=self._world)
        if verdict.item():
            self._failures = 0
            return True
        self._failures += 1
        self._members = None
        self._group.abort(errored=False)
        return False


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")


def _store_at(address: str) -> Any:
    """A store that listens at one address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
