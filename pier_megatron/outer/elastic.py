"""Elastic islands as the participants of outer steps: survivors retry a step that failed, until all of them have it.

An outer step is applied only when every rank of every island has all that it needs. Until then nothing has changed, so a failed
step is simply retried. An island that joins takes over the anchor and the momentum from another island,
sends nothing, and computes the same new anchor by the same update.
"""

import dataclasses
import datetime
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.codecs import Codec
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.membership import Membership, Outcome
from pier_megatron.exchange.wire import Wire
from pier_megatron.outer.behind import Behind
from pier_megatron.outer.rounds import OuterRound
from pier_megatron.outer.share import Share
from pier_megatron.outer.snapshot import Progress, RoundBuffers
from pier_megatron.outer.standings import (
    IS_DUE,
    ISLAND,
    ITERATION,
    NOWHERE,
    SYNCED,
    LeftBehindError,
    refusals_of,
    those_present,
    weight,
)
from pier_megatron.outer.state import ANCHOR, REDUCED, RESIDUAL
from pier_megatron.outer.steps import NEVER, round_at
from pier_megatron.outer.stopwatch import Stopwatch
from pier_megatron.outer.verdicts import ABSENT, NOT_FINITE, NOT_MET, DivergedError, Verdicts


@dataclasses.dataclass(frozen=True)
class ElasticMembership:
    """The islands that a group is one of.

    Attributes:
        quorums: Quorums of the running islands.
        own: Index of this island among all possible ones.
        wait_seconds: Seconds that it tries to form a quorum.
    """

    quorums: Membership
    own: int
    wait_seconds: float


@dataclasses.dataclass(frozen=True)
class _Formed:
    """What has come of a quorum.

    Attributes:
        iteration: Iteration agreed by the quorum; this island continues from it.
        has_joined: Whether this island is new in it, and now holds the anchor and the momentum of the others.
        last_common_step: Iteration of the last outer step of all, this one included.
        round: Outer step that still needs :meth:`OuterRound.finish`; None if none was due.
        is_whole: Whether nobody has joined.
        refusal: Reason why this island cannot continue, although the others can.
    """

    iteration: int
    has_joined: bool
    last_common_step: int
    round: OuterRound | None
    is_whole: bool
    refusal: LeftBehindError | None = None


# Time to form a quorum after the last failure.
_LEAST_SECONDS = 1.0


class _Past(GroupExchange):
    """Islands that have met, whose sums have arrived."""

    def __init__(self, codec: Codec, groups: Sequence[int], own: int) -> None:
        super().__init__(None, codec, groups)
        self.size, self.rank, self.wire = len(groups), self.groups.index(own), Wire(codec, len(groups))


