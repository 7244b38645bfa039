"""Outer steps of elastic islands: survivors retry a step that failed, until all of them have it.

An outer step is applied only when every rank of every island has all that it needs. Until then nothing has changed, so a failed
step is simply retried. An island that joins takes over the anchor and the momentum from another island,
sends nothing, and computes the same new anchor by the same update.
"""

import collections
import dataclasses
import datetime
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.membership import Membership, Outcome
from pier_megatron.exchange.sites import SiteExchange
from pier_megatron.outer.report import OuterStepReports
from pier_megatron.outer.rounds import OuterRound, Stopwatch
from pier_megatron.outer.share import Share
from pier_megatron.outer.snapshot import Progress
from pier_megatron.outer.state import ANCHOR
from pier_megatron.outer.steps import OuterSteps
from pier_megatron.outer.verdicts import ABSENT, DivergedError, Verdicts, own_verdict


class LeftBehindError(PierConfigError):
    """The other islands continued without this one."""


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
        restarted: Islands that go back to the anchor with moments of another one, by their index in the quorum.
        refusal: Reason why this island cannot continue, although the others can.
    """

    iteration: int
    has_joined: bool
    last_common_step: int
    round: OuterRound | None = None
    restarted: Sequence[int] = ()
    refusal: LeftBehindError | None = None


# Standing of an island, which it sends to its quorum.
_ISLAND, _SYNCED, _ITERATION, _IS_DUE, _CHECKSUM, _TRAINED, _IS_NEW = range(7)
Standing = Sequence[int]

# Standing of an island that has dropped its own anchor and does not hold that of the others yet.
_NOWHERE = -1

# Time to form a quorum after the last failure.
_LEAST_SECONDS = 1.0

_TO_REJOIN = "What it learned since is lost; start it again, for example by torchrun --max-restarts, and it joins the others."


class ElasticSteps(OuterSteps):
    """Outer steps in which the running islands take part, and agree after each."""

    def __init__(
        self,
        config: PierConfig,
        share: Share,
        reports: OuterStepReports,
        sites: SiteExchange | None,
        islands: ElasticMembership,
    ) -> None:
        """Begins with an island that has not met the others."""
        super().__init__(config, share, reports, sites)
        config.check_elastic()
        self._quorums, self._island, self.wait_seconds = islands.quorums, islands.own, islands.wait_seconds
        self._has_own_anchor, self._is_new = True, True
        self._restarted: Sequence[int] = ()
        self._attempted: OuterRound | None = None

    def join(self, progress: Progress) -> None:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.join`."""
        is_left = progress.last_common_step < progress.iteration
        self.take(progress, self._config.fragments_due(progress.iteration) if is_left else ())
        if self.is_deserted:
            raise RuntimeError(f"--pier-island-wait: too few islands for longer than {self._config.island_wait} minutes.")

    def form(self, progress: Progress, fragments: Sequence[int]) -> OuterRound | None:
        """Meets the running islands, and receives from them what this one does not have; ``progress`` becomes theirs.

        When an island starts, the fragments are those of a step that its last process could not take.

        Returns:
            Round whose exchange has arrived; None if no step is due, or nobody came for longer than this island waits.

        Raises:
            LeftBehindError: If the others have taken an outer step that this island has missed.
            DivergedError: If no island has finite parameters.
            PierConfigError: If two islands cannot be of one run.
        """
        with self.phase("quorum", progress.iteration):
            formed = self._meet(progress, fragments)
        self.is_deserted = formed is None
        if formed is None:
            return None
        progress.iteration, progress.last_common_step = formed.iteration, formed.last_common_step
        if formed.has_joined:
            progress.is_local, progress.trained = True, 0
        if formed.has_joined and formed.round is None:
            self._share.return_to_anchor()
            self._share.commit()
            progress.is_synchronised = False
        self._restarted = formed.restarted
        return formed.round

    def carry_out(self, round_: OuterRound) -> None:
        """Applies what has arrived: nothing can fail any more."""
        round_.finish()
        # An island that has joined had parameters of its own.
        self._share.return_to_anchor()

    def restart(self, round_: OuterRound, iteration: int) -> Sequence[int]:
        """Returns the islands that were restarted before the outer step was applied."""
        return self._restarted

    def _meet(self, progress: Progress, fragments: Sequence[int]) -> _Formed | None:
        deadline = time.monotonic() + self.wait_seconds
        where = f"island {self._island} after iteration {progress.iteration}"
        verdict = own_verdict(self._share)
        while True:
            exchange, formed, refusal = None, None, None
            # What the ranks of the island find out together comes first. From here on one of them may fail alone, and would not
            # join a collective in which the others wait.
            own = self._standing(progress, fragments)
            try:
                within = max(deadline - time.monotonic(), _LEAST_SECONDS)
                exchange = self._quorums.meet(datetime.timedelta(seconds=within))
                formed = self._attempt(exchange, own, verdict)
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
                attempted.drop(is_lost=True)
            if outcome == Outcome.SUCCEEDED:
                if formed is not None and formed.refusal is not None:
                    raise formed.refusal
                self._is_new, self._has_own_anchor = False, True
                return formed
            if of_rank == Outcome.SUCCEEDED:
                print(f" Pier: {where}: a rank did not receive all of it; retrying with the survivors", flush=True)
            if outcome == Outcome.REFUSED:
                assert refusal is not None
                raise refusal
            if outcome == Outcome.GIVES_UP:
                return None

    def _attempt(self, exchange: GroupExchange, own: Tensor, verdict: int) -> _Formed:
        stopwatch = Stopwatch(self._share.device)
        with stopwatch.running():
            standings: list[list[int]] = exchange.gather(own).result().tolist()
            present = those_present(standings)
            here, source = exchange.rank in present, standings[present[0]]
            refusals = refusals_of(standings, present)
            behind = {rank: error for rank, error in refusals.items() if isinstance(error, LeftBehindError)}
            # Islands left behind join this step's collectives before they end, so that it costs the others no attempt. But the
            # lighthouse counted them, and the others alone may be too few.
            if source[_SYNCED] == _NOWHERE or 2 * (exchange.size - len(behind)) <= self._config.groups:
                behind = {}
            if exchange.rank in refusals.keys() - behind.keys():
                raise refusals[exchange.rank]
            if refusals.keys() - behind.keys():
                # They do not join the next collective, so no rank may wait for them there.
                raise RuntimeError(
                    f"islands that cannot continue with the others end: {[standings[rank][_ISLAND] for rank in refusals]}"
                )
            absent = sorted({*range(exchange.size)} - {*present} - {*behind})
            if absent:
                # Until the outer step has succeeded: the anchor of the others with the iteration of this island is that of
                # nobody.
                self._has_own_anchor = self._has_own_anchor and exchange.rank not in absent
                self._share.hand_over(exchange, present[0], absent)
            if not source[_IS_DUE]:
                return _Formed(source[_ITERATION], not here, source[_SYNCED], None, refusal=behind.get(exchange.rank))
            verdicts = Verdicts(exchange, verdict if here else ABSENT, self._share.device)
            verdicts.check(source[_ITERATION])
            self._attempted = round_ = self.round(source[_ITERATION], exchange, verdicts, stopwatch)
            round_.weight = _weight(standings, verdicts.counted, exchange.rank)
            round_.begin()
            round_.arrive()
            restarted = super().restart(round_, source[_ITERATION])
        return _Formed(source[_ITERATION], not here, source[_ITERATION], round_, restarted, behind.get(exchange.rank))

    def _standing(self, progress: Progress, fragments: Sequence[int]) -> Tensor:
        # After a quorum that failed, what it handed over may still be on its way to the host.
        [checksum] = self._share.checksums((ANCHOR,))
        # Sums over the whole island, so that all its ranks judge alike.
        sums = torch.stack([checksum, torch.full_like(checksum, not self._has_own_anchor)])
        checksum_of_all, without_own_anchor = self._share.over_group(sums).tolist()
        place = [_NOWHERE, _NOWHERE] if without_own_anchor else [progress.last_common_step, progress.iteration]
        own = [self._island, *place, int(bool(fragments)), checksum_of_all, progress.trained, int(self._is_new)]
        return torch.tensor(own, device=self._share.device)


