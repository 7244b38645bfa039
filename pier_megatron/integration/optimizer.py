"""Megatron's optimizer with an outer step around it."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor
from torch.profiler import record_function

from pier_megatron.config import PierConfig
from pier_megatron.integration.checkpoint.content import CheckpointContent
from pier_megatron.integration.gradients import GradientAveraging
from pier_megatron.integration.inner.adam import commit_main_parameters, inner_state, main_parameters
from pier_megatron.outer import (
    GOOD,
    NOT_FINITE,
    OUTLIER,
    GroupExchange,
    OuterRound,
    OuterState,
    OutlierDetector,
    Staging,
    momentum_warmup,
    squared_norm,
)
from pier_megatron.outer.description import ENTRY
from pier_megatron.outer.report import OuterStepReport, OuterStepReports


class DivergedError(RuntimeError):
    """No group has a pseudo-gradient that can be used: nothing to go on from."""


@dataclasses.dataclass
class Underway:
    """A round that spans iterations.

    Attributes:
        round: Itself.
        begun: Iteration after which it began.
        bytes_sent: By this rank to other groups.
        seconds: Spent on it so far.
    """

    round: OuterRound
    begun: int
    bytes_sent: int
    seconds: float


class PierOptimizer(ChainedOptimizer):
    """Pier (arXiv 2511.17849) over the distributed optimizers that Megatron built.

    A group is a distributed-optimizer instance. Each :meth:`step` is Megatron's own; at sync iterations the groups then
    meet on the FP32 shards that this rank owns.

    Attributes:
        pier_config: The configuration.
        exchange: Collectives between the groups.
        members: The distributed optimizers that own parameters on this rank.
        outer_states: Anchor and momentum of each of them, in their order.
        underway: Rounds whose exchange is hidden behind the present iterations.
        outliers: Judges this group's pseudo-gradients, if the user wants that.
        iteration: The iteration under way, 1-based; between iterations, the last one completed.
        stash: Inside :meth:`anchor_in_model`, the main parameters of each member; float32, shape ``[numel]`` each.
        reports: On outer steps, to the log.
        checkpoint: What is saved of this run.
    """

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
        self.members: list[Any] = [member for member in self.chained_optimizers if not member.is_stub_optimizer]
        feedback = not exchange.codec.lossless and not config.no_error_feedback
        self.outer_states = [
            OuterState(
                main_parameters(member),
                chunk_numel=config.chunk_mib * 2**20 // 4,
                fragments=config.fragments,
                offload=config.offload,
                segment_numel=exchange.segment_numel if feedback else None,
            )
            for member in self.members
        ]
        self._stagings = [Staging(state) for state in self.outer_states]
        self.exchange = exchange
        self.underway: list[Underway] = []
        self.outliers = OutlierDetector(config.outlier_zscore) if config.outlier_zscore is not None else None
        self.stash: list[Tensor] | None = None
        self.checkpoint = CheckpointContent(self)
        self.reports = OuterStepReports(config, report)
        self._gradients = GradientAveraging(self.model_chunks, config.groups)
        self._outer_state_is_known = False

    @property
    def is_local(self) -> bool:
        """Whether this iteration belongs to the local phase."""
        return not self.pier_config.is_lazy(self.iteration)

    @property
    def is_synchronised(self) -> bool:
        """Whether all groups hold the same parameters at the end of this iteration."""
        return self.pier_config.is_synchronised(self.iteration)

    @property
    def groups_meet(self) -> bool:
        """Whether all groups wait for each other at the end of this iteration, whatever else they do."""
        config = self.pier_config
        return self.iteration % config.sync_interval == 0 or self.iteration == config.train_iters

    @property
    def shows_anchor(self) -> bool:
        """Whether evaluation at the end of this iteration looks at the anchor, see :meth:`anchor_in_model`."""
        return (self.pier_config.overlap > 0 or self.pier_config.fragments > 1) and not self.is_synchronised

    def begin_iteration(self, iteration: int) -> None:
        """Sets the clock and the averaging domain of the gradients, before the first micro-batch.

        The clock is Megatron's: it counts steps that were skipped for inf or nan too, so all groups agree on it without
        talking.

        Args:
            iteration: The iteration that begins, 1-based.
        """
        if not self._outer_state_is_known:
            # Weights that came from elsewhere came after the optimizer was built.
            self.reset_outer_state()
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
            # Where all groups hold the same parameters they have just met: nobody waits.
            self.reports.write_arrived(waits=self.is_synchronised)
        elif self.pier_config.is_momentum_warmup(self.iteration):
            with self._phase("momentum_warmup"):
                momentum_warmup(self._stagings, self.pier_config.momentum_at(self.iteration))
        elif self.iteration == self.pier_config.lazy_start:
            self._reset_anchor()
        return result

    def reset_outer_state(self) -> None:
        """Takes the present parameters for the anchor, without any momentum."""
        self._reset_anchor()
        for state in self.outer_states:
            state.momentum.zero_()
        self.outer_state_is_known()

    def outer_state_is_known(self) -> None:
        """Says that the outer state fits the parameters: a first iteration does not begin by resetting it."""
        self._outer_state_is_known = True

    def stores(self) -> Iterable[tuple[Any, OuterState, Staging]]:
        """Each member with its outer state."""
        return zip(self.members, self.outer_states, self._stagings, strict=True)

    def settle(self) -> None:
        """Waits for everything that is on its way between the groups, and applies nothing before its time."""
        for underway in self.underway:
            underway.round.settle()
        self.reports.write_arrived(waits=True)

    def resume_round(self, begun: int, verdicts: Sequence[int]) -> OuterRound:
        """Brings a round back that was under way when the run was saved; see :meth:`OuterRound.resume`."""
        config = self.pier_config
        fragments = config.fragments_due(begun)
        mu, eta = config.momentum_at(begun), config.learning_rate_at(begun)
        verdict = verdicts[self.exchange.rank]
        round_ = OuterRound(self._stagings, self.exchange, fragments, mu, eta, verdict, torch.tensor(verdicts))
        self.underway.append(Underway(round_, begun, self._bytes_of(fragments), seconds=0.0))
        return round_

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any) -> dict[Any, Any]:
        """As Megatron's, with what the groups have of their own and what they have in common beyond the model."""
        stock = super().sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
        complete = self.checkpoint.request if is_loading else self.checkpoint.content
        return complete(stock, model_sharded_state_dict, kwargs.get("metadata"))

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        """As Megatron's; takes over what :meth:`sharded_state_dict` has asked for."""
        if ENTRY not in state_dict:
            super().load_state_dict(state_dict)
            return
        self.checkpoint.restore(state_dict)
        commit_main_parameters(self.members)
        self.outer_state_is_known()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Names what happens inside, in profiles and in the error if it fails.

        A peer that has died or hangs shows first in the ranks that wait for it, often as a mere "connection closed".
        """
        with record_function(f"pier::{name}"):
            try:
                yield
            except DivergedError:
                raise
            except RuntimeError as error:
                error.add_note(
                    f"Pier: group {self.exchange.rank} was in phase {name} of the outer step after iteration {self.iteration}, "
                    f"together with the {self.exchange.size - 1} other groups. If the error speaks of a connection or a "
                    "timeout, a rank of another group has died or hangs: its own log says why. The last checkpoint is whole."
                )
                raise

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
        commit_main_parameters(self.members)
        self.stash = stash
        yield
        self.stash = None
        for state, kept in zip(self.outer_states, stash, strict=True):
            for chunk in state.chunks:
                chunk.set_parameters(chunk.of(kept))
        commit_main_parameters(self.members)

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
        self.exchange.bytes_sent = 0
        with self._phase("verdict"):
            round_ = OuterRound(self._stagings, self.exchange, fragments, mu, eta, self._verdict(fragments))
        if config.overlap and self.iteration < config.train_iters:
            with self._phase("begin"):
                round_.begin()
            sent = self.exchange.bytes_sent
            self.underway.append(Underway(round_, self.iteration, sent, time.perf_counter() - begin))
            return
        with self._phase("outer_step"):
            self._check_contributors(round_)
            round_.run()
        self._finish(round_, self.iteration, self.exchange.bytes_sent, begin)

    def _land_rounds(self) -> None:
        """Moves on the rounds that span iterations, at the same iterations on every rank."""
        config = self.pier_config
        for underway in list(self.underway):
            begin = time.perf_counter() - underway.seconds
            age = self.iteration - underway.begun
            is_due = age == config.overlap or self.iteration == config.train_iters
            if is_due or age >= config.overlap // 2:
                with self._phase("advance"):
                    underway.round.advance()
            if is_due:
                with self._phase("finish"):
                    self._check_contributors(underway.round)
                    underway.round.finish()
                self.underway.remove(underway)
                self._finish(underway.round, underway.begun, underway.bytes_sent, begin)
            else:
                underway.seconds = time.perf_counter() - begin

    def _finish(self, round_: OuterRound, begun: int, bytes_sent: int, begin: float) -> None:
        with self._phase("commit"):
            self._replace_inner_state_of_left_out(round_.contributors())
            commit_main_parameters(self.members)
        dist.all_reduce(round_.sums, group=self.get_grad_stats_parallel_group())
        seconds = time.perf_counter() - begin
        self.reports.add(begun, self.exchange.gather(round_.sums), round_.verdicts(), seconds, bytes_sent)

    def _check_contributors(self, round_: OuterRound) -> None:
        if round_.contributors().any():
            return
        raise DivergedError(
            f"After iteration {self.iteration} no group has a pseudo-gradient that can be used ("
            f"{_list_verdicts(round_.verdicts())}): the run has diverged and nothing was synchronised. The last checkpoint is "
            "untouched: restart from it, with a lower learning rate or other data."
        )

    def _verdict(self, fragments: Sequence[int]) -> int:
        """On this group's pseudo-gradient, the same on all its ranks."""
        group = self.get_grad_stats_parallel_group()
        finite = torch.ones((), dtype=torch.int32, device=self.get_loss_scale().device)
        for state in self.outer_states:
            finite *= state.parameters_are_finite()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
        if not finite.item():
            return NOT_FINITE
        if self.outliers is not None:
            square = squared_norm(self._stagings, fragments)
            dist.all_reduce(square, group=group)
            if self.outliers.judge(square.sqrt().item(), fragments[0]):
                return OUTLIER
        return GOOD

    def _bytes_of(self, fragments: Sequence[int]) -> int:
        chunks = (chunk for state in self.outer_states for chunk in state.chunks if chunk.fragment in fragments)
        return sum(self.exchange.bytes_of_sum(chunk.numel, chunk.part.is_tied) for chunk in chunks)

    def _replace_inner_state_of_left_out(self, contributes: Tensor) -> None:
        """Gives groups that were left out the moments of the first one that was not.

        What made the parameters of a group useless is in its moments too, and would make the next ones useless.
        """
        if contributes.all():
            return
        source = int(contributes.int().argmax())
        takes = not contributes[self.exchange.rank]
        for member, state, _ in self.stores():
            for main, _ in state.places():
                for moment in inner_state(member, main).values():
                    received = moment if takes or self.exchange.rank == source else torch.empty_like(moment)
                    dist.broadcast(received, group=self.exchange.process_group, group_src=source)


def _list_verdicts(verdicts: Tensor) -> str:
    words = {NOT_FINITE: "not finite", OUTLIER: "an outlier", GOOD: "good"}
    return ", ".join(f"group {group} {words[verdict]}" for group, verdict in enumerate(verdicts.tolist()))
