"""Megatron's optimizer with an outer step around it."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor
from torch.profiler import record_function

from pier_megatron.config import PierConfig, PierConfigError
from pier_megatron.doctor import Examination
from pier_megatron.integration.gradients import GradientAveraging
from pier_megatron.integration.shards import commit_main_parameters, main_parameters
from pier_megatron.metrics import OuterStepReport, norms_and_cosines
from pier_megatron.outer import Gathered, GroupExchange, OuterRound, OuterState, Staging, momentum_warmup


class DivergedError(RuntimeError):
    """No group has finite parameters left: nothing to go on from."""


@dataclasses.dataclass
class _Underway:
    """A round that spans iterations."""

    round: OuterRound
    begun: int
    bytes_sent: int
    seconds: float
    advanced: bool = False


@dataclasses.dataclass
class _Unreported:
    """A finished round whose numbers are still on their way between the groups."""

    begun: int
    sums: Gathered
    contributes: Tensor
    seconds: float
    bytes_sent: int


class PierOptimizer(ChainedOptimizer):
    """Pier (arXiv 2511.17849) over the distributed optimizers that Megatron built.

    A group is a distributed-optimizer instance. Each :meth:`step` is Megatron's own; at sync iterations the groups then
    meet on the FP32 shards that this rank owns.

    Attributes:
        pier_config: The configuration.
        outer_states: Anchor and momentum of each chained optimizer, in its order.
        iteration: The iteration under way, 1-based; between iterations, the last one completed.
        examination: Of ``pier-megatron doctor``, in a job that it has started.
    """

    examination: Examination | None = None

    def __init__(
        self,
        optimizer: ChainedOptimizer,
        config: PierConfig,
        exchange: GroupExchange,
        report: Callable[[OuterStepReport], None],
    ) -> None:
        """Takes over an optimizer that has not stepped yet.

        Args:
            optimizer: What Megatron built: distributed optimizers with ``config.groups`` instances.
            config: Schedules and sizes.
            exchange: Collectives between the groups.
            report: Called for each outer step once its numbers are there, on every rank.
        """
        super().__init__(optimizer.chained_optimizers)
        self.pier_config = config
        self.iteration = 0
        self._members = [member for member in self.chained_optimizers if not member.is_stub_optimizer]
        feedback = not exchange.codec.lossless and not config.no_error_feedback
        self.outer_states = [
            OuterState(
                main_parameters(member),
                chunk_numel=config.chunk_mib * 2**20 // 4,
                fragments=config.fragments,
                offload=config.offload,
                segment_numel=exchange.segment_numel if feedback else None,
            )
            for member in self._members
        ]
        self._stagings = [Staging(state) for state in self.outer_states]
        self._exchange = exchange
        self._report = report
        self._gradients = GradientAveraging(self.model_chunks, config.groups)
        self._underway: list[_Underway] = []
        self._unreported: list[_Unreported] = []

    @property
    def is_local(self) -> bool:
        """Whether this iteration belongs to the local phase."""
        return not self.pier_config.is_lazy(self.iteration)

    @property
    def is_synchronised(self) -> bool:
        """Whether all groups hold the same parameters at the end of this iteration."""
        config = self.pier_config
        if not self.is_local or self.iteration == config.train_iters:
            return True
        return config.overlap == 0 and config.fragments == 1 and config.is_outer_step(self.iteration)

    @property
    def groups_meet(self) -> bool:
        """Whether all groups wait for each other at the end of this iteration, whatever else they do."""
        config = self.pier_config
        return self.iteration % config.sync_interval == 0 or self.iteration == config.train_iters

    @property
    def shows_anchor(self) -> bool:
        """Whether evaluation and saving at the end of this iteration look at the anchor, see :meth:`anchor_in_model`."""
        return (self.pier_config.overlap > 0 or self.pier_config.fragments > 1) and not self.is_synchronised

    def begin_iteration(self, iteration: int) -> None:
        """Sets the clock and the averaging domain of the gradients, before the first micro-batch.

        The clock is Megatron's: it counts steps that were skipped for inf or nan too, so all groups agree on it without
        talking.

        Args:
            iteration: The iteration that begins, 1-based.

        Raises:
            PierConfigError: If the run was resumed, which would lose the outer momentum.
        """
        if self.iteration == 0:
            if iteration > 1:
                raise PierConfigError(
                    f"--load resumed the run at iteration {iteration - 1}: a checkpoint does not hold the outer momentum yet, "
                    "so going on from it would not be Pier. Start a new run from its weights with --finetune, or go on "
                    "synchronously with --optimizer adam."
                )
            # Weights that --load or --pretrained-checkpoint brought came after the optimizer was built.
            self._reset_anchor()
        self.iteration = iteration
        if self.is_local:
            self._gradients.over_own_group()
        else:
            self._gradients.over_all_groups()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Steps the inner optimizer, then does what is due after this iteration.

        Returns:
            As Megatron's: whether the inner step was taken, its gradient norm, its number of zeros.

        Raises:
            DivergedError: If an outer step is due and no group has finite parameters.
        """
        result: tuple[bool, float | None, int | None] = super().step()
        # An inner step that this group skipped changes nothing here: the others wait for it.
        if self.is_local:
            self._land_rounds()
            self._begin_rounds()
            self._report_what_has_arrived()
        elif self.pier_config.is_momentum_warmup(self.iteration):
            with record_function("pier::momentum_warmup"):
                momentum_warmup(self._stagings, self.pier_config.momentum_at(self.iteration))
        elif self.iteration == self.pier_config.lazy_start:
            self._reset_anchor()
        return result

    @contextlib.contextmanager
    def anchor_in_model(self) -> Iterator[None]:
        """Inside, the model and the main parameters are what all groups agreed on last.

        For evaluation and saving while the groups have drifted apart or an exchange is under way: the anchor is the same
        everywhere, and training goes on as if nobody had looked.
        """
        stash = [torch.empty(state.numel, dtype=torch.float32) for state in self.outer_states]
        for staging, kept in zip(self._stagings, stash, strict=True):
            staging.synchronize()
            for chunk in staging.state.chunks:
                chunk.copy_parameters_to(chunk.of(kept))
                chunk.set_parameters(chunk.of(staging.state.anchor))
        commit_main_parameters(self._members)
        yield
        for state, kept in zip(self.outer_states, stash, strict=True):
            for chunk in state.chunks:
                chunk.set_parameters(chunk.of(kept))
        commit_main_parameters(self._members)

    def _reset_anchor(self) -> None:
        for state in self.outer_states:
            state.reset_anchor()

    def _begin_rounds(self) -> None:
        config = self.pier_config
        fragments = config.fragments_due(self.iteration)
        if not fragments:
            return
        begin = time.perf_counter()
        mu, eta = config.momentum_at(self.iteration), config.learning_rate_at(self.iteration)
        self._exchange.bytes_sent = 0
        round_ = OuterRound(self._stagings, self._exchange, fragments, mu, eta, self._is_finite())
        if config.overlap and self.iteration < config.train_iters:
            with record_function("pier::begin"):
                round_.begin()
            sent = self._exchange.bytes_sent
            self._underway.append(_Underway(round_, self.iteration, sent, time.perf_counter() - begin))
            return
        with record_function("pier::outer_step"):
            self._check_contributors(round_)
            round_.run()
        self._finish(round_, self.iteration, self._exchange.bytes_sent, begin)

    def _land_rounds(self) -> None:
        """Moves on the rounds that span iterations, at the same iterations on every rank."""
        config = self.pier_config
        for underway in list(self._underway):
            begin = time.perf_counter() - underway.seconds
            age = self.iteration - underway.begun
            is_due = age == config.overlap or self.iteration == config.train_iters
            if not underway.advanced and (is_due or age == config.overlap // 2):
                with record_function("pier::advance"):
                    underway.round.advance()
                underway.advanced = True
            if is_due:
                with record_function("pier::finish"):
                    self._check_contributors(underway.round)
                    underway.round.finish()
                self._underway.remove(underway)
                self._finish(underway.round, underway.begun, underway.bytes_sent, begin)
            else:
                underway.seconds = time.perf_counter() - begin

    def _finish(self, round_: OuterRound, begun: int, bytes_sent: int, begin: float) -> None:
        with record_function("pier::commit"):
            commit_main_parameters(self._members)
        dist.all_reduce(round_.sums, group=self.get_grad_stats_parallel_group())
        self._unreported.append(
            _Unreported(
                begun=begun,
                sums=self._exchange.gather(round_.sums),
                contributes=round_.contributors(),
                seconds=time.perf_counter() - begin,
                bytes_sent=bytes_sent,
            )
        )

    def _report_what_has_arrived(self) -> None:
        """Reports finished rounds without ever waiting for another group, except where the groups are together anyway."""
        while self._unreported and (self.is_synchronised or self._unreported[0].sums.is_complete()):
            found = self._unreported.pop(0)
            pseudo_gradient, momentum, cosine_min, cosine_mean = norms_and_cosines(found.sums.result().cpu(), found.contributes)
            self._report(
                OuterStepReport(
                    iteration=found.begun,
                    pseudo_gradient_norm=pseudo_gradient,
                    momentum_norm=momentum,
                    cosine_min=cosine_min,
                    cosine_mean=cosine_mean,
                    mu=self.pier_config.momentum_at(found.begun),
                    eta=self.pier_config.learning_rate_at(found.begun),
                    bytes_sent=found.bytes_sent,
                    seconds=found.seconds,
                    left_out=tuple((~found.contributes).nonzero().flatten().tolist()),
                )
            )

    def _check_contributors(self, round_: OuterRound) -> None:
        if not round_.contributors().any():
            raise DivergedError(
                f"After iteration {self.iteration} no group has finite parameters: the run has diverged and nothing was "
                "synchronised. Restart from the last checkpoint, with a lower learning rate or other data."
            )

    def _is_finite(self) -> bool:
        """Whether all parameters of this group are finite, on all its ranks."""
        device = self.get_loss_scale().device
        finite = torch.ones((), dtype=torch.int32, device=device)
        for state in self.outer_states:
            finite *= state.parameters_are_finite()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=self.get_grad_stats_parallel_group())
        return bool(finite.item())
