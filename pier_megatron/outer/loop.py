"""The outer loop of one rank: when outer steps are due and what they do. Plain PyTorch; Megatron is one of its users."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange import coding
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.exchange.sites import SiteExchange
from pier_megatron.outer.chunks import Shards
from pier_megatron.outer.elastic import ElasticMembership, ElasticPeers
from pier_megatron.outer.report import OuterStepReport, OuterStepReports
from pier_megatron.outer.share import Share, exchange_between, moments_of, whole_parameters
from pier_megatron.outer.snapshot import Progress, RoundBuffers, Snapshot, for_settings, settings_of
from pier_megatron.outer.state import ANCHOR
from pier_megatron.outer.static import StaticPeers
from pier_megatron.outer.steps import NEVER, OuterSteps


class OuterLoop:
    """Pier (arXiv 2511.17849) around any training loop: one call before an iteration, one after its inner step.

    Between them the caller averages gradients over all groups in the lazy start, and over its own group once
    :attr:`is_local`. All ranks of all groups call the same methods in the same iterations, also when a group skips its inner
    step; see ``examples/plain_pytorch.py``.

    Attributes:
        states: Anchor and momentum over the parameters of this rank. Offloaded ones are written some iterations after an outer
            step that was hidden behind training: call :meth:`snapshot` before you look at them.
        progress: Progress of this group in its run.
        share: What this rank owns.
        steps: Outer steps that are due or under way.
    """

    def __init__(
        self,
        shards: Sequence[Sequence[Shards]],
        config: PierConfig,
        between: dist.ProcessGroup | GroupExchange | None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        inner_state: Callable[[Tensor], Mapping[str, Tensor]] = lambda parameter: {},
        store_inner_state: Callable[[Tensor, Mapping[str, Tensor]], None] = lambda parameter, tensors: None,
        on_change: Callable[[], None] = lambda: None,
        report: Callable[[OuterStepReport], None] = lambda report: None,
        islands: ElasticMembership | None = None,
        sites: SiteExchange | None = None,
    ) -> None:
        """Takes over parameters that are the same in all groups.

        Args:
            shards: The FP32 parameters that this rank owns; a list for each optimizer that owns some of them.
            config: Schedules and sizes.
            between: Communicator of the ranks that own the same parameters, one of each group in group order, or collectives
                over it; None for a single group.
            group: Ranks that share the parameters of this group; None if this rank owns all of them.
            device: Device of the tensors in collectives; by default, that of the parameters.
            inner_state: The inner optimizer's tensors for one of these parameters by name, of any shape: what a group that is
                restarted takes over from another one.
            store_inner_state: Called with what was changed of it, for optimizers that hand out copies.
            on_change: Called after the parameters have changed, on all ranks of the group.
            report: Called for each outer step once its numbers are there, on every rank.
            islands: Elastic islands; ``between`` is then that of this group alone.
            sites: Collectives between sites, with ``config.sites``.

        Raises:
            TypeError: If a parameter is not float32.
            PierConfigError: If elastic islands cannot have a setting, see :meth:`PierConfig.check_elastic`, or the communicator
                is not between ``config.groups`` groups.
        """
        self.config, self.progress, self._is_under_way = config, Progress(), False
        self.exchange = exchange_between(config, between, islands is not None)
        owned = shards if islands is None else [[alike.whole() for alike in of_optimizer] for of_optimizer in shards]
        is_elastic = islands is not None
        self.share = Share(owned, config, self.exchange, group, device, inner_state, store_inner_state, on_change, is_elastic)
        self.device, self.states = self.share.device, self.share.states
        # Before training, so that it does not end where that fails.
        coding.compile_for(config.codec, self.device)
        self.reports = OuterStepReports(config, report, self.device)
        peers = StaticPeers(config, self.share, sites) if islands is None else ElasticPeers(config, self.share, islands)
        self.steps = OuterSteps(config, self.share, self.reports, peers)

    @classmethod
    def for_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        config: PierConfig,
        between: dist.ProcessGroup | GroupExchange | None,
        *,
        group: dist.ProcessGroup | None = None,
        report: Callable[[OuterStepReport], None] = lambda report: None,
        sites: SiteExchange | None = None,
    ) -> Self:
        """Builds the loop over the FP32 parameters of an inner optimizer; every rank of a group must hold all of them.

        The other arguments are those of the class, see :meth:`__init__`. The ranks of ``group`` train copies of the parameters,
        and each exchanges a part of them.

        Raises:
            TypeError: If a parameter is not float32, or is sharded over ranks.
            PierConfigError: If the communicator is not between ``config.groups`` groups.
        """
        shards, moments = [[whole_parameters(optimizer, group)]], functools.partial(moments_of, optimizer)
        return cls(shards, config, between, group=group, inner_state=moments, report=report, sites=sites)

    @torch.no_grad()
    def rehearse(self) -> None:
        """Takes all work buffers, and exchanges zeros with everyone it will meet; called by all ranks of all groups.

        What does not fit or does not connect fails here, before the first iteration. Nothing of the run changes.
        """
        self.steps.rehearse()

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
    def is_deserted(self) -> bool:
        """Whether too few islands have come for longer than this one waits."""
        return self.steps.peers.is_deserted

    @property
    def groups_meet(self) -> bool:
        """Whether outer steps begin at the end of this iteration, of all groups or of a few each."""
        return self.iteration % self.config.sync_interval == 0 or self.iteration == self.config.train_iters

    def begin_iteration(self, iteration: int) -> None:
        """Sets the clock to the iteration (1-based) that begins, before its first micro-batch.

        The clock counts skipped iterations too, so that all groups agree on it without communication.

        Args:
            iteration: Iteration that begins, counted from 1.

        Raises:
            RuntimeError: If it is not the one after the last, or that has not ended.
        """
        if iteration != self.iteration + 1:
            raise RuntimeError(
                f"Iteration {iteration} begins, but the last one that Pier knows of is {self.iteration}: what is due in "
                "between would be lost. Every iteration has to pass through begin_iteration() and end_iteration(), skipped "
                "ones too."
            )
        if self._is_under_way:
            raise RuntimeError(
                f"Iteration {iteration} begins, but iteration {self.iteration} has not ended: call end_iteration() after its "
                "inner step, also where that was skipped."
            )
        if self.iteration == 0:
            # Weights that came from elsewhere came after this was built.
            self.reset()
        self.share.commit_pending()
        if not self.is_local and not self.config.is_lazy(iteration):
            # Wherever the lazy start ends, and whether or not its last iteration was skipped.
            self.share.become_anchor()
            self.progress.is_local, self.progress.trained = True, 0
        self.progress.iteration, self._is_under_way = iteration, True
        self.progress.is_synchronised = not self.is_local

    def take_back_iteration(self) -> None:
        """Sets the clock back by an iteration that has begun, and that nobody will end: what is saved now was there before."""
        self.progress.iteration -= 1
        self._is_under_way = False

    def note_training(self, loss: Tensor | float | None, grad_norm: Tensor | float | None = None) -> None:
        """Notes loss and gradient norm of an iteration, for the next outer step's report; reads nothing from a device.

        Args:
            loss: Training loss over the samples of this group; None if this rank has none.
            grad_norm: Gradient norm over the parameters of this group; None if it is not known.
        """
        self.reports.note_training(loss, grad_norm)

    @torch.no_grad()
    def end_iteration(self, has_trained: bool = True) -> None:
        """Does what is due after the inner step, whether or not this group has taken it: the others wait for it.

        Args:
            has_trained: Whether this group has trained on its samples of the iteration; False if the iteration is skipped or
                the group rests.

        Raises:
            DivergedError: If an outer step is due and no group has finite parameters.
            AnchorsDifferError: If the groups do not hold the same anchor.
            RuntimeError: If no iteration is under way.
        """
        if not self._is_under_way:
            raise RuntimeError(
                f"Iteration {self.iteration} has ended already, and what was due is done. Call begin_iteration() before each "
                "iteration, and end_iteration() once after it."
            )
        self._is_under_way = False
        self.progress.trained += has_trained
        self.steps.proceed(self.progress)
        # Where all groups hold the same parameters they have just met: nobody waits.
        self.reports.write_arrived(waits=self.is_synchronised)

    @torch.no_grad()
    def join(self) -> None:
        """Meets the running islands before the first iteration; receives from them what it does not have.

        An outer step that this island was due to take when it was saved, and could not for lack of others, is taken first.

        Raises:
            PierConfigError: If it cannot be one of them, or the loop was built without elastic islands.
            RuntimeError: If too few are there.
        """
        self.steps.join(self.progress)

    def skip_iteration(self) -> None:
        """Skips an iteration, in which no group trains: the clock advances, and what is due is done."""
        self.begin_iteration(self.iteration + 1)
        self.end_iteration(has_trained=False)

    def reset(self, iteration: int | None = None) -> None:
        """Takes the present parameters, which all groups share, for the anchor, and sets all other lasting state to zero.

        Outer steps that are under way are not applied. Called by all ranks of all groups.

        Args:
            iteration: Iteration to set the clock to; None leaves it.
        """
        self.share.become_anchor()
        self.steps.drop_rounds()
        self.share.synchronize()
        for state in self.states:
            state.forget(state.kept.keys() - {ANCHOR})
        self.steps.peers.last_restart = NEVER
        if iteration is not None:
            self.progress.iteration = iteration
        self._is_under_way = False
        # All groups hold the same parameters, as after an outer step.
        self.progress.last_common_step, self.progress.trained, self.progress.under_way = self.iteration, 0, 0

    def snapshot(self) -> Snapshot:
        """The loop as plain data; :meth:`restore` continues from it exactly, given the same parameters and inner state.

        Waits for what is on its way between the groups, and applies nothing before its time. Its tensors are the loop's own.

        Raises:
            RuntimeError: If an iteration is under way.
        """
        if self._is_under_way:
            raise RuntimeError(f"snapshot() in iteration {self.iteration}: call it before begin_iteration().")
        rounds, restarted = self.steps.settle(self.progress)
        self.reports.write_arrived(waits=True)
        return Snapshot(
            dataclasses.replace(self.progress),
            self.share.kept(),
            rounds,
            restarted,
            self.config.rule_name,
            settings_of(self.config, self.device),
        )

    def empty_snapshot(self, progress: Progress, rounds: Mapping[int, Sequence[int]]) -> Snapshot:
        """Returns a snapshot to read saved tensors into, without talking to other groups; its flat buffers are the loop's own.

        Args:
            progress: Progress of the saved run.
            rounds: Verdicts on all groups in the outer steps that were under way, by the iteration after which each began.
        """
        buffers = []
        for begun, verdicts in rounds.items():
            chunks = [chunk for _, chunk in self.share.chunks(self.config.fragments_due(begun))]
            numel, matrices = sum(chunk.numel for chunk in chunks), sum(len(chunk.matrix_shapes) for chunk in chunks)
            buffers.append(RoundBuffers(begun, torch.empty(numel), torch.empty(numel), torch.empty(matrices), verdicts))
        return Snapshot(progress, self.share.kept(), buffers)

    def restore(self, snapshot: Snapshot) -> None:
        """Continues from a snapshot of an equally configured run over the same shards; rounds and residuals may be missing.

        The parameters have been restored before.

        Args:
            snapshot: Snapshot that :meth:`snapshot` has returned.

        Raises:
            PierConfigError: If this run would fall back into the lazy start, or has another outer rule or other settings.
        """
        self.config.check_resumable(snapshot.progress.iteration, snapshot.progress.is_local)
        snapshot = for_settings(self._of_this_rule(snapshot), self.config, self.device)
        self.progress, self._is_under_way = dataclasses.replace(snapshot.progress), False
        self.steps.drop_rounds()
        self.share.synchronize()
        for state, saved in zip(self.states, snapshot.states, strict=True):
            state.restore(saved)
        self.steps.resume(snapshot.rounds, snapshot.restarted)
        self.share.commit()

    def _of_this_rule(self, snapshot: Snapshot) -> Snapshot:
        """What this loop's rule can continue from."""
        rule = self.config.rule_name
        if snapshot.rule in (None, rule):
            return snapshot
        if not self.config.override_checkpoint:
            raise PierConfigError(
                f"outer_rule: the snapshot is of a run whose outer steps are {snapshot.rule}'s, and this loop's are {rule}'s. "
                f"Continue with {snapshot.rule}, or begin without outer momentum: override_checkpoint=True "
                "(--pier-override-checkpoint)."
            )
        _, *memory = self.share.common
        for state in self.states:
            state.forget(memory)
        states = [{name: saved[name] for name in saved if name not in memory} for saved in snapshot.states]
        return dataclasses.replace(snapshot, states=states, rounds=())

    def checksums(self) -> list[dict[str, int]]:
        """Sums of the bits of what all groups agree on, for each group over its ranks; see :meth:`OuterState.checksum`."""
        names = self.share.common
        sums = self.share.over_group(self.share.checksums(names))
        return [dict(zip(names, of_group, strict=True)) for of_group in self.exchange.gather(sums).result().tolist()]

    def anchor_in_model(self, as_mean: bool = False) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Inside, the parameters are what all groups agreed on last; where they never do, the group's own slow weights.

        Where all groups hold the same parameters, as in the lazy start, it is these. Evaluation and saving between outer steps
        use it: training then continues as if nobody had looked, except that main parameters in FP16 leave the model rounded as
        a resumed run has it.

        Args:
            as_mean: Show the mean of all groups' slow weights instead, at the cost of an all-reduce.

        Returns:
            A context that yields the parameters as they are trained, laid out as the flat buffers of each state.
        """
        if self.is_synchronised:
            return contextlib.nullcontext([state.parameters_on_host() for state in self.states])
        return self.share.showing_anchor(as_mean)
