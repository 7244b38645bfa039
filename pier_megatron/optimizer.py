"""Megatron's optimizer with an outer step around it."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from torch.profiler import record_function

from pier_megatron.config import PierConfig, PierConfigError
from pier_megatron.integration.gradients import GradientAveraging
from pier_megatron.integration.shards import commit_main_parameters, main_shards
from pier_megatron.metrics import OuterStepReport, SquaredNorms, norms_and_cosines
from pier_megatron.outer import GroupExchange, OuterState, momentum_warmup, nesterov_step


class DivergedError(RuntimeError):
    """No group has finite parameters left: nothing to go on from."""


class PierOptimizer(ChainedOptimizer):
    """Pier (arXiv 2511.17849) over the distributed optimizers that Megatron built.

    A group is a distributed-optimizer instance. Each :meth:`step` is Megatron's own; at sync iterations the groups then
    meet on the FP32 shards that this rank owns.

    Attributes:
        pier_config: The configuration.
        outer_states: Anchor and momentum of each chained optimizer, in its order.
        iteration: The iteration under way, 1-based; between iterations, the last one completed.
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
            report: Called after each outer step, on every rank.
        """
        super().__init__(optimizer.chained_optimizers)
        self.pier_config = config
        self.iteration = 0
        self._members = [member for member in self.chained_optimizers if not member.is_stub_optimizer]
        self.outer_states = [OuterState(*main_shards(member)) for member in self._members]
        self._exchange = exchange
        self._report = report
        self._gradients = GradientAveraging(self.model_chunks, config.groups)

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
            self.reset_anchor()
        self.iteration = iteration
        if self.pier_config.is_lazy(iteration):
            self._gradients.over_all_groups()
        else:
            self._gradients.over_own_group()

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
        if self.pier_config.is_momentum_warmup(self.iteration):
            with record_function("pier::momentum_warmup"):
                for state in self.outer_states:
                    momentum_warmup(state, self.pier_config.momentum_at(self.iteration))
        elif self.iteration == self.pier_config.lazy_start:
            self.reset_anchor()
        elif self.pier_config.is_outer_step(self.iteration):
            with record_function("pier::outer_step"):
                self._outer_step()
        return result

    def reset_anchor(self) -> None:
        """Takes the present parameters for those that all groups agreed on last."""
        for state in self.outer_states:
            state.copy_parameters_to(state.anchor)

    def _outer_step(self) -> None:
        begin = time.perf_counter()
        mu, eta = self.pier_config.momentum_at(self.iteration), self.pier_config.learning_rate_at(self.iteration)
        self._exchange.bytes_sent = 0
        contributes = self._finite_groups()
        contributors = int(contributes.sum())
        if not contributors:
            raise DivergedError(
                f"After iteration {self.iteration} no group has finite parameters: the run has diverged and nothing was "
                "synchronised. Restart from the last checkpoint, with a lower learning rate or other data."
            )
        norms = SquaredNorms(self._device)
        for state in self.outer_states:
            with record_function("pier::exchange_and_update"):
                own, mean = nesterov_step(state, self._exchange, mu, eta, contributors, bool(contributes[self._exchange.rank]))
            norms.add(state, own, mean)
            del own, mean
        with record_function("pier::commit"):
            commit_main_parameters(self._members)
        sums = self._sum_over_group(norms.sums)
        pseudo_gradient, momentum, cosine_min, cosine_mean = norms_and_cosines(self._exchange.gather(sums).cpu(), contributes)
        self._report(
            OuterStepReport(
                iteration=self.iteration,
                pseudo_gradient_norm=pseudo_gradient,
                momentum_norm=momentum,
                cosine_min=cosine_min,
                cosine_mean=cosine_mean,
                mu=mu,
                eta=eta,
                bytes_sent=self._exchange.bytes_sent,
                seconds=time.perf_counter() - begin,
                left_out=tuple((~contributes).nonzero().flatten().tolist()),
            )
        )

    def _finite_groups(self) -> torch.Tensor:
        """Finds the groups whose parameters are all finite; boolean on the CPU, shape ``[groups]``."""
        finite = [state.parameters_are_finite() for state in self.outer_states]
        infinite = (~torch.stack(finite).all()).double()[None] if finite else torch.zeros(1, device=self._device).double()
        return (self._exchange.gather(self._sum_over_group(infinite)) == 0).flatten().cpu()

    def _sum_over_group(self, values: Any) -> Any:
        dist.all_reduce(values, group=self.get_grad_stats_parallel_group())
        return values

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.get_loss_scale().device
        return device
