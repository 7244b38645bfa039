"""Participants of an outer step: all groups, a few that are drawn for it, or sites.

Elastic islands are in :mod:`pier_megatron.outer.elastic`.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.profiler import record_function

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.pairs import Subgroup, draw_subgroups
from pier_megatron.exchange.sites import SiteExchange
from pier_megatron.outer.memory import bytes_of_site_average
from pier_megatron.outer.restarts import Restarts, hand_over
from pier_megatron.outer.rounds import OuterRound, Stopwatch
from pier_megatron.outer.rules import rule_at
from pier_megatron.outer.share import Share
from pier_megatron.outer.snapshot import Progress, RoundBuffers
from pier_megatron.outer.verdicts import DivergedError, KnownVerdicts, Verdicts, own_verdict


class Participants:
    """Takes outer steps with their participants: all groups, a few that are drawn for each, or all sites.

    A site takes part with the mean of its groups, which average more often among themselves. A group that is not finite is
    excluded from the average of its site and takes that for its parameters, with the moments of a group that counts. A site of
    such groups alone is excluded from the outer step, and restarted, as a group is elsewhere.

    Attributes:
        audience: Groups whose sums the report of an outer step is made of.
        restarts: Restarts of groups that were excluded.
        is_deserted: Whether too few groups have come for longer than this one waits.
    """

    def __init__(self, config: PierConfig, share: Share, sites: SiteExchange | None = None) -> None:
        """Begins with healthy groups.

        Args:
            config: Settings of the run.
            share: What this rank owns.
            sites: Collectives between sites, if groups are in some.
        """
        self._config, self._share, self.everyone, self._sites = config, share, share.exchange, sites
        # Drawn groups wait for nobody else, not even for a line in the log.
        self.audience = sites or (self.everyone if config.has_common_anchor else GroupExchange(groups=(self.everyone.rank,)))
        self.restarts = Restarts(config, (sites or self.everyone).size, share)
        self.is_deserted = self._was_restarted = False

    def at(self, iteration: int) -> GroupExchange:
        """Returns collectives between the participants of outer steps that begin after ``iteration``; this group is one."""
        config, everyone = self._config, self.everyone
        if config.subgroup is None:
            return self._sites or everyone
        drawn = draw_subgroups(config.groups, config.subgroup, config.subgroup_seed, iteration)
        return Subgroup(everyone, next(groups for groups in drawn if everyone.rank in groups))

    def exchanges(self, iteration: int) -> Sequence[GroupExchange]:
        """Returns every exchange that outer steps after ``iteration``, and the averages before them, use."""
        if self._sites is not None:
            return self._sites.inside, self._sites
        # In the end all groups agree.
        return (self.everyone,) if self._config.has_common_anchor else (self.everyone, self.at(iteration))

    def form(self, progress: Progress, fragments: Sequence[int]) -> OuterRound | None:
        """Brings the participants of an outer step together.

        Args:
            progress: Progress of this group; changed if it takes over from others.
            fragments: Fragments whose outer step is due.

        Returns:
            Round to carry out; None if there is none.
        """
        iteration, stopwatch = progress.iteration, Stopwatch(self._share.device)
        exchange = self.at(iteration)
        with stopwatch.running():
            with self.phase("verdict", iteration):
                verdicts = self.verdicts(exchange)
            round_ = self.round(iteration, exchange, verdicts, stopwatch)
        if self._sites is not None:
            of_average = sum(bytes_of_site_average(self._config, chunk.numel) for _, chunk in self._share.chunks(fragments))
            # By the schedule: of averages before a stop, this process knows nothing else.
            since = range(progress.last_common_step + 1, iteration + 1)
            round_.bytes_sent += of_average * sum(map(self._config.is_site_average, since))
            # Over all groups: others know only of those of their own site.
            round_.restarted_before = self.everyone.gather(torch.full((1,), self._was_restarted, device=self._share.device))
            self._was_restarted = False
        return round_

    def verdicts(self, exchange: GroupExchange) -> Verdicts:
        """Judges the own pseudo-gradient, and begins to collect the verdicts of the groups of ``exchange``."""
        return Verdicts(exchange, own_verdict(self._share), self._share.device)

    def average(self, iteration: int) -> None:
        """Averages the parameters of the groups of this site."""
        assert self._sites is not None
        inside = self._sites.inside
        with self.phase("site_average", iteration):
            counted = self.verdicts(inside).counted()
            if not any(counted):
                return
            self._share.average(inside, counted)
            excluded = [group for group, counts in enumerate(counted) if not counts]
            if excluded:
                hand_over(self._share.moments, inside, excluded, counted.index(True), self._share.device)
                self._was_restarted |= inside.rank in excluded

    def carry_out(self, round_: OuterRound) -> None:
        """Takes an outer step that is waited for."""
        round_.run()

    def restart(self, round_: OuterRound, iteration: int) -> Sequence[int]:
        """Restarts excluded groups after a round; see :meth:`Restarts.restart_excluded`."""
        return self.restarts.restart_excluded(round_, iteration)

    def round(self, begun: int, exchange: GroupExchange, verdicts: Verdicts, stopwatch: Stopwatch) -> OuterRound:
        """Prepares the round of an outer step that begins after an iteration."""
        fragments, rule = self._config.fragments_due(begun), rule_at(self._config, begun)
        return OuterRound(self._share.stagings, exchange, fragments, rule, verdicts, begun, stopwatch, self._share.device)

    def resume(self, saved: RoundBuffers) -> OuterRound:
        """Prepares a round that was under way when it was saved."""
        exchange = self.at(saved.begun)
        verdicts = KnownVerdicts(exchange, saved.verdicts)
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
            if self.everyone.size > 1:
                error.add_note(
                    f"Pier: group {self.everyone.rank} was in phase {name} of the outer step after iteration {iteration}, "
                    f"together with the {self.everyone.size - 1} other groups. If the error speaks of a connection or a "
                    "timeout, a rank of another group has died or hangs: its own log says why. The last checkpoint is whole."
                )
            raise