class ElasticPeers:
    """The islands that run, which agree after each outer step; see :class:`pier_megatron.outer.steps.Peers`.

    An exchange that is hidden behind training is another thread's. It has communicators of its own, reads the anchor and what
    the outer rule remembers, and changes nothing that training uses. One is under way at a time.
    """

    def __init__(self, config: PierConfig, share: Share, islands: ElasticMembership) -> None:
        """Begins with an island that has not met the others."""
        config.check_elastic()
        self._config, self._share, self._quorums, self.wait_seconds = config, share, islands.quorums, islands.wait_seconds
        self.group, self.audience, self.last_restart, self.is_deserted = islands.own, share.exchange, NEVER, False
        self._has_own_anchor, self._is_new = True, True
        self._behind: Behind[_Formed | None] | None = None
        self._attempted: OuterRound | None = None

    def begin(self, round_: OuterRound, progress: Progress, is_hidden: bool) -> None:
        """Takes the pseudo-gradient, and lets the islands meet behind training."""
        round_.begin()
        if is_hidden:
            # Only at the start an island may take over what others have.
            self._is_new = False
            place = dataclasses.replace(progress)
            self._behind = Behind(lambda: self._meet(place, round_), self._share.device)

    def proceed(self, round_: OuterRound, age: int) -> None:
        """Does nothing: the other thread goes on by itself."""

    def land(self, round_: OuterRound, progress: Progress, is_hidden: bool) -> OuterRound | None:
        """Applies what has arrived; None if nobody came for longer than this island waits.

        Raises:
            LeftBehindError: If the others have taken an outer step that this island has missed.
            DivergedError: If no island has finite parameters.
            PierConfigError: If two islands cannot be of one run.
        """
        if not is_hidden:
            return self._take_over(self._meet(progress, round_), progress)
        # One that was resumed has arrived before it was saved.
        self.is_deserted = self._behind is not None and self._behind.result() is None
        self._behind = None
        if self.is_deserted:
            return None
        round_.finish()
        return round_

    def _take_over(self, formed: _Formed | None, progress: Progress) -> OuterRound | None:
        """Applies what has arrived, where nothing can fail any more; ``progress`` becomes that of the others."""
        self.is_deserted = formed is None
        if formed is None:
            return None
        taken, last = formed.round, self._config.train_iters
        if taken is not None:
            taken.finish(keep_progress=False)
        if formed.has_joined:
            # It had parameters of its own, of all fragments.
            self._share.return_to_anchor()
            # Where the others apply what this island has applied already.
            landing = formed.iteration + (self._config.overlap if taken is not None else 0)
            progress.iteration = formed.iteration if formed.iteration == last else min(landing, last - 1)
            progress.last_common_step, progress.is_local, progress.trained = formed.last_common_step, True, 0
            progress.is_synchronised, progress.under_way = False, 0
            self._share.commit()
        return taken

    def join(self, due: OuterRound | None, rounds: Sequence[OuterRound], progress: Progress) -> tuple[OuterRound | None, bool]:
        """Meets the islands, and takes an outer step that is due with them."""
        formed = self._meet(progress, due, max((each.begun for each in rounds), default=NOWHERE))
        return self._take_over(formed, progress), formed is None or formed.is_whole

    def restart(self, round_: OuterRound, iteration: int) -> Sequence[int]:
        """Forgets the moments of an island that was excluded, as one that joins has none.

        Nothing is sent: all have agreed on the step already, and who is lost now must not undo it.
        """
        restarted = [index for index, verdict in enumerate(round_.verdicts.all()) if verdict == NOT_FINITE]
        if round_.exchange.rank in restarted:
            self._share.moments.forget()
            self.last_restart = iteration
        return restarted

    def average_sites(self, iteration: int) -> None:
        """Does nothing: islands have no sites."""

    def settle(self, rounds: Sequence[OuterRound]) -> tuple[list[RoundBuffers], dict[int, int]]:
        """Waits until the islands have agreed."""
        self.is_deserted |= self._behind is not None and self._behind.result() is None
        buffers = []
        for round_ in rounds if not self.is_deserted else ():
            met = dict(zip(round_.exchange.groups, round_.verdicts.all(), strict=True))
            verdicts = [met.get(group, NOT_MET) for group in range(self._config.groups)]
            buffers.append(dataclasses.replace(round_.settle(), verdicts=verdicts))
        return buffers, {} if self.last_restart == NEVER else {0: self.last_restart}

    def met(self, saved: RoundBuffers) -> GroupExchange:
        """Returns the islands that have agreed on the round."""
        groups = [group for group, verdict in enumerate(saved.verdicts) if verdict != NOT_MET]
        return _Past(self._config.codec, groups, self.group)

    def abandon(self) -> None:
        """Waits for the other thread."""
        if self._behind is not None:
            self._behind.wait()
            self._behind = None

    def known(self, iteration: int) -> list[GroupExchange]:
        """This island alone."""
        return [self.audience]

    def _meet(self, progress: Progress, due: OuterRound | None, under_way: int = NOWHERE) -> _Formed | None:
        """Meets the islands until all of them have agreed, and receives from them what this one does not have.

        Args:
            progress: Progress of this island.
            due: Outer step that it is due to take.
            under_way: Iteration after which the outer step began that it has yet to apply.

        Returns:
            What has come of it; None if nobody came for longer than this island waits.
        """
        deadline = time.monotonic() + self.wait_seconds
        where = f"island {self.group} after iteration {progress.iteration}"
        while True:
            exchange, formed, refusal = None, None, None
            # What the ranks of the island find out together comes first. From here on one of them may fail alone, and would not
            # join a collective in which the others wait.
            own = self._standing(progress, due, under_way)
            try:
                within = max(deadline - time.monotonic(), _LEAST_SECONDS)
                exchange = self._quorums.meet(datetime.timedelta(seconds=within))
                formed = self._attempt(exchange, own, due)
                outcome = Outcome.SUCCEEDED
            except (DivergedError, PierConfigError) as error:
                refusal, outcome = error, Outcome.REFUSED
            except (RuntimeError, OSError, ValueError) as error:
                # A ValueError is what PyTorch raises when it logs an error of a communicator that it has not made itself.
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                print(f" Pier: {where}: {said}; tries again", flush=True)
                outcome = Outcome.FAILED if time.monotonic() < deadline else Outcome.GIVES_UP
            # The ranks of an island decide together: one that ended or continued alone would leave the others waiting.
            of_rank, outcome = outcome, self._quorums.agree(exchange, outcome)
            attempted, self._attempted = self._attempted, None
            if attempted is not None and outcome != Outcome.SUCCEEDED:
                attempted.lose()
                if attempted is not due:
                    attempted.drop()
            if outcome == Outcome.SUCCEEDED:
                assert formed is not None
                if formed.refusal is not None:
                    raise formed.refusal
                self._is_new, self._has_own_anchor = False, True
                self._keep_dropped(formed, under_way)
                return formed
            if of_rank == Outcome.SUCCEEDED:
                print(f" Pier: {where}: a rank did not receive all of it; retrying with the survivors", flush=True)
            if outcome == Outcome.REFUSED:
                assert refusal is not None
                raise refusal
            if outcome == Outcome.GIVES_UP:
                return None

    def _attempt(self, exchange: GroupExchange, own: Tensor, due: OuterRound | None) -> _Formed:
        with record_function("pier::quorum"):
            standings: list[list[int]] = exchange.gather(own).result().tolist()
            present = those_present(standings)
            here, source = exchange.rank in present, standings[present[0]]
            refusals = refusals_of(standings, present)
            behind = {rank: error for rank, error in refusals.items() if isinstance(error, LeftBehindError)}
            # Islands left behind join this step's collectives before they end, so that it costs the others no attempt. But the
            # lighthouse counted them, and the others alone may be too few.
            if source[SYNCED] == NOWHERE or 2 * (exchange.size - len(behind)) <= self._config.groups:
                behind = {}
            if exchange.rank in refusals.keys() - behind.keys():
                raise refusals[exchange.rank]
            if refusals.keys() - behind.keys():
                # They do not join the next collective, so no rank may wait for them there.
                raise RuntimeError(
                    f"islands that cannot continue with the others end: {[standings[rank][ISLAND] for rank in refusals]}"
                )
            absent = sorted({*range(exchange.size)} - {*present} - {*behind})
            if absent:
                # Until the outer step has succeeded: the anchor of the others with the iteration of this island is that of
                # nobody.
                self._has_own_anchor = self._has_own_anchor and exchange.rank not in absent
                self._share.hand_over(exchange, present[0], absent)
            iteration, is_whole, refusal = source[ITERATION], not absent, behind.get(exchange.rank)
            if not source[IS_DUE]:
                return _Formed(iteration, not here, source[SYNCED], None, is_whole, refusal)
            round_ = due if here and due is not None else self._without_own(iteration)
            self._attempted = round_
            verdicts = Verdicts(exchange, round_.verdict, round_.lengths)
            verdicts.check(iteration)
            verdicts.weights = [weight(standings, verdicts.counted, rank) for rank in range(exchange.size)]
            round_.meet(exchange, verdicts)
            round_.arrive()
        return _Formed(iteration, not here, iteration, round_, is_whole, refusal)

    def _keep_dropped(self, formed: _Formed, under_way: int) -> None:
        """Keeps what the codec has dropped, now that all islands have the sum."""
        if formed.has_joined or (under_way != NOWHERE and not formed.is_whole):
            # It belongs to another life of this island, or to an outer step that nobody applies.
            for state in self._share.states:
                state.forget((RESIDUAL, REDUCED))
        if formed.round is not None:
            formed.round.keep_dropped()

    def _without_own(self, iteration: int) -> OuterRound:
        """The outer step after an iteration that this island has not trained: it sends nothing."""
        round_ = round_at(self._config, self._share, iteration, ABSENT, Stopwatch(self._share.device))
        round_.measure()
        round_.begin()
        return round_

    def _standing(self, progress: Progress, due: OuterRound | None, under_way: int) -> Tensor:
        # After a quorum that failed, what it handed over may still be on its way to the host.
        [checksum] = self._share.checksums((ANCHOR,))
        # Sums over the whole island, so that all its ranks judge alike.
        sums = self._quorums.sum_inside(torch.stack([checksum, torch.full_like(checksum, not self._has_own_anchor)]))
        checksum_of_all, without_own_anchor = sums.tolist()
        place = [NOWHERE, NOWHERE] if without_own_anchor else [progress.last_common_step, progress.iteration]
        own = [self.group, *place, int(due is not None), checksum_of_all, progress.under_way, int(self._is_new), under_way]
        return torch.tensor(own, device=self._share.device)
