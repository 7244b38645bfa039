"""The outer loop of one rank: when groups meet, and what they do then. Plain PyTorch; Megatron is one of its users."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import Computed, Exchange, Gathered, GroupExchange
from pier_megatron.outer.gathering import Gatherings, Islands
from pier_megatron.outer.meetings import meeting_at, wire_of
from pier_megatron.outer.members import NEVER, Members
from pier_megatron.outer.phases import phase
from pier_megatron.outer.pulls import Pulls
from pier_megatron.outer.report import OuterStepReport, OuterStepReports
from pier_megatron.outer.rounds import DISTANCE, OuterRound, momentum_warmup
from pier_megatron.outer.rules import rule_at
from pier_megatron.outer.snapshot import Progress, RoundBuffers, Snapshot, StateBuffers
from pier_megatron.outer.staging import Staging, chunks_of
from pier_megatron.outer.state import COMMON, OuterState, Shards
from pier_megatron.outer.stopwatch import Stopwatch
from pier_megatron.outer.verdicts import Judge, KnownVerdicts, Verdicts
from pier_megatron.outer.weights import Weights


class OuterLoop:
    """Pier (arXiv 2511.17849) around any training loop: one call before an iteration, one after its inner step.

    Between them the caller averages gradients over all groups in the lazy start, and over its own group once
    :attr:`is_local`. All ranks of all groups call the same methods in the same iterations, also when a group skips its inner
    step; see ``examples/plain_pytorch.py``.

    Attributes:
        states: Anchor and momentum over the parameters of this rank.
        progress: Where this group stands in its run.
        is_deserted: Whether too few islands have come together for longer than this one waits.
        rounds: Outer steps whose exchange is hidden behind the present iterations.
    """

    def __init__(
        self,
        shards: Sequence[Sequence[Shards]],
        config: PierConfig,
        exchange: GroupExchange,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        inner_state: Callable[[Tensor], Mapping[str, Tensor]] = lambda parameter: {},
        on_change: Callable[[], None] = lambda: None,
        report: Callable[[OuterStepReport], None] = lambda report: None,
        islands: Islands | None = None,
    ) -> None:
        """Takes over parameters that are the same in all groups.

        Args:
            shards: The FP32 parameters that this rank owns; a list for each optimizer that owns some of them.
            config: Schedules and sizes.
            exchange: Collectives between the ranks that own the same parameters, one rank of each group.
            group: Ranks that share the parameters of this group; None if this rank owns all of them.
            device: Of the tensors in collectives; by default, of the parameters.
            inner_state: The inner optimizer's tensors for one of these parameters, of its shape, by name: what a group that
                is restarted takes over from another one.
            on_change: Called after the parameters have changed, on all ranks of the group.
            report: Called for each outer step once its numbers are there, on every rank.
            islands: Where groups come and go, those that are there; ``exchange`` is then that of this group alone.

        Raises:
            TypeError: If a parameter is not float32.
        """
        self.config, self.exchange = config, exchange
        devices = (tensor.device for of_optimizer in shards for alike in of_optimizer for tensor in alike.tensors)
        self.device = device or next(devices, torch.device("cpu"))
        self.states = [
            OuterState(
                of_optimizer,
                chunk_numel=config.chunk_numel_on(self.device.type),
                fragments=config.fragments,
                offload=config.offload,
                segment_numel=wire_of(config).segment_numel if config.has_error_feedback else None,
                device=self.device,
            )
            for of_optimizer in shards
        ]
        self._stagings = [Staging(state) for state in self.states]
        self._group = group
        self._inner_state = inner_state
        self._weights = Weights(self._stagings, exchange, on_change)
        self.rounds: list[OuterRound] = []
        self._pulls = Pulls(config, self._stagings, exchange, self.device)
        self._members = Members(config, self.exchange.size, self._moments, self.device)
        self._judge = Judge(config, self._stagings, self._over_group, self.device)
        self.reports = OuterStepReports(config, report)
        self.progress = Progress()
        self.is_deserted = False
        self._gatherings: Gatherings | None = None
        if islands is not None:
            self._gatherings = Gatherings(
                islands, self._stagings, self._judge, self._members, self._round, self._over_group, self.device
            )

    @classmethod
    def for_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        config: PierConfig,
        exchange: GroupExchange,
        *,
        group: dist.ProcessGroup | None = None,
        report: Callable[[OuterStepReport], None] = lambda report: None,
    ) -> Self:
        """Builds the loop over the parameters of an inner optimizer, of which every rank of a group holds all.

        Args:
            optimizer: Inner optimizer over FP32 parameters, which are the same in all groups.
            config: Schedules and sizes.
            exchange: Collectives between the ranks that have the same place in their groups, one rank of each group.
            group: Ranks of this group, which train copies of the same parameters; None if it is this rank alone.
            report: Called for each outer step once its numbers are there, on every rank.

        Raises:
            TypeError: If a parameter is not float32, or is sharded over ranks.
        """
        parameters = [parameter for settings in optimizer.param_groups for parameter in settings["params"]]
        for parameter in parameters:
            if type(parameter.data) is not Tensor:
                raise TypeError(
                    f"OuterLoop.for_optimizer takes whole parameters, but one is a {type(parameter.data).__name__}. Build "
                    "OuterLoop over Shards of what each rank holds of it, for example parameter.to_local()."
                )
        is_copied = group is not None and group.size() > 1
        shards = Shards(parameters, is_counted=group is None or group.rank() == 0, is_copied=is_copied)
        inner_state = functools.partial(_moments, optimizer)
        return cls([[shards]], config, exchange, group=group, inner_state=inner_state, report=report)

    @property
    def iteration(self) -> int:
        """The iteration under way, 1-based; between iterations, the last one completed."""
        return self.progress.iteration

    @property
    def is_local(self) -> bool:
        """Whether it belongs to the local phase, in which groups train apart."""
        return self.progress.is_local

    @property
    def is_synchronised(self) -> bool:
        """Whether all groups hold the same parameters now."""
        return self.progress.is_synchronised

    @property
    def last_common_step(self) -> int:
        """Iteration after which this group took its last outer step with others."""
        return self.progress.last_common_step

    @property
    def groups_meet(self) -> bool:
        """Whether all groups are together at the end of this iteration, whatever else they do."""
        is_due = self.config.subgroup is None and self.iteration % self.config.sync_interval == 0
        return is_due or self.iteration == self.config.train_iters

    def begin_iteration(self, iteration: int) -> None:
        """Sets the clock to the iteration (1-based) that begins, before its first micro-batch.

        The clock counts iterations that were skipped too, so all groups agree on it without talking.

        Raises:
            RuntimeError: If it is not the one after the last.
        """
        if iteration != self.iteration + 1:
            raise RuntimeError(
                f"Iteration {iteration} begins, but the last one that Pier knows of is {self.iteration}: what is due in "
                "between would be lost. Every iteration has to pass through begin_iteration() and end_iteration(), skipped "
                "ones too."
            )
        if self.iteration == 0:
            # Weights that came from elsewhere came after this was built.
            self.reset()
        self._weights.commit_what_is_left()
        if not self.is_local and not self.config.is_lazy(iteration):
            # Wherever the lazy start ends, and whether or not its last iteration was skipped.
            self._weights.become_anchor()
            self.progress.is_local, self.progress.trained = True, 0
        self.progress.iteration = iteration
        self.progress.is_synchronised = not self.is_local

    @torch.no_grad()
    def end_iteration(self, has_trained: bool = True) -> None:
        """Does what is due after the inner step, whether or not this group has taken it: the others wait for it.

        Args:
            has_trained: Whether this group has read its samples of the iteration. It has not where the iteration is skipped, or
                where it rests for groups that are slower.

        Raises:
            DivergedError: If an outer step is due and no group has finite parameters.
            AnchorsDifferError: If the groups do not hold the same anchor.
        """
        self.progress.trained += has_trained
        if self.is_local:
            self._pulls.proceed(self.iteration)
            self._move_rounds()
            self._begin_rounds()
            if self.config.subgroup is not None and self.iteration == self.config.train_iters:
                with self._phase("agree"):
                    self._weights.agree_on_mean()
                self.progress.is_synchronised = True
            # Where all groups hold the same parameters they have just met: nobody waits.
            self.reports.write_arrived(waits=self.is_synchronised)
        elif self.config.is_momentum_warmup(self.iteration):
            with self._phase("momentum_warmup"):
                momentum_warmup(self._stagings, self.config.momentum_at(self.iteration))

    @torch.no_grad()
    def join(self) -> None:
        """Meets the islands that are there, before the first iteration; takes over from them what it does not have.

        An outer step that this island was due to take when it was saved, and could not for lack of others, is taken first.

        Raises:
            PierConfigError: If it cannot be one of them.
            RuntimeError: If too few are there.
        """
        self._meet(self.config.fragments_due(self.iteration) if self.last_common_step < self.iteration else ())
        if self.is_deserted:
            raise RuntimeError(f"--pier-island-wait: too few islands for longer than {self.config.island_wait} minutes.")

    def skip_iteration(self) -> None:
        """An iteration in which nobody trains: the clock goes on, and what is due is done."""
        self.begin_iteration(self.iteration + 1)
        self.end_iteration(has_trained=False)

    def reset(self, iteration: int | None = None) -> None:
        """Takes the present parameters, which all groups share, for the anchor, without momentum; may set the clock."""
        self._weights.become_anchor()
        for state in self.states:
            state.momentum.zero_()
        self._pulls.restart()
        self.progress.iteration = self.iteration if iteration is None else iteration
        self.progress.last_common_step, self.progress.trained = self.iteration, 0

    def snapshot(self) -> Snapshot:
        """The loop as plain data; :meth:`restore` continues from it exactly, given the same parameters and inner state.

        Waits for everything that is on its way between the groups, and applies nothing before its time.

        Returns:
            Snapshot; its flat buffers are the loop's own.
        """
        self._pulls.finish(range(self.config.fragments))
        rounds = [round_.settle() for round_ in self.rounds]
        own = [self._members.last_restart, *(round_.verdicts.own for round_ in self.rounds)]
        restarts, *verdicts = self.exchange.gather(torch.tensor(own, device=self.device)).result().T.tolist()
        self.reports.write_arrived(waits=True)
        return Snapshot(
            dataclasses.replace(self.progress),
            self.buffers(),
            [dataclasses.replace(round_, verdicts=found) for round_, found in zip(rounds, verdicts, strict=True)],
            sorted(self._pulls.done),
            {group: iteration for group, iteration in enumerate(restarts) if iteration != NEVER},
            self._judge.outliers.state_dict() if self._judge.outliers else {},
        )

    def buffers(self) -> list[StateBuffers]:
        """Returns the loop's own flat buffers, to read a snapshot into, without talking to other groups."""
        for staging in self._stagings:
            staging.synchronize()
        return [state.buffers() for state in self.states]

    def round_buffers(self, begun: int, verdicts: Sequence[int]) -> RoundBuffers:
        """Returns host memory to read a round of a snapshot into: one that began after ``begun``, with its verdicts."""
        fragments = self.config.fragments_due(begun)
        numel = sum(chunk.numel for _, chunk in chunks_of(self._stagings, fragments))
        return RoundBuffers(begun, torch.empty(numel), torch.empty(numel), verdicts)

    def restore(self, snapshot: Snapshot) -> None:
        """Continues from a snapshot of an equally configured run over the same shards; rounds and residuals may be missing.

        The parameters have been restored before.

        Raises:
            PierConfigError: If this run would fall back into the lazy start.
        """
        self.config.check_resumable(snapshot.progress.iteration, snapshot.progress.is_local)
        self.progress = dataclasses.replace(snapshot.progress)
        for state, buffers in zip(self.states, snapshot.states, strict=True):
            state.restore(buffers)
        self._pulls.restart(snapshot.pulled)
        self.rounds = []
        for saved in snapshot.rounds:
            meeting = meeting_at(self.config, self.exchange, saved.begun)
            round_ = self._round(saved.begun, meeting, KnownVerdicts(meeting, saved.verdicts), Stopwatch(self.device))
            round_.resume(saved)
            self.rounds.append(round_)
        self._members.last_restart = snapshot.restarted.get(self.exchange.rank, NEVER)
        if self._judge.outliers:
            self._judge.outliers.load_state_dict(snapshot.outliers)
        self._weights.commit()

    def checksums(self) -> list[dict[str, int]]:
        """Of each group, sums of the bits of anchor and momentum over all its ranks, however they share the model."""
        for staging in self._stagings:
            staging.synchronize()
        sums = torch.zeros(len(COMMON), dtype=torch.int64, device=self.device)
        for state in self.states:
            sums += torch.stack([state.checksum(name) for name in COMMON])
        self._over_group(sums)
        return [dict(zip(COMMON, of_group, strict=True)) for of_group in self.exchange.gather(sums).result().tolist()]

    def anchor_in_model(self, as_mean: bool = False) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Inside, the parameters are what all groups agreed on last; where they never do, the group's own slow weights.

        For evaluation and saving while the groups have drifted apart or an exchange is under way: training goes on as if nobody
        had looked.

        Args:
            as_mean: Show the mean of all groups' slow weights instead, at the cost of an all-reduce.

        Returns:
            A context that yields the parameters as they are trained, laid out as the flat buffers of each state.
        """
        return self._weights.showing_anchor(as_mean)

    def _round(self, begun: int, meeting: Exchange, verdicts: Verdicts, stopwatch: Stopwatch) -> OuterRound:
        fragments, rule = self.config.fragments_due(begun), rule_at(self.config, begun, frozenset(self._pulls.done))
        return OuterRound(self._stagings, meeting, fragments, rule, verdicts, begun, stopwatch, self.device)

    def _begin_rounds(self) -> None:
        fragments = self.config.fragments_due(self.iteration)
        if not fragments:
            return
        if self._gatherings is not None:
            self._meet(fragments)
            return
        stopwatch, meeting = Stopwatch(self.device), meeting_at(self.config, self.exchange, self.iteration)
        with stopwatch.running():
            with self._phase("pull"):
                distance, bytes_sent = self._pulls.take(fragments)
            with self._phase("verdict"):
                verdicts = self._judge.verdicts(fragments, meeting)
            round_ = self._round(self.iteration, meeting, verdicts, stopwatch)
            round_.sums[DISTANCE] = distance
            round_.bytes_sent += bytes_sent
            if self.config.overlap and self.iteration < self.config.train_iters:
                with self._phase("begin"):
                    round_.begin()
                    round_.proceed(0, self.config.overlap)
                self.rounds.append(round_)
                return
            with self._phase("outer_step"):
                self._members.check(round_, self.iteration)
                round_.run()
            self.progress.is_synchronised = round_.rule.has_common_anchor and len(fragments) == self.config.fragments
            self._end(round_)

    def _move_rounds(self) -> None:
        """Moves on the rounds that span iterations, at the same iterations on every rank."""
        for round_ in list(self.rounds):
            with round_.stopwatch.running():
                age = self.iteration - round_.begun
                if age < self.config.overlap and self.iteration < self.config.train_iters:
                    with self._phase("proceed"):
                        round_.proceed(age, self.config.overlap)
                else:
                    with self._phase("finish"):
                        self._members.check(round_, self.iteration)
                        round_.finish()
                    self.rounds.remove(round_)
                    self._end(round_)

    def _meet(self, fragments: Sequence[int]) -> None:
        """Takes an outer step with those who are there, if one is due, or joins them."""
        assert self._gatherings is not None
        with self._phase("meeting"):
            meeting = self._gatherings.meet(self.progress.iteration, self.last_common_step, fragments, self.progress.trained)
        self.is_deserted = meeting is None
        if meeting is None:
            return
        self.progress.iteration, self.progress.last_common_step = meeting.iteration, meeting.last_common_step
        if meeting.round is not None or meeting.has_joined:
            self.progress.trained = 0
        self.progress.is_local |= meeting.has_joined
        if meeting.round is not None:
            meeting.round.finish()
        if meeting.round is not None or meeting.has_joined:
            self._weights.return_to_anchor()
            self._weights.commit()
            self.progress.is_synchronised = meeting.round is not None
        if meeting.round is not None:
            self.reports.add(
                meeting.round, Gathered([self._of_group(meeting.round)], [Computed(self.device)]), meeting.restarted
            )

    def _end(self, round_: OuterRound) -> None:
        with self._phase("commit"):
            restarted = self._members.restart_left_out(round_, self.iteration)
            if round_.meeting.rank in restarted:
                self._weights.return_to_anchor()
                for other in self.rounds:
                    other.forget_progress()
            self._weights.commit()
        own, self.progress.last_common_step = self._of_group(round_), round_.begun
        self.progress.trained = self.iteration - round_.begun
        # Where groups have anchors of their own, each reports for itself: nobody waits for those that it has met.
        is_common = round_.rule.has_common_anchor
        sums = self.exchange.gather(own) if is_common else Gathered([own], [Computed(self.device)])
        self.reports.add(round_, sums, restarted)
        self._pulls.begin(round_.begun, self.iteration)

    def _of_group(self, round_: OuterRound) -> Tensor:
        """The sums of a round over all ranks of this group."""
        self._over_group(round_.sums)
        return round_.sums

    def _moments(self) -> list[Tensor]:
        return [
            moment
            for state in self.states
            for parameter, _ in state.slices()
            for _, moment in sorted(self._inner_state(parameter).items())
        ]

    def _over_group(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if self._group is not None:
            dist.all_reduce(tensor, op=op, group=self._group)

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return phase(name, self.exchange, self.iteration)


def _moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What an optimizer keeps for every element of a parameter: not its count of steps, which can have the same shape."""
    state = optimizer.state.get(parameter, {}).items()
    return {name: value for name, value in state if name != "step" and getattr(value, "shape", None) == parameter.shape}
