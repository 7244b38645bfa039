"""Outer steps by the clock: an island that has trained for long enough rests until the next one, so that others need not wait.

All islands keep counting the same iterations. Those in which one rests are passed as Megatron passes ``--iterations-to-skip``:
their samples are left out, and the one in which the outer step is due is trained.
"""

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.integration.samples import samples_of_iteration
from pier_megatron.megatron_api import versions
from pier_megatron.outer import OuterLoop

if TYPE_CHECKING:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class Clock:
    """Decides when an elastic island rests.

    Attributes:
        begun: Time, of the monotonic clock, at which the first iteration after the last outer step began.
    """

    def __init__(self, loop: OuterLoop, seconds: float, world: dist.ProcessGroup) -> None:
        """Begins with an island that has not trained yet.

        Args:
            loop: Outer loop of the island.
            seconds: Seconds of training after which it rests.
            world: Ranks of the island.
        """
        self._loop, self._seconds, self._world = loop, seconds, world
        self._last_step: int | None = None
        self.begun = 0.0
        self._scheduler: OptimizerParamScheduler | None = None
        self._rests: set[int] = set()

    def begin_iteration(self) -> None:
        """Restarts with the first iteration after an outer step."""
        if self._last_step != self._loop.progress.last_common_step:
            self._last_step, self.begun = self._loop.progress.last_common_step, time.monotonic()

    def end_iteration(self, scheduler: "OptimizerParamScheduler") -> None:
        """Has Megatron pass the remainder of the interval if the time is up; called by all ranks of the island.

        Args:
            scheduler: Learning-rate scheduler, which advances as in islands that do not rest.
        """
        settings, iteration, config = versions.megatron_args(), self._loop.iteration, self._loop.config
        next_step = min(iteration + -iteration % config.sync_interval, config.train_iters)
        left = [later for later in range(iteration + 1, next_step) if later not in settings.iterations_to_skip]
        if not left:
            return
        # By the ranks together: their clocks differ.
        is_late = torch.tensor([time.monotonic() - self.begun >= self._seconds], dtype=torch.int32, device=self._loop.device)
        dist.all_reduce(is_late, dist.ReduceOp.MAX, group=self._world)
        if not is_late.item():
            return
        settings.iterations_to_skip += left
        self._scheduler = scheduler
        self._rests.update(left)
        if self._world.rank() == 0:
            print(
                f" Pier: island {config.island} has trained for {self._seconds:g} s after iteration {iteration}: it rests for "
                f"{len(left)} iterations, until the outer step after iteration {next_step}",
                flush=True,
            )

    def rest(self) -> None:
        """Lets the learning rate continue in an iteration that Megatron skips because the island rests."""
        iteration = self._loop.iteration
        if iteration not in self._rests:
            return
        assert self._scheduler is not None
        settings = versions.megatron_args()
        self._rests.remove(iteration)
        settings.iterations_to_skip.remove(iteration)
        self._scheduler.step(increment=samples_of_iteration())
