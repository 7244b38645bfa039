"""The outer steps of one rank: each begins with its participants, perhaps crosses behind training, and ends.

A group is *healthy*, or it is *excluded*: its parameters are not finite. It stays excluded until the round that saw this ends.
It is then restarted as a whole (every fragment of its parameters becomes the anchor, and it copies the moments of a
participant) and is healthy again. The groups of that round know all of this; others need not.

Elastic islands are in :mod:`pier_megatron.outer.elastic`.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.profiler import record_function

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.collectives import GroupExchange, sum_over
from pier_megatron.exchange.pairs import Subgroup, draw_subgroups
from pier_megatron.exchange.sites import SiteExchange
from pier_megatron.outer.memory import buffers_at_once, bytes_of_site_average
from pier_megatron.outer.report import OuterStepReports
from pier_megatron.outer.rounds import OuterRound, Stopwatch, momentum_warmup
from pier_megatron.outer.rules import rule_at
from pier_megatron.outer.share import Share
from pier_megatron.outer.snapshot import Progress, RoundBuffers
from pier_megatron.outer.staging import SHARED, Staging
from pier_megatron.outer.state import Chunk
from pier_megatron.outer.verdicts import ABSENT, DivergedError, Verdicts, own_verdict

NEVER = -1
"""Iteration of the last restart of a group that has had none."""


class OuterSteps:
    """Takes outer steps when they are due, with their participants: all groups, a few that are drawn for each, or all sites.

    A site takes part with the mean of its groups, which average more often among themselves. A group that is not finite is
    excluded from the average of its site and takes that for its parameters, with the moments of a group that counts. A site of
    such groups alone is excluded from the outer step, and restarted, as a group is elsewhere.

    Attributes:
        audience: Groups whose sums the report of an outer step is made of.
        rounds: Outer steps whose exchange is hidden behind the present iterations, oldest first.
        last_restart: Iteration at whose end this rank's group was restarted last, or :data:`NEVER`.
        is_deserted: Whether too few groups have come for longer than this one waits.
    """

    def __init__(self, config: PierConfig, share: Share, reports: OuterStepReports, sites: SiteExchange | None = None) -> None:
        """Begins with healthy groups and no step under way; see :class:`pier_megatron.outer.loop.OuterLoop`."""
        if config.sites != (sites and sites.size):
            raise PierConfigError(
                f"--pier-sites {config.sites}, but the loop was built with collectives between {sites and sites.size} sites "
                "(OuterLoop(..., sites=SiteExchange(...))). Both must be the same."
            )
        self._config, self._share, self._reports, self._sites = config, share, reports, sites
        self._everyone = everyone = share.exchange
        # Drawn groups wait for nobody else, not even for a line in the log.
        self.audience = sites or (everyone if config.has_common_anchor else GroupExchange(groups=(everyone.rank,)))
        self.rounds: list[OuterRound] = []
        self.last_restart = NEVER
        self.is_deserted = self._was_restarted = False

    def proceed(self, progress: Progress) -> None:
        """Does what is due at the end of an iteration; called in the same iterations on every rank."""
        config, iteration = self._config, progress.iteration
        if not progress.is_local:
            if config.is_momentum_warmup(iteration):
                with self.phase("momentum_warmup", iteration):
                    momentum_warmup(self._share.stagings, rule_at(config, iteration))
            return
        for round_ in list(self.rounds):
            self._move(progress, round_)
        fragments = config.fragments_due(iteration)
        if config.is_site_average(iteration):
            self.average(iteration)
            # An outer step that is waited for lets the model know itself.
            if not fragments or (config.overlap and iteration < config.train_iters):
                self._share.commit()
        if fragments:
            self.take(progress, fragments)
        if not config.has_common_anchor and iteration == config.train_iters:
            with self.phase("agree", iteration):
                self._share.agree_on_mean()
            progress.is_synchronised = True

    def join(self, progress: Progress) -> None:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.join`."""
        raise PierConfigError(
            "OuterLoop.join() meets elastic islands, but this loop was built without them. Pass "
            "OuterLoop(..., islands=ElasticMembership(...)), or do not call join(): groups of one launch are together "
            "from the start."
        )

    def take(self, progress: Progress, fragments: Sequence[int]) -> None:
        """Takes the outer step of some fragments, or begins it if it is to be hidden behind training.

        An island that only joins the others has none.
        """
        round_ = self.form(progress, fragments)
        if round_ is None:
            return
        round_.training, iteration = self._reports.take_training(), progress.iteration
        with round_.stopwatch.running():
            if self._config.overlap and iteration < self._config.train_iters:
                with self.phase("begin", iteration):
                    round_.begin()
                    round_.proceed(0, self._config.overlap)
                self.rounds.append(round_)
                return
            with self.phase("outer_step", iteration):
                self.check(round_, iteration)
                self.carry_out(round_)
            progress.is_synchronised = round_.rule.has_common_anchor and len(round_.fragments) == self._config.fragments
            self._end(progress, round_)

    def _move(self, progress: Progress, round_: OuterRound) -> None:
        iteration, age = progress.iteration, progress.iteration - round_.begun
        with round_.stopwatch.running():
            if age < self._config.overlap and iteration < self._config.train_iters:
                with self.phase("proceed", iteration):
                    round_.proceed(age, self._config.overlap)
                return
            with self.phase("finish", iteration):
                self.check(round_, iteration)
                round_.finish()
            self.rounds.remove(round_)
            self._end(progress, round_)

    def _end(self, progress: Progress, round_: OuterRound) -> None:
        iteration = progress.iteration
        with self.phase("commit", iteration):
            restarted = self.restart(round_, iteration)
            if round_.exchange.rank in restarted:
                self._share.return_to_anchor()
            self._share.commit()
        progress.last_common_step, progress.trained = round_.begun, iteration - round_.begun
        own = self._share.over_group(torch.cat([round_.sums, round_.training]))
        self._reports.add(round_, self.audience.gather(own), restarted)

    def drop_rounds(self) -> None:
        """Forgets what is under way, and what was noted of the training since the last outer step."""
        self._reports.take_training()
        for round_ in self.rounds:
            round_.drop()
        self.rounds = []

    def at(self, iteration: int) -> GroupExchange:
        """Returns collectives between the participants of outer steps that begin after ``iteration``; this group is one."""
        config, everyone = self._config, self._everyone
        if config.subgroup is None:
            return self._sites or everyone
        drawn = draw_subgroups(config.groups, config.subgroup, config.subgroup_seed, iteration)
        return Subgroup(everyone, next(groups for groups in drawn if everyone.rank in groups))

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
            # In the end all groups agree.
            met = [self._sites.inside, self._sites] if self._sites else [self._everyone, self.at(first)]
            for exchange in dict.fromkeys(met):
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

    def form(self, progress: Progress, fragments: Sequence[int]) -> OuterRound | None:
        """Brings the participants of an outer step of some fragments together; returns its round, or None if there is none."""
        iteration, stopwatch = progress.iteration, Stopwatch(self._share.device)
        exchange = self.at(iteration)
        with stopwatch.running():
            with self.phase("verdict", iteration):
                verdicts = self._verdicts(exchange)
            round_ = self.round(iteration, exchange, verdicts, stopwatch)
        if self._sites is not None:
            of_average = sum(bytes_of_site_average(self._config, chunk.carried) for _, chunk in self._share.chunks(fragments))
            # By the schedule: of averages before a stop, this process knows nothing else.
            since = range(progress.last_common_step + 1, iteration + 1)
            round_.bytes_sent += of_average * sum(map(self._config.is_site_average, since))
            # Over all groups: others know only of those of their own site.
            round_.restarted_before = self._everyone.gather(torch.full((1,), self._was_restarted, device=self._share.device))
            self._was_restarted = False
        return round_

    def _verdicts(self, exchange: GroupExchange) -> Verdicts:
        """Judges the own pseudo-gradient, and begins to collect the verdicts of the groups of ``exchange``."""
        return Verdicts(exchange, own_verdict(self._share), self._share.device)

    def average(self, iteration: int) -> None:
        """Averages the parameters of the groups of this site."""
        assert self._sites is not None
        inside = self._sites.inside
        with self.phase("site_average", iteration):
            counted = self._verdicts(inside).counted
            if not any(counted):
                return
            self._share.average(inside, counted)
            excluded = [group for group, counts in enumerate(counted) if not counts]
            if excluded:
                self._share.moments.hand_over(inside, excluded, counted.index(True), self._share.device)
                self._was_restarted |= inside.rank in excluded

    def check(self, round_: OuterRound, iteration: int) -> None:
        """Stops a run in which no group can continue after ``iteration``. Waits for all participants.

        A subgroup does not know the verdicts of others. If none of its groups is good it restarts, but not twice in a row.

        Raises:
            DivergedError: If no group counts.
        """
        # A round may begin in the iteration of a restart, after it.
        since = round_.begun - self.last_restart
        has_tried = self.last_restart != NEVER and 0 <= since <= self._config.sync_interval
        if round_.exchange.size == (self._sites or self._everyone).size or has_tried:
            round_.verdicts.check(iteration)

    def carry_out(self, round_: OuterRound) -> None:
        """Takes an outer step that is waited for."""
        round_.run()

    def restart(self, round_: OuterRound, iteration: int) -> Sequence[int]:
        """Hands moments over to groups that were excluded from a round; called by all participants, after each.

        What made the parameters of a group useless is in its moments too, and would make the next ones useless.

        Returns:
            Groups that have to return to their anchor now, by their index among the participants; none in nearly all rounds.
        """
        exchange, counted = round_.exchange, round_.verdicts.counted
        if all(counted):
            return []
        # Absent groups keep their own moments, and already took the anchor when they joined.
        joined = [group for group, verdict in enumerate(round_.verdicts.all()) if verdict == ABSENT]
        last = exchange.gather(torch.tensor([self.last_restart], device=self._share.device)).result().flatten().tolist()
        # A verdict does not apply to a group that has restarted since its round began.
        restarted = [
            group for group, counts in enumerate(counted) if not counts and group not in joined and last[group] <= round_.begun
        ]
        if restarted:
            source = counted.index(True) if any(counted) else None
            self._share.moments.hand_over(exchange, restarted, source, self._share.device)
        if exchange.rank in restarted:
            self.last_restart = iteration
        return restarted

    def round(self, begun: int, exchange: GroupExchange, verdicts: Verdicts, stopwatch: Stopwatch) -> OuterRound:
        """Prepares the round of an outer step that begins after an iteration."""
        fragments, rule = self._config.fragments_due(begun), rule_at(self._config, begun)
        return OuterRound(self._share.stagings, exchange, fragments, rule, verdicts, begun, stopwatch, self._share.device)

    def resume(self, saved: RoundBuffers) -> OuterRound:
        """Prepares a round that was under way when it was saved."""
        exchange = self.at(saved.begun)
        known = tuple(saved.verdicts[group] for group in exchange.groups)
        verdicts = Verdicts(exchange, known[exchange.rank], self._share.device, known)
        round_ = self.round(saved.begun, exchange, verdicts, Stopwatch(self._share.device))
        round_.resume(saved)
        return round_

    @contextlib.contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        """Names what happens inside, in profiles and in the error if it fails.

        A peer that has died or hangs shows first in the ranks that wait for it, often as a mere "connection closed".
        """
        try:
            with record_function(f"pier::{name}"):
                yield
        except DivergedError:
            raise
        except RuntimeError as error:
            # A group that is a job of its own knows of the others only while it meets them, and then says so itself.
            if self._everyone.size > 1:
                error.add_note(
                    f"Pier: group {self._everyone.rank} was in phase {name} of the outer step after iteration {iteration}, "
                    f"together with the {self._everyone.size - 1} other groups. If the error speaks of a connection or a "
                    "timeout, a rank of another group has died or hangs: its own log says why. The last checkpoint is whole."
                )
            raise
