"""The outer steps of one rank: each begins, perhaps crosses behind training, and lands."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.collectives import GroupExchange, sum_over
from pier_megatron.outer.chunks import Chunk
from pier_megatron.outer.memory import buffers_at_once
from pier_megatron.outer.report import OuterStepReports
from pier_megatron.outer.rounds import OuterRound
from pier_megatron.outer.rules import OuterRule, bits_of_products, rule_at, rule_class
from pier_megatron.outer.share import Share
from pier_megatron.outer.snapshot import Progress, RoundBuffers
from pier_megatron.outer.staging import SHARED, Staging, one_ahead
from pier_megatron.outer.state import ANCHOR
from pier_megatron.outer.stopwatch import Stopwatch
from pier_megatron.outer.verdicts import DivergedError, Verdicts, own_verdict
from pier_megatron.schedules import NESTEROV

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

    def join(self, due: OuterRound | None, rounds: Sequence[OuterRound], progress: Progress) -> tuple[OuterRound | None, bool]:
        """Meets those that run already; see :meth:`pier_megatron.outer.loop.OuterLoop.join`.

        Args:
            due: Outer step that is due, if any.
            rounds: Outer steps that were under way when the run was saved.
            progress: Becomes that of the others.

        Returns:
            The outer step that was applied, if any; and whether all have those that were under way.
        """

    def settle(self, rounds: Sequence[OuterRound]) -> tuple[list[RoundBuffers], dict[int, int]]:
        """Waits until nothing is on its way; returns copies of the rounds, and the last restart of each group that had one."""

    def met(self, saved: RoundBuffers) -> GroupExchange:
        """Returns the participants of a round that was under way when it was saved."""

    def abandon(self) -> None:
        """Waits until nothing but rounds themselves is on its way, whatever comes of it."""

    def known(self, iteration: int) -> list[GroupExchange]:
        """Collectives with all that are known to take part in the outer step after an iteration."""


def round_at(config: PierConfig, share: Share, begun: int, verdict: int, stopwatch: Stopwatch) -> OuterRound:
    """Prepares the round of the outer step that begins after an iteration."""
    fragments, rule = config.fragments_due(begun), rule_at(config, begun)
    return OuterRound(share.stagings, fragments, rule, begun, verdict, stopwatch, share.device)


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
        is_due = config.is_outer_step(iteration)
        if config.is_site_average(iteration):
            with self._phase("site_average", iteration):
                self.peers.average_sites(iteration)
            # An outer step that is waited for lets the model know itself.
            if not is_due or (config.overlap and iteration < config.train_iters):
                self._share.commit()
        if is_due:
            self._take(progress)
        if not config.has_common_anchor and iteration == config.train_iters:
            with self._phase("agree", iteration):
                self._share.agree_on_mean()
            progress.is_synchronised = True

    def join(self, progress: Progress) -> None:
        """See :meth:`pier_megatron.outer.loop.OuterLoop.join`."""
        config, is_left = self._config, progress.last_common_step < progress.iteration and not self.rounds
        due = self._prepare(progress) if is_left and config.is_outer_step(progress.iteration) else None
        if due is not None:
            self.peers.begin(due, progress, is_hidden=False)
        with self._phase("join", progress.iteration):
            taken, have_all = self.peers.join(due, self.rounds, progress)
        if due not in (None, taken):
            due.drop()
        if not have_all:
            # An island that joins has none, and would not apply what the others do.
            self._drop(progress)
        if taken is not None:
            self._end(progress, taken)
            if taken.begun < progress.iteration and config.is_outer_step(progress.iteration):
                # Where the others apply it they begin the next one.
                self._take(progress)
        if self.peers.is_deserted:
            raise RuntimeError(f"--pier-island-wait: too few islands for longer than {config.island_wait} minutes.")

    def _prepare(self, progress: Progress) -> OuterRound:
        share, stopwatch = self._share, Stopwatch(self._share.device)
        with stopwatch.running():
            with self._phase("verdict", progress.iteration):
                verdict = own_verdict(share)
            round_ = round_at(self._config, share, progress.iteration, verdict, stopwatch)
            with self._phase("measure", progress.iteration):
                round_.measure()
        # What it trains from now on counts in the next one.
        progress.under_way, progress.trained = progress.trained, 0
        round_.training = self._reports.take_training()
        return round_

    def _take(self, progress: Progress) -> None:
        """Takes the outer step that is due, or begins it if it is to be hidden behind training."""
        is_hidden = self._config.overlap > 0 and progress.iteration < self._config.train_iters
        round_ = self._prepare(progress)
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
            self._end(progress, taken)

    def _end(self, progress: Progress, round_: OuterRound) -> None:
        with self._phase("commit", progress.iteration):
            restarted = self.peers.restart(round_, progress.iteration)
            if round_.exchange.rank in restarted:
                self._share.return_to_anchor()
            self._share.commit()
        progress.last_common_step, progress.under_way = round_.begun, 0
        is_whole = round_.rule.has_common_anchor and len(round_.fragments) == self._config.fragments
        progress.is_synchronised = is_whole and round_.begun == progress.iteration
        own = self._share.over_group(torch.cat([round_.sums, round_.training]))
        self._reports.add(round_, self.peers.audience.gather(own), restarted)

    def drop_rounds(self) -> None:
        """Forgets what is under way, and what was noted of the training since the last outer step."""
        self._reports.take_training()
        self.peers.abandon()
        for round_ in self.rounds:
            round_.drop()
        self.rounds = []

    def _drop(self, progress: Progress) -> None:
        """Drops what is under way and nobody applies: the training behind it counts in the next outer step."""
        for round_ in self.rounds:
            round_.drop()
            progress.take_back()
        self.rounds = []

    def settle(self, progress: Progress) -> tuple[list[RoundBuffers], dict[int, int]]:
        """Waits for what is under way; returns copies of it, and the last restart of each group that had one."""
        settled = self.peers.settle(self.rounds)
        if self.peers.is_deserted:
            self._drop(progress)
        return settled

    def resume(self, saved: Sequence[RoundBuffers], restarted: Mapping[int, int]) -> None:
        """Continues what was under way when a run was saved."""
        device = self._share.device
        self.peers.last_restart = restarted.get(self._share.exchange.rank, NEVER)
        for buffers in saved:
            exchange, verdict = self.peers.met(buffers), buffers.verdicts[self.peers.group]
            round_ = round_at(self._config, self._share, buffers.begun, verdict, Stopwatch(device))
            known = tuple(buffers.verdicts[group] for group in exchange.groups)
            round_.meet(exchange, Verdicts(exchange, verdict, buffers.lengths.to(device), known))
            round_.resume(buffers)
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
            self._check_products(first)
        except RuntimeError as error:
            # A chunk holds the largest matrix, and offloaded it takes more room for its work.
            matrices = rule_class(config).takes_matrices
            less = f"--pier-outer-rule {NESTEROV}" if matrices else "a smaller --pier-chunk-mib, --pier-offload"
            error.add_note(
                f"Pier: this was a rehearsal, at start, of the outer step after iteration {first}. If memory is short, use "
                f"{less} or, with an overlap, more --pier-fragments. If the error speaks of a connection or a timeout, a rank "
                "of another group cannot be reached, or its own log says why it failed."
            )
            raise

    def _check_products(self, first: int) -> None:
        """Refuses participants whose matrix products differ in their bits: their anchors would.

        The largest matrix takes the memory that an outer step will; without a rule for matrices there is none.

        Raises:
            PierConfigError: With the groups.
        """
        shapes = (shape for _, chunk in self._share.chunks(range(self._config.fragments)) for shape in chunk.matrix_shapes)
        largest = max(shapes, key=torch.Size.numel, default=None)
        if largest is None:
            return
        own = bits_of_products(self._share.device, largest).view(1)
        for exchange in dict.fromkeys(self.peers.known(first)):
            found = exchange.gather(own).result().flatten().tolist()
            if differing := [group for group, bits in zip(exchange.groups, found, strict=True) if bits != found[0]]:
                preset, rule = self._config.preset, self._config.outer_rule
                flag = f"--pier-preset {preset}" if rule is None else f"--pier-outer-rule {rule}"
                raise PierConfigError(
                    f"{flag}: groups {differing} round matrix products otherwise than "
                    f"group {exchange.groups[0]}, and anchors would differ. Run all groups on one kind of processor with the "
                    f"same release of PyTorch, or use --pier-outer-rule {NESTEROV}."
                )

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


def momentum_warmup(stagings: Sequence[Staging], rule: OuterRule) -> None:
    """Builds up the outer momentum while the groups are still identical, hence without communication.

    Takes an outer step, then ``anchor = parameters``. With :class:`pier_megatron.outer.rules.Nesterov` that is
    ``momentum = mu * momentum + (anchor - parameters)``; arXiv 2511.17849, algorithm 1.
    """
    written = (ANCHOR, *rule.memory)
    for staged in one_ahead(staging.lend(chunk, written) for staging in stagings for chunk in staging.state.chunks):
        # The own pseudo-gradient is the mean.
        staged.subtract_parameters(staged.shared)
        rule.update(staged, is_alone=False)
        staged.chunk.copy_parameters_to(staged.anchor)
        staged.give_back(written)