def _how_far(standing: Standing) -> tuple[int, ...]:
    # The newest anchor comes first: a step on an older one would take the others back to it.
    return standing[_SYNCED], standing[_IS_DUE], standing[_ITERATION]


def _weight(standings: Sequence[Standing], counted: Sequence[bool], rank: int) -> float:
    """How much a pseudo-gradient counts, by the samples behind it, in units of those that count on average."""
    trained = [standing[_TRAINED] for standing, counts in zip(standings, counted, strict=True) if counts]
    # All have let everything pass, as Megatron's --iterations-to-skip may say.
    return standings[rank][_TRAINED] * len(trained) / sum(trained) if sum(trained) else 1.0


def those_present(standings: Sequence[Standing]) -> list[int]:
    """The islands whose anchor all continue from, by rank in the quorum: the newest one, with an outer step due if on any.

    Of those with different anchors, most have the right one.
    """
    newest = max(map(_how_far, standings))
    furthest = [rank for rank, standing in enumerate(standings) if _how_far(standing) == newest]
    [(checksum, _)] = collections.Counter(standings[rank][_CHECKSUM] for rank in furthest).most_common(1)
    return [rank for rank in furthest if standings[rank][_CHECKSUM] == checksum]


def refusals_of(standings: Sequence[Standing], present: Sequence[int]) -> dict[int, LeftBehindError | PierConfigError]:
    """Why islands cannot continue with those present, by rank in the quorum."""
    source, are_present = standings[present[0]], set(present)
    found: dict[int, LeftBehindError | PierConfigError] = {}
    for rank, standing in enumerate(standings):
        island, synced, iteration = standing[_ISLAND], standing[_SYNCED], standing[_ITERATION]
        if source[_SYNCED] == _NOWHERE:
            found[rank] = LeftBehindError(f"Island {island} lost those whose anchor it was to take over. {_TO_REJOIN}")
        elif rank not in are_present and standing[_IS_DUE] and not standing[_IS_NEW]:
            found[rank] = LeftBehindError(
                f"Island {island} missed the outer step after iteration {source[_SYNCED]}: it is at iteration {iteration} with "
                f"an anchor of its own, of iteration {synced}. {_TO_REJOIN}"
            )
        elif rank not in are_present and _how_far(standing) == _how_far(source):
            found[rank] = PierConfigError(
                f"--pier-island {island} is at iteration {iteration} with another anchor than island {source[_ISLAND]}. All "
                "need the same --seed, or checkpoints of one run."
            )
    names = collections.Counter(standing[_ISLAND] for rank, standing in enumerate(standings) if rank not in found)
    for rank, standing in enumerate(standings):
        # An island that has met the others keeps its number.
        if rank not in found and standing[_IS_NEW] and names[standing[_ISLAND]] > 1:
            found[rank] = PierConfigError(
                f"--pier-island {standing[_ISLAND]}: another island of that number is there. Each needs one of its own, from 0 "
                "to --pier-groups less 1. If this one was started again, end the processes of its former start."
            )
    return found
