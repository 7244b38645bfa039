"""An island that is a launch of its own, a job: it joins others, and may leave them."""

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.authentication import is_loopback
from pier_megatron.exchange.membership import Membership
from pier_megatron.exchange.topology import Topology
from pier_megatron.integration import current, refusals, run_identity
from pier_megatron.integration.samples import samples_of_iteration
from pier_megatron.integration.worlds import Island
from pier_megatron.megatron_api import versions
from pier_megatron.outer import Shards
from pier_megatron.outer.elastic import ElasticMembership

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class ElasticIsland(Island):
    """The only island of its launch."""

    may_leave = True

    def use_own_folders(self, args: argparse.Namespace) -> None:
        """See :meth:`World.use_own_folders`.

        Megatron makes the index of data sets on the first rank while the others wait. Ranks of other jobs do not, and would
        read what is half written.
        """
        super().use_own_folders(args)
        if self.index > 0 and not args.mock_data:
            shared = args.data_cache_path
            args.data_cache_path = str(Path(args.save) / "index" if shared is None else Path(shared) / f"island_{self.index}")

    def membership(
        self, config: PierConfig, topology: Topology, shards: Sequence[Sequence[Shards]], device: torch.device
    ) -> ElasticMembership:
        """See :meth:`World.membership`."""
        assert config.lighthouse is not None
        if topology.ranks_beside(self.rank_in_launch()) < self.world.size() and is_loopback(config.island_address):
            raise PierConfigError(
                f"--pier-island-address {config.island_address}: the {self.world.size()} ranks of this island are on several "
                "nodes, and this address reaches the node only that it is used on. Pass the first node's address, or on each "
                "node its own."
            )
        timeout = datetime.timedelta(seconds=config.island_timeout)
        run = run_identity.in_common(versions.megatron_args(), config, shards, self.world, device)
        address, codec, secret = config.island_address, config.codec, config.secret_file
        membership = Membership(self.index, config.lighthouse, address, self.world, codec, timeout, run, config.groups, secret)
        return ElasticMembership(membership, self.index, 60 * config.island_wait)

    def describe(self, topology: Topology, config: PierConfig) -> list[str]:
        """See :meth:`World.describe`."""
        return [
            f"island {config.island}, at {config.island_address}: this job; whoever else is there is known at "
            f"{config.lighthouse}",
            f"an outer step is retried without silent islands, or after {config.island_timeout} s; too few islands for "
            f"{config.island_wait} min end the job with a save",
        ]

    def join(
        self,
        model: "Sequence[DistributedDataParallel]",
        optimizer: "MegatronOptimizer",
        scheduler: "OptimizerParamScheduler | None",
    ) -> None:
        """See :meth:`World.join`."""
        pier, settings = current.pier_optimizer(), versions.megatron_args()
        assert pier is not None
        loop = pier.loop
        before, stepped = loop.iteration, loop.progress.last_common_step
        loop.join()
        refusals.check_lazy_start(loop.config, loop.iteration)
        if loop.iteration != before:
            settings.iteration = loop.iteration
            passed, size = range(before + 1, loop.iteration + 1), samples_of_iteration()
            skipped = sum(iteration in settings.iterations_to_skip for iteration in passed)
            settings.consumed_train_samples += len(passed) * size
            settings.skipped_train_samples += skipped * size
            if scheduler is not None:
                # As those did who were there: Megatron steps it in iterations that are trained.
                scheduler.step((len(passed) - skipped) * size)
            if self.rank_in_launch() == 0:
                print(f" Pier: island {self.index} joins the others at iteration {loop.iteration}", flush=True)
        if settings.save and loop.iteration == loop.config.train_iters and loop.progress.last_common_step > stepped:
            # The outer step of the last iteration, taken here: nothing follows that would save it.
            save = versions.require("megatron.training.training", "save_checkpoint")
            save(loop.iteration, model, optimizer, scheduler, settings.num_floating_point_operations_so_far)
