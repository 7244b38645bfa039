"""Groups of one launch as the participants of outer steps: all of them, a few that are drawn for each, or all sites.

A group is *healthy*, or it is *excluded*: its parameters are not finite. It stays excluded until the round that saw this ends.
It is then restarted as a whole (every fragment of its parameters becomes the anchor, and it copies the moments of a
participant) and is healthy again. The groups of that round know all of this; others need not.
"""

import dataclasses
from collections.abc import Sequence

import torch

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.pairs import Subgroup, draw_subgroups
from pier_megatron.exchange.sites import SiteExchange
from pier_megatron.outer.memory import bytes_of_site_average
from pier_megatron.outer.rounds import OuterRound
from pier_megatron.outer.share import Share
from pier_megatron.outer.snapshot import Progress, RoundBuffers
from pier_megatron.outer.steps import NEVER
from pier_megatron.outer.verdicts import Verdicts, own_verdict


class StaticPeers:
    """Participants that are fixed; see :class:`pier_megatron.outer.steps.Peers`.

    A site takes part with the mean of its groups, which average more often among themselves. A group that is not finite is
    excluded from the average of its site and takes that for its parameters, with the moments of a group that counts. A site of
    such groups alone is excluded from the outer step, and restarted, as a group is elsewhere.
    """

    is_deserted = False

    def __init__(self, config: PierConfig, share: Share, sites: SiteExchange | None) -> None:
        """Begins with healthy groups; ``sites`` are collectives between sites, with ``config.sites``."""
        if config.sites != (sites and sites.size):
            raise PierConfigError(
                f"--pier-sites {config.sites}, but the loop was built with collectives between {sites and sites.size} sites "
                "(OuterLoop(..., sites=SiteExchange(...))). Both must be the same."
            )
        self._config, self._share, self._sites, self._everyone = config, share, sites, share.exchange
        self.group, self.last_restart, self._was_restarted = self._everyone.rank, NEVER, False
        # Drawn groups wait for nobody else, not even for a line in the log.
        alone = GroupExchange(groups=(self.group,))
        self.audience = sites or (self._everyone if config.has_common_anchor else alone)

    def at(self, iteration: int) -> GroupExchange:
        """Returns collectives between the participants of outer steps that begin after ``iteration``; this group is one."""
        config, everyone = self._config, self._everyone
        if config.subgroup is None:
            return self._sites or everyone
        drawn = draw_subgroups(config.groups, config.subgroup, config.subgroup_seed, iteration)
        return Subgroup(everyone, next(groups for groups in drawn if everyone.rank in groups))

    def begin(self, round_: OuterRound, progress: Progress, is_hidden: bool) -> None:
        """Sends the own verdict, and takes the pseudo-gradient of a round that is hidden."""
        exchange, device = self.at(round_.begun), self._share.device
        round_.meet(exchange, Verdicts(exchange, round_.verdict, round_.lengths))
        if self._sites is not None:
            chunks = self._share.chunks(round_.fragments)
            of_average = sum(bytes_of_site_average(self._config, chunk.carried) for _, chunk in chunks)
            # By the schedule: of averages before a stop, this process knows nothing else.
            since = range(progress.last_common_step + 1, round_.begun + 1)
            round_.bytes_sent += of_average * sum(map(self._config.is_site_average, since))
            # Over all groups: others know only of those of their own site.
            round_.restarted_before = self._everyone.gather(torch.full((1,), self._was_restarted, device=device))
            self._was_restarted = False
        if is_hidden:
            round_.begin()
            self.proceed(round_, 0)

    def proceed(self, round_: OuterRound, age: int) -> None:
        """Launches what is due."""
        round_.proceed(age, self._config.overlap)

    def land(self, round_: OuterRound, progress: Progress, is_hidden: bool) -> OuterRound:
        """Takes the step, or applies what has arrived.

        Raises:
            DivergedError: If no group can continue.
        """
        self.check(round_, progress.iteration)
        if is_hidden:
            round_.finish()
        else:
            round_.run()
        return round_

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

    def restart(self, round_: OuterRound, iteration: int) -> Sequence[int]:
        """Hands moments over to groups that were excluded."""
        exchange, counted = round_.exchange, round_.verdicts.counted
        if all(counted):
            return []
        last = exchange.gather(torch.tensor([self.last_restart], device=self._share.device)).result().flatten().tolist()
        # A verdict does not apply to a group that has restarted since its round began.
        restarted = [group for group, counts in enumerate(counted) if not counts and last[group] <= round_.begun]
        if restarted:
            source = counted.index(True) if any(counted) else None
            self._share.moments.hand_over(exchange, restarted, source, self._share.device)
        if exchange.rank in restarted:
            self.last_restart = iteration
        return restarted

    def average_sites(self, iteration: int) -> None:
        """Averages the parameters of the groups of this site."""
        assert self._sites is not None
        inside, device = self._sites.inside, self._share.device
        counted = Verdicts(inside, own_verdict(self._share), torch.zeros(0, device=device)).counted
        if not any(counted):
            return
        self._share.average(inside, counted)
        excluded = [group for group, counts in enumerate(counted) if not counts]
        if excluded:
            self._share.moments.hand_over(inside, excluded, counted.index(True), device)
            self._was_restarted |= inside.rank in excluded

    def join(self, due: OuterRound | None, rounds: Sequence[OuterRound], progress: Progress) -> tuple[OuterRound | None, bool]:
        """Refuses to meet islands."""
        raise PierConfigError(
            "OuterLoop.join() meets elastic islands, but this loop was built without them. Pass "
            "OuterLoop(..., islands=ElasticMembership(...)), or do not call join(): groups of one launch are together "
            "from the start."
        )

    def settle(self, rounds: Sequence[OuterRound]) -> tuple[list[RoundBuffers], dict[int, int]]:
        """Waits for everything to arrive, and collects the verdicts of all groups."""
        buffers = [round_.settle() for round_ in rounds]
        own = torch.tensor([self.last_restart, *(round_.verdict for round_ in rounds)], device=self._share.device)
        last, *verdicts = self._everyone.gather(own).result().T.tolist()
        restarted = {group: iteration for group, iteration in enumerate(last) if iteration != NEVER}
        return [dataclasses.replace(each, verdicts=found) for each, found in zip(buffers, verdicts, strict=True)], restarted

    def met(self, saved: RoundBuffers) -> GroupExchange:
        """Returns the participants of the iteration in which the round began."""
        return self.at(saved.begun)

    def known(self, iteration: int) -> list[GroupExchange]:
        """Collectives of the outer step after an iteration, and those over all groups, which agree in the end."""
        return [self._sites.inside, self._sites] if self._sites else [self._everyone, self.at(iteration)]

    def abandon(self) -> None:
        """Does nothing: a round alone is on its way."""
