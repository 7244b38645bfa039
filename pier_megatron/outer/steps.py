"""The outer steps of one rank: each begins with its participants, perhaps crosses behind training, and ends."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.sites import SiteExchange
from pier_megatron.outer.elastic import ElasticMembership, ElasticParticipants
from pier_megatron.outer.participants import Participants
from pier_megatron.outer.report import OuterStepReports
from pier_megatron.outer.restarts import NEVER
from pier_megatron.outer.rounds import OuterRound, momentum_warmup
from pier_megatron.outer.rules import rule_at
from pier_megatron.outer.share import Share
from pier_megatron.outer.snapshot import Progress, RoundBuffers, Snapshot
from pier_megatron.outer.state import ANCHOR


class OuterSteps:
    """Takes outer steps when they are due, and holds those that are under way.

    Attributes:
        participants: Strategy that chooses the participants.
        rounds: Outer steps whose exchange is hidden behind the present iterations, oldest first.
    """

    def __init__(
        self,
        config: PierConfig,
        share: Share,
        reports: OuterStepReports,
        islands: ElasticMembership | None,
        sites: SiteExchange | None,
    ) -> None:
        """Begins with none under way.

        Args:
            config: Settings of the run.
            share: What this rank owns.
            reports: Takes note of outer steps.
            islands: Elastic islands that include this one; None for groups of one launch.
            sites: Collectives between sites, if groups are in some.
        """
        self._config, self._share, self._reports = config, share, reports
        if (config.sites is not None) != (sites is not None):
            raise PierConfigError(
                f"--pier-sites {config.sites}, but the loop was built {'without' if sites is None else 'with'} a SiteExchange "
                "(OuterLoop(..., sites=)). A run has both or neither."
            )
        self.participants = Participants(config, share, sites)
        if islands is not None:
            config.check_elastic()
            self.participants = ElasticParticipants(config, share, islands)
        self.rounds: list[OuterRound] = []

    def proceed(self, progress: Progress) -> None:
        """Does what is due at the end of an iteration; called in the same iterations on every rank."""
        config, iteration = self._config, progress.iteration
        if not progress.is_local:
            if config.is_momentum_warmup(iteration):
                with self.participants.phase("momentum_warmup", iteration):
                    momentum_warmup(self._share.stagings, rule_at(config, iteration))
            return
        for round_ in list(self.rounds):
            self._move(progress, round_)
        fragments = config.fragments_due(iteration)
        if config.is_site_average(iteration):
            self.participants.average(iteration)
            # An outer step that is waited for lets the model know itself.
            if not fragments or (config.overlap and iteration < config.train_iters):
                self._share.commit()
        if fragments:
            self.take(progress, fragments)
        if not config.has_common_anchor and iteration == config.train_iters:
            with self.participants.phase("agree", iteration):
                self._share.agree_on_mean()
            progress.is_synchronised = True

    def join(self, progress: Progress) -> None:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.join`."""
        if not isinstance(self.participants, ElasticParticipants):
            raise PierConfigError(
                "OuterLoop.join() meets elastic islands, but this loop was built without them. Pass "
                "OuterLoop(..., islands=ElasticMembership(...)), or do not call join(): groups of one launch are together "
                "from the start."
            )
        is_left = progress.last_common_step < progress.iteration
        self.take(progress, self._config.fragments_due(progress.iteration) if is_left else ())
        if self.participants.is_deserted:
            raise RuntimeError(f"--pier-island-wait: too few islands for longer than {self._config.island_wait} minutes.")

    def take(self, progress: Progress, fragments: Sequence[int]) -> None:
        """Takes an outer step, or begins it if it is to be hidden behind training.

        Args:
            progress: Progress of this group.
            fragments: Fragments whose outer step is due; none for an island that only joins the others.
        """
        round_ = self.participants.form(progress, fragments)
        if round_ is None:
            return
        round_.training, iteration = self._reports.training.take(), progress.iteration
        with round_.stopwatch.running():
            if self._config.overlap and iteration < self._config.train_iters:
                with self.participants.phase("begin", iteration):
                    round_.begin()
                    round_.proceed(0, self._config.overlap)
                self.rounds.append(round_)
                return
            with self.participants.phase("outer_step", iteration):
                self.participants.restarts.check(round_, iteration)
                self.participants.carry_out(round_)
            progress.is_synchronised = round_.rule.has_common_anchor and len(round_.fragments) == self._config.fragments
            self._end(progress, round_)

    def _move(self, progress: Progress, round_: OuterRound) -> None:
        iteration, age = progress.iteration, progress.iteration - round_.begun
        with round_.stopwatch.running():
            if age < self._config.overlap and iteration < self._config.train_iters:
                with self.participants.phase("proceed", iteration):
                    round_.proceed(age, self._config.overlap)
                return
            with self.participants.phase("finish", iteration):
                self.participants.restarts.check(round_, iteration)
                round_.finish()
            self.rounds.remove(round_)
            self._end(progress, round_)

    def _end(self, progress: Progress, round_: OuterRound) -> None:
        iteration = progress.iteration
        with self.participants.phase("commit", iteration):
            restarted = self.participants.restart(round_, iteration)
            if round_.exchange.rank in restarted:
                self._share.return_to_anchor()
            self._share.commit()
        progress.last_common_step, progress.trained = round_.begun, iteration - round_.begun
        own = self._share.over_group(torch.cat([round_.sums, round_.training]))
        sums = self.participants.audience.gather(own)
        self._reports.add(round_, sums, restarted)

    def reset(self) -> None:
        """Forgets what the outer rule remembers, what is under way, and what codecs have dropped."""
        self._drop_rounds()
        self._share.synchronize()
        for state in self._share.states:
            state.forget(state.kept.keys() - {ANCHOR})
        self.participants.restarts.last = NEVER

    def _drop_rounds(self) -> None:
        self._reports.training.take()
        for round_ in self.rounds:
            round_.drop()
        self.rounds = []

    def snapshot(self, progress: Progress) -> Snapshot:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.snapshot`."""
        rounds = [round_.settle() for round_ in self.rounds]
        own = [self.participants.restarts.last, *(round_.verdicts.own for round_ in self.rounds)]
        last, *verdicts = self._share.exchange.gather(torch.tensor(own, device=self._share.device)).result().T.tolist()
        self._reports.write_arrived(waits=True)
        return Snapshot(
            dataclasses.replace(progress),
            self._share.kept(),
            [dataclasses.replace(round_, verdicts=found) for round_, found in zip(rounds, verdicts, strict=True)],
            {group: iteration for group, iteration in enumerate(last) if iteration != NEVER},
            self._config.rule_name,
        )

    def _of_this_rule(self, snapshot: Snapshot) -> Snapshot:
        """What this loop's rule can continue from."""
        rule = self._config.rule_name
        if snapshot.rule in (None, rule):
            return snapshot
        if not self._config.override_checkpoint:
            raise PierConfigError(
                f"outer_rule: the snapshot is of a run whose outer steps are {snapshot.rule}'s, and this loop's are {rule}'s. "
                f"Continue with {snapshot.rule}, or begin without outer momentum: override_checkpoint=True "
                "(--pier-override-checkpoint)."
            )
        _, *memory = self._share.common
        for state in self._share.states:
            state.forget(memory)
        states = [{name: saved[name] for name in saved if name not in memory} for saved in snapshot.states]
        return dataclasses.replace(snapshot, states=states, rounds=())

    def empty_snapshot(self, progress: Progress, rounds: Mapping[int, Sequence[int]]) -> Snapshot:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.empty_snapshot`."""
        rounds_ = []
        for begun, verdicts in rounds.items():
            numel = sum(chunk.numel for _, chunk in self._share.chunks(self._config.fragments_due(begun)))
            rounds_.append(RoundBuffers(begun, torch.empty(numel), torch.empty(numel), verdicts))
        return Snapshot(progress, self._share.kept(), rounds_)

    def restore(self, snapshot: Snapshot) -> None:
        """Takes over everything from a snapshot but the progress."""
        self._drop_rounds()
        self._share.synchronize()
        snapshot = self._of_this_rule(snapshot)
        for state, saved in zip(self._share.states, snapshot.states, strict=True):
            state.restore(saved)
        self.rounds = [self.participants.resume(round_) for round_ in snapshot.rounds]
        self.participants.restarts.last = snapshot.restarted.get(self._share.exchange.rank, NEVER)
