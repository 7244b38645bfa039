"""Membership of elastic islands: torchft's lighthouse and quorums.

Nothing here decides anything together with others; all of that is torchft's (https://github.com/pytorch/torchft, in the extra
``islands``). What islands send each other is tensors and the texts of torchft's own messages: nothing is unpickled.
"""

import collections
import datetime
import enum
import functools
import json
import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.authentication import Description, answer_peers, ask, island_of, read_secret
from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.communicator import Communicator, completes, connect, store_at
from pier_megatron.exchange.silence import REMEMBERED, SECONDS, Meeting, changes, lost_peer, neighbours
from pier_megatron.exchange.torchft_api import CONNECT_TIMEOUT, HEARTBEAT, Announced, keep_quiet


class Outcome(enum.IntEnum):
    """Outcome of a meeting on a rank. The outcome of an island is the least of its ranks'."""

    GIVES_UP = 0
    FAILED = 1
    REFUSED = 2
    SUCCEEDED = 3


class Membership:
    """The membership of this rank's island, and its communicator with the same rank of the other islands."""

    def __init__(
        self,
        index: int,
        lighthouse: str,
        address: str,
        world: dist.ProcessGroup,
        codec: Codec,
        timeout: datetime.timedelta,
        run: Description,
        most: int,
        secret_file: str | None = None,
    ) -> None:
        """Makes the island known; called by all of its ranks.

        Args:
            index: Number of the island among the ``most`` that may be there.
            lighthouse: Address of torchft's lighthouse, such as ``http://host:29510``.
            address: Address of this node, at which other islands reach it; that of the first rank counts.
            world: The ranks of the island, over gloo, on a communicator that nothing else uses: islands may meet behind
                training.
            codec: What sums look like on the wire.
            timeout: Time for a communicator to come about, and for every collective in it.
            run: What all islands must have in common before they exchange anything: plain values by what a user calls them.
            most: Number of islands that may be there.
            secret_file: Path of what proves that an island belongs to the run, on its first rank; None where nobody proves it.

        Raises:
            PierConfigError: If torchft is missing, the secret cannot be used, or the lighthouse does not answer.
        """
        self._codec, self._timeout, self._world, self._run = codec, timeout, world, run
        self._most = most
        self._members: tuple[int, tuple[str, ...]] | None = None
        self._admitted: list[str] = []
        self._there: list[str] = []
        self._known: frozenset[str] = frozenset()
        self._is_new = True
        self._last_quorum = self._meetings = self._failures = self._step = 0
        self._left: collections.deque[int] = collections.deque(maxlen=REMEMBERED)
        self._meeting: Meeting = [0, 0]
        self._store: Any = None
        host: list[Any] = ["", 0]
        if world.rank() == 0:
            try:
                self._secret = read_secret(secret_file)
                self._store = store_at(address)
                self._island = self._announce(index, lighthouse, address)
                host = [address, self._store.port]
            except PierConfigError as error:
                host[0] = str(error)
            except (RuntimeError, OSError, TypeError) as error:
                print(f" Pier: island {index}: {error}", flush=True)
                host[0] = (
                    f"--pier-lighthouse {lighthouse} and --pier-island-address {address}: no answer from the lighthouse, or "
                    "the address is none of this node. Start a lighthouse with pier-megatron lighthouse."
                )
        # An island may span nodes, and each node has its own --pier-island-address.
        dist.broadcast_object_list(host, group=world, group_src=0)
        name, port = host
        if not port:
            raise PierConfigError(name)
        if self._store is None:
            self._store = dist.TCPStore(name, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
        self._address, self._communicator = address, Communicator(self._store, timeout)

    def meet(self, within: datetime.timedelta) -> GroupExchange:
        """Waits until the islands have formed a quorum; called by all ranks of each, and then :meth:`agree`.

        Returns:
            Collectives with the same rank of all of them, groups numbered by island.

        Raises:
            RuntimeError: If they did not, for whatever reason.
            PierConfigError: If this island is of another run than they.
        """
        self._step = 0
        quorum = self._quorum(within)
        members = _members(quorum)
        if members != self._members:
            self._members, self._admitted = None, quorum["admitted"]
            self._communicator.close()
        place, size = self._admitted.index(quorum["own"]), len(self._admitted)
        group = None
        if size > 1:
            prefix = f"pier/{quorum['meeting']}/{self._world.rank()}"
            group = self._communicator.begin(
                self._key,
                functools.partial(self._silence, neighbours(self._admitted, place), quorum["meeting"]),
                functools.partial(connect, quorum["store"], prefix, (place, size), self._address, self._timeout),
            )
        self._members = members
        return GroupExchange(group, self._codec, [island_of(name) for name in self._admitted])

    def agree(self, meeting: GroupExchange | None, outcome: Outcome) -> Outcome:
        """Outcome of a meeting on all ranks of the island, if it has succeeded on the ranks of all islands.

        Called by all ranks of the island with their own outcome. Without success the remaining islands hold another meeting.
        """
        if meeting is not None and outcome == Outcome.SUCCEEDED:
            try:
                meeting.gather(torch.ones(1)).result().tolist()
            except (RuntimeError, ValueError):
                outcome = Outcome.FAILED
        if outcome != Outcome.SUCCEEDED:
            # Before this rank waits for the others, which may wait for other islands.
            self._leave()
        least = torch.tensor([outcome], dtype=torch.int32)
        of_island = dist.all_reduce(least, dist.ReduceOp.MIN, group=self._world, async_op=True)
        if meeting is not None and meeting.size > 1 and outcome == Outcome.SUCCEEDED:
            try:
                # Another rank of this island may still wait for islands. The first rank notices when one is gone.
                self._communicator.watched(functools.partial(completes, of_island))
            except RuntimeError:
                self._leave()
        of_island.wait()
        outcome = Outcome(int(least.item()))
        if outcome == Outcome.SUCCEEDED:
            self._failures, self._is_new = 0, False
            if self._world.rank() == 0 and self._there and (said := changes(self._there, self._admitted)):
                print(f" Pier: {len(self._admitted)} of {self._most} islands are there; {said}", flush=True)
            self._there = self._admitted
        else:
            self._failures += 1
            self._members = None
            self._leave()
        return outcome

    def sum_inside(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sums a short vector over the ranks of the island; in host memory."""
        total = numbers.cpu()
        dist.all_reduce(total, group=self._world)
        return total

    def _leave(self) -> None:
        """Ends this island's part in the meeting, and says so."""
        if self._step and self._step not in self._left:
            self._left.append(self._step)
        self._communicator.leave(self._key)

    @property
    def _key(self) -> str:
        """Key of this meeting in the island's store: a rank that sets it ends the exchange of the others."""
        return f"ends/{self._meetings}"

    def _silence(self, islands: Sequence[str], meeting: Meeting) -> str | None:
        """What is wrong with other islands in a meeting; the first rank asks.

        Once connected it asks the next island alone: whoever leaves then closes all its connections.
        """
        if self._world.rank() > 0:
            return None
        return lost_peer(islands[:1] if self._communicator.is_connected else islands, meeting, self._secret)

    def _announce(self, index: int, lighthouse: str, address: str) -> Announced:
        """Registers the island, on its first rank."""
        self._name = answer_peers(index, address, self._secret, self._description)
        self._at = [address, self._store.port]
        keep_quiet(self._most)
        return Announced(self._name, lighthouse, address, self._store.port)

    def _quorum(self, within: datetime.timedelta) -> Description:
        """Forms a quorum. One rank asks and passes on the answer: torchft could give each rank a different quorum."""
        self._meetings += 1
        key = f"meetings/{self._meetings}"
        if self._world.rank() == 0:
            try:
                said = self._ask(within) | {"store": self._at}
                self._step = said["step"]
                if _members(said) != self._members:
                    said |= self._admit(said)
                # Two islands may have heard from different ones, and would wait for each other.
                admitted = " ".join(said.get("admitted", self._admitted))
                said["meeting"] = self._meeting = [self._step, zlib.crc32(admitted.encode())]
            except PierConfigError as error:
                said = {"refusal": str(error)}
            except (RuntimeError, OSError) as error:
                said = {"error": str(error)}
            self._store.set(key, json.dumps(said))
            for past in ("meetings", "ends"):
                self._store.delete_key(f"{past}/{self._meetings - 1}")
        self._store.wait([key], within + CONNECT_TIMEOUT + self._timeout)
        told: Description = json.loads(self._store.get(key))
        if "refusal" in told:
            raise PierConfigError(told["refusal"])
        if "error" in told:
            raise RuntimeError(told["error"])
        return told

    def _description(self) -> Description:
        return {"is_new": self._is_new, "run": self._run, "store": self._at, "left": list(self._left), "meeting": self._meeting}

    def _admit(self, quorum: Description) -> Description:
        """Asks the islands of a quorum who they are, and excludes those without proof that they belong to the run.

        Islands of another run are kept apart, since a collective of tensors of unequal size can end the process of either.
        """
        own, names = quorum["own"], quorum["islands"]
        said = ask([name for name in names if name != own], self._secret, SECONDS) | {own: self._description()}
        known = {name: answer for name in names if (answer := said.get(name))}
        strangers = [name for name in names if name not in known]
        for name in strangers:
            how = "proves nothing: it has another --pier-secret-file, or none" if name in said else "does not answer"
            print(f" Pier: island {name} is refused: it {how}", flush=True)
        if len(known) == 1 and self._is_new and all(name in said for name in strangers) and strangers:
            raise PierConfigError(
                f"--pier-secret-file: none of the islands {', '.join(strangers)} proves to have the secret of this one. All "
                "need the same file."
            )
        if strangers and 2 * len(known) <= self._most:
            # The lighthouse has counted strangers, so that these alone may be fewer than its --min-islands.
            raise RuntimeError(f"{len(known)} of {self._most} islands of this run answer, must be more than half")
        common, others = _common_run(list(known.values()))
        if own in [list(known)[place] for place in others] and self._is_new:
            different = [
                f"{name} {self._run.get(name)} here and {common.get(name)} there"
                for name in [*common, *(self._run.keys() - common.keys())]
                if self._run.get(name) != common.get(name)
            ]
            raise PierConfigError(
                f"--pier-island {island_of(own)} is of another run than the other islands: {', '.join(different)}. All need "
                "the same arguments, layout and plugin."
            )
        if others:
            raise RuntimeError(f"islands of another run end: {[island_of(list(known)[place]) for place in others]}")
        # Not the store that the lighthouse names: that could be a stranger's.
        return {"admitted": list(known), "store": next(iter(known.values()))["store"]}

    def _ask(self, within: datetime.timedelta) -> Description:
        patience = 0.0
        while True:
            # The highest of all islands' numbers identifies a quorum; a new lighthouse restarts its own count. It grows, also
            # when the island with the fastest clock has gone.
            quorum = self._island.quorum(max(time.time_ns(), self._meeting[0] + 1), self._failures, within)
            if not patience and quorum.id <= self._last_quorum:
                patience = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
            if self._known.issubset(quorum.islands) or time.monotonic() > patience:
                break
            # A new lighthouse, which takes the first islands that it hears of for all. The others are on their way to it.
            self._left.append(quorum.step)
            time.sleep(HEARTBEAT.total_seconds())
        self._last_quorum, self._known = quorum.id, frozenset(quorum.islands)
        return {
            "id": quorum.id,
            "islands": quorum.islands,
            "own": self._name,
            "step": quorum.step,
        }


def _members(quorum: Description) -> tuple[int, tuple[str, ...]]:
    """What tells a communicator from another."""
    return quorum["id"], tuple(quorum["islands"])


def _common_run(said: Sequence[Description]) -> tuple[Description, list[int]]:
    """The run of most islands, and the places of the others; islands that have met before decide alone, if there are any."""
    met_before = [each for each in said if not each["is_new"]] or said
    [(text, _)] = collections.Counter(json.dumps(each["run"], sort_keys=True) for each in met_before).most_common(1)
    common: Description = json.loads(text)
    return common, [place for place, each in enumerate(said) if each["run"] != common]
