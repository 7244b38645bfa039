"""The outer steps of one rank: each begins, perhaps crosses behind training, and lands."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import GroupExchange, sum_over
from pier_megatron.outer.memory import buffers_at_once
from pier_megatron.outer.report import OuterStepReports
from pier_megatron.outer.rounds import OuterRound, momentum_warmup
from pier_megatron.outer.rules import rule_at
from pier_megatron.outer.share import Share
from pier_megatron.outer.snapshot import Progress, RoundBuffers
from pier_megatron.outer.staging import SHARED, Staging
from pier_megatron.outer.state import Chunk
from pier_megatron.outer.stopwatch import Stopwatch
from pier_megatron.outer.verdicts import DivergedError, own_verdict

NEVER = -1
"""Iteration of the last restart of a group that has had none."""


class Peers(Protocol):
    """Participants of outer steps: groups of one launch, or the elastic islands that run.

    Attributes:
        group: Number of this rank's group among all.
        audience: Groups whose sums the report of an outer step is made of.
        last_restart: Iteration at whose end this rank's group was restarted last, or :data:`NEVER`.
        is_deserted: Whether too few groups have come for longer than this one waits.
    """

    group: int
    audience: GroupExchange
    last_restart: int
    is_deserted: bool

    def begin(self, round_: OuterRound, progress: Progress, is_hidden: bool) -> None:
        """Begins a round; waits for nobody."""

    def proceed(self, round_: OuterRound, age: int) -> None:
        """Launches what is due some iterations after a hidden round began."""

    def land(self, round_: OuterRound, progress: Progress, is_hidden: bool) -> OuterRound | None:
        """Waits for the participants, and applies a round; returns the one that was applied, if any."""

    def restart(self, round_: OuterRound, iteration: int) -> Sequence[int]:
        """Restarts the inner optimizers of groups that were excluded from a round; called by all participants, after each.

        What made the parameters of a group useless is in its moments too, and would make the next ones useless.

        Returns:
            Groups that have to return to their anchor now, by their index among the participants; none in nearly all rounds.
        """

    def average_sites(self, iteration: int) -> None:
        """Averages the parameters of the groups of this site."""

    def join(self, round_: OuterRound | None, rounds: list[OuterRound], progress: Progress) -> OuterRound | None:
        """Meets those that run already; see :meth:`pier_megatron.outer.loop.OuterLoop.join`.

        Args:
            round_: Outer step that is due, if any.
            rounds: Outer steps that were under way when the run was saved. None is left where the others have none of them.
            progress: Becomes that of the others.

        Returns:
            The outer step that was applied, if any.
        """

    def settle(self, rounds: list[OuterRound]) -> tuple[list[RoundBuffers], dict[int, int]]:
        """Waits until nothing is on its way; returns copies of the rounds, and the last restart of each group that had one."""

    def resume(self, round_: OuterRound, saved: RoundBuffers) -> None:
        """Lets a round continue where :meth:`settle` has left it."""

    def abandon(self) -> None:
        """Waits until nothing but rounds themselves is on its way, whatever comes of it."""

    def known(self, iteration: int) -> list[GroupExchange]:
        """Collectives with all that are known to take part in the outer step after an iteration."""


class OuterSteps:
    """Takes outer steps when they are due.

    Attributes:
        peers: Their participants.
        rounds: Outer steps whose exchange is hidden behind the present iterations, oldest first.
    """

    def __init__(self, config: PierConfig, share: Share, reports: OuterStepReports, peers: Peers) -> None:
        """Begins with no step under way."""
        self._config, self._share, self._reports, self.peers = config, share, reports, peers
        self.rounds: list[OuterRound] = []

    def proceed(self, progress: Progress) -> None:
        """Does what is due at the end of an iteration; called in the same iterations on every rank."""
        config, iteration = self._config, progress.iteration
        if not progress.is_local:
            if config.is_momentum_warmup(iteration):
                with self._phase("momentum_warmup", iteration):
                    momentum_warmup(self._share.stagings, rule_at(config, iteration))
            return
        for round_ in list(self.rounds):
            with round_.stopwatch.running():
                if iteration - round_.begun < config.overlap and iteration < config.train_iters:
                    with self._phase("proceed", iteration):
                        self.peers.proceed(round_, iteration - round_.begun)
                    continue
                self._land(progress, round_, is_hidden=True)
            self.rounds.remove(round_)
        fragments = config.fragments_due(iteration)
        if config.is_site_average(iteration):
            with self._phase("site_average", iteration):
                self.peers.average_sites(iteration)
            # An outer step that is waited for lets the model know itself.
            if not fragments or (config.overlap and iteration < config.train_iters):
                self._share.commit()
        if fragments:
            self._take(progress, fragments)
        if not config.has_common_anchor and iteration == config.train_iters:
            with self._phase("agree", iteration):
                self._share.agree_on_mean()
            progress.is_synchronised = True

    def join(self, progress: Progress) -> None:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.join`."""
        config, is_left = self._config, progress.last_common_step < progress.iteration and not self.rounds
        fragments = config.fragments_due(progress.iteration) if is_left else ()
        due = self._prepare(progress, fragments) if fragments else None
        if due is not None:
            self.peers.begin(due, progress, is_hidden=False)
        with self._phase("join", progress.iteration):
            taken = self.peers.join(due, self.rounds, progress)
        if due not in (None, taken):
            due.drop()
        if taken is not None:
            self._end(progress, taken)
        if taken is not None and taken.begun < progress.iteration and (fragments := config.fragments_due(progress.iteration)):
            # Where the others apply it they begin the next one.
            self._take(progress, fragments)
        if self.peers.is_deserted:
            raise RuntimeError(f"--pier-island-wait: too few islands for longer than {config.island_wait} minutes.")

    def _prepare(self, progress: Progress, fragments: Sequence[int]) -> OuterRound:
        config, share, stopwatch = self._config, self._share, Stopwatch(self._share.device)
        with stopwatch.running(), self._phase("verdict", progress.iteration):
            verdict = own_verdict(share)
        rule = rule_at(config, progress.iteration)
        # What it trains from now on counts in the next one.
        progress.under_way, progress.trained = progress.trained, 0
        round_ = OuterRound(share.stagings, fragments, rule, progress.iteration, verdict, stopwatch, share.device)
        round_.training = self._reports.take_training()
        return round_

    def _take(self, progress: Progress, fragments: Sequence[int]) -> None:
        """Takes the outer step of some fragments, or begins it if it is to be hidden behind training."""
        is_hidden = self._config.overlap > 0 and progress.iteration < self._config.train_iters
        round_ = self._prepare(progress, fragments)
        with round_.stopwatch.running():
            with self._phase("begin", progress.iteration):
                self.peers.begin(round_, progress, is_hidden)
            if is_hidden:
                self.rounds.append(round_)
            else:
                self._land(progress, round_, is_hidden=False)

    def _land(self, progress: Progress, round_: OuterRound, is_hidden: bool) -> None:
        with self._phase("finish" if is_hidden else "outer_step", progress.iteration):
            taken = self.peers.land(round_, progress, is_hidden)
        if taken is None:
            # Nobody came. What is behind it goes into the next one.
            progress.take_back()
            round_.drop()
        else:
            if not is_hidden:
                progress.is_synchronised = taken.rule.has_common_anchor and len(taken.fragments) == self._config.fragments
            self._end(progress, taken)

    def _end(self, progress: Progress, round_: OuterRound) -> None:
        with self._phase("commit", progress.iteration):
            restarted = self.peers.restart(round_, progress.iteration)
            if round_.exchange.rank in restarted:
                self._share.return_to_anchor()
            self._share.commit()
        progress.last_common_step, progress.under_way = round_.begun, 0
        own = self._share.over_group(torch.cat([round_.sums, round_.training]))
        self._reports.add(round_, self.peers.audience.gather(own), restarted)

    def drop_rounds(self) -> None:
        """Forgets what is under way, and what was noted of the training since the last outer step."""
        self._reports.take_training()
        self.peers.abandon()
        for round_ in self.rounds:
            round_.drop()
        self.rounds = []

    def resume(self, saved: Sequence[RoundBuffers], restarted: Mapping[int, int]) -> None:
        """Continues what was under way when a run was saved."""
        self.peers.last_restart = restarted.get(self._share.exchange.rank, NEVER)
        for buffers in saved:
            begun, verdict = buffers.begun, buffers.verdicts[self.peers.group]
            fragments, stopwatch, device = self._config.fragments_due(begun), Stopwatch(self._share.device), self._share.device
            rule = rule_at(self._config, begun)
            round_ = OuterRound(self._share.stagings, fragments, rule, begun, verdict, stopwatch, device)
            self.peers.resume(round_, buffers)
            self.rounds.append(round_)

    def rehearse(self) -> None:
        """Takes the work buffers, then sums and gathers zeros with all participants; called by all ranks of all groups.

        Each sum is as long as the longest chunk of its kind. Elastic islands rehearse alone: they know no others yet.
        """
        config, share, first = self._config, self._share, next(self._config.outer_steps(), None)
        if first is None:
            return
        try:
            in_fragments = [staging.state.in_fragments for staging in share.stagings]
            for staging, buffers in zip(share.stagings, buffers_at_once(config, in_fragments), strict=True):
                staging.reserve(*buffers)
            longest: dict[tuple[dist.ProcessGroup | None, bool], tuple[Staging, Chunk]] = {}
            for found in share.chunks(range(config.fragments)):
                kind = found[1].shards.holders, found[1].shards.travel_exactly(config.codec)
                longest[kind] = max(longest.get(kind, found), found, key=lambda each: each[1].numel)
            for exchange in dict.fromkeys(self.peers.known(first)):
                for (holders, exactly), (staging, chunk) in longest.items():
                    zeros = [staging.work[0].of(chunk)[SHARED].zero_()]
                    under_way = sum_over(exchange, holders, zeros, exactly=exactly)
                    under_way.advance()
                    under_way.finish()
                exchange.gather(torch.zeros(1, device=share.device)).result().tolist()
        except RuntimeError as error:
            error.add_note(
                f"Pier: this was a rehearsal, at start, of the outer step after iteration {first}. If memory is short, use a "
                "smaller --pier-chunk-mib, --pier-offload or, with an overlap, more --pier-fragments. If the error speaks of a "
                "connection or a timeout, a rank of another group cannot be reached, or its own log says why it failed."
            )
            raise

    @contextlib.contextmanager
    def _phase(self, name: str, iteration: int) -> Iterator[None]:
        """Names what happens inside, in profiles and in the error if it fails.

        A peer that has died or hangs shows first in the ranks that wait for it, often as a mere "connection closed".
        """
        everyone = self._share.exchange
        try:
            with record_function(f"pier::{name}"):
                yield
        except DivergedError:
            raise
        except RuntimeError as error:
            # A group that is a job of its own knows of the others only while it meets them, and then says so itself.
            if everyone.size > 1:
                error.add_note(
                    f"Pier: group {everyone.rank} was in phase {name} of the outer step after iteration {iteration}, "
                    f"together with the {everyone.size - 1} other groups. If the error speaks of a connection or a "
                    "timeout, a rank of another group has died or hangs: its own log says why. The last checkpoint is whole."
                )
            raise
