"""Outer steps among islands that come and go: taken again by those who are left, until all of them have it.

An outer step is applied only when every rank of every island has all that it needs. Until then nothing has changed, so that a
step which failed is simply taken again. An island that joins takes over the anchor and the momentum from one that is there,
sends nothing, and comes to the same new anchor by the same update.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.collectives import Exchange, GroupExchange
from pier_megatron.outer.members import Members
from pier_megatron.outer.rounds import OuterRound
from pier_megatron.outer.staging import Staging, one_ahead
from pier_megatron.outer.state import ANCHOR, COMMON
from pier_megatron.outer.stopwatch import Stopwatch
from pier_megatron.outer.verdicts import ABSENT, DivergedError, Judge, Verdicts


class LeftBehindError(RuntimeError):
    """The other islands went on without this one."""


class Membership(Protocol):
    """Who is there; see :class:`pier_megatron.exchange.membership.Membership`."""

    def meet(self) -> GroupExchange:
        """Waits until the islands that are there have come together."""

    def agree(self, meeting: GroupExchange | None, succeeded: bool) -> bool:
        """Whether what a meeting was for has succeeded everywhere."""


@dataclasses.dataclass(frozen=True)
class Islands:
    """The islands that a group is one of.

    Attributes:
        membership: Who is there.
        own: Index of this one among all that may be there.
        wait_seconds: How long it tries to come together with enough others.
    """

    membership: Membership
    own: int
    wait_seconds: float


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What has come of a meeting.

    Attributes:
        iteration: Of those who were there before; that of this island from now on.
        has_joined: Whether this island was not, and holds the anchor and the momentum of the others now.
        last_common_step: Iteration of the last outer step of all, this one included.
        round: The outer step, of which only :meth:`OuterRound.finish` is left to do; None if none was due.
        restarted: Islands that go back to the anchor with moments of another one, by their index among those that met.
    """

    iteration: int
    has_joined: bool
    last_common_step: int
    round: OuterRound | None = None
    restarted: Sequence[int] = ()


# What each island says of itself when it comes to a meeting.
_ISLAND, _SYNCED, _ITERATION, _IS_DUE, _CHECKSUM = range(5)


class Gatherings:
    """The meetings of an island with those that are there."""

    def __init__(
        self,
        islands: Islands,
        stagings: Sequence[Staging],
        judge: Judge,
        members: Members,
        make_round: Callable[[int, Exchange, Verdicts, Stopwatch], OuterRound],
        device: torch.device,
    ) -> None:
        """Begins with an island that has not met anybody.

        Args:
            islands: Among which it is.
            stagings: Of the outer states.
            judge: Of its pseudo-gradients.
            members: Restarts islands whose parameters are not finite.
            make_round: Prepares an outer step.
            device: For collectives.
        """
        self._membership, self._island, self._wait_seconds = islands.membership, islands.own, islands.wait_seconds
        self._stagings, self._judge, self._members = stagings, judge, members
        self._make_round, self._device = make_round, device

    def meet(self, iteration: int, last_common_step: int, fragments: Sequence[int]) -> Meeting | None:
        """Comes together with all islands that are there; called by all ranks of the island.

        Args:
            iteration: Iterations completed.
            last_common_step: See :class:`pier_megatron.outer.loop.OuterLoop`.
            fragments: Whose outer step is due; none before the first iteration.

        Returns:
            What has come of it; None if nothing has, for longer than this island waits.

        Raises:
            LeftBehindError: If the others have taken an outer step that this island has missed.
            DivergedError: If no island has finite parameters.
            PierConfigError: If two islands cannot be of one run.
        """
        deadline = time.monotonic() + self._wait_seconds
        while True:
            exchange, meeting = None, None
            try:
                exchange = self._membership.meet()
                meeting = self._attempt(exchange, iteration, last_common_step, fragments)
            except (LeftBehindError, DivergedError, PierConfigError):
                raise
            except (RuntimeError, OSError, ValueError) as error:
                # A ValueError is what PyTorch raises when it logs an error of a communicator that it has not made itself.
                where = f"island {self._island} after iteration {iteration}"
                print(f" Pier: {where}: {_first_line(error)}; tries again", flush=True)
            if self._membership.agree(exchange, meeting is not None):
                return meeting
            if time.monotonic() > deadline:
                return None

    def _attempt(self, exchange: GroupExchange, iteration: int, last_common_step: int, fragments: Sequence[int]) -> Meeting:
        stopwatch = Stopwatch(self._device)
        with stopwatch.running():
            checksum = sum(int(staging.state.checksum(ANCHOR)) for staging in self._stagings)
            own = [self._island, last_common_step, iteration, int(bool(fragments)), checksum]
            standings = exchange.gather(torch.tensor(own, device=self._device)).result().tolist()
            present = _those_present(standings)
            here, source = exchange.rank in present, standings[present[0]]
            if not (fragments and here):
                self._check_name(standings)
            if fragments and not here:
                raise LeftBehindError(
                    f"Island {self._island} missed the outer step after iteration {source[_SYNCED]}: it is at iteration "
                    f"{iteration} with the anchor of iteration {last_common_step}. What it learned since is lost; start it "
                    "again, for example by torchrun --max-restarts, and it joins the others."
                )
            absent = [rank for rank in range(exchange.size) if rank not in present]
            if absent:
                self._hand_over(exchange, present[0], absent)
            if not source[_IS_DUE]:
                return Meeting(source[_ITERATION], not here, source[_SYNCED], None)
            verdicts = self._judge.verdicts(fragments, exchange) if here else Verdicts(exchange, ABSENT, self._device)
            verdicts.check(source[_ITERATION])
            round_ = self._make_round(source[_ITERATION], exchange, verdicts, stopwatch)
            round_.begin()
            round_.arrive()
            restarted = self._members.restart_left_out(round_, source[_ITERATION])
        return Meeting(source[_ITERATION], not here, source[_ITERATION], round_, restarted)

    def _check_name(self, standings: Sequence[Sequence[int]]) -> None:
        """Refuses to join under a name that is taken. Whoever has it already goes on."""
        if [standing[_ISLAND] for standing in standings].count(self._island) > 1:
            raise PierConfigError(
                f"--pier-island {self._island}: another island of that number is there. Each needs one of its own, from 0 to "
                "--pier-groups less 1."
            )

    def _hand_over(self, exchange: GroupExchange, source: int, absent: Sequence[int]) -> None:
        lent = one_ahead(staging.lend(chunk, COMMON) for staging in self._stagings for chunk in staging.state.chunks)
        for staged in lent:
            for name in COMMON:
                exchange.broadcast(staged.tensors[name], source, absent)
            staged.give_back(COMMON)


def _those_present(standings: Sequence[Sequence[int]]) -> list[int]:
    """The islands that are there already, by rank in the meeting: where an outer step is due, or else the furthest."""
    places = [(standing[_IS_DUE], standing[_SYNCED], standing[_ITERATION]) for standing in standings]
    present = [rank for rank, place in enumerate(places) if place == max(places)]
    if len({standings[rank][_CHECKSUM] for rank in present}) > 1:
        raise PierConfigError(
            f"Islands {[standings[rank][_ISLAND] for rank in present]} are at iteration {places[present[0]][-1]} with "
            "different anchors. All need the same --seed, or checkpoints of one run."
        )
    return present


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
