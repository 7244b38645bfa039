"""An elastic island: a launch of its own, which has one group of the run. It joins others, and may leave them."""

import argparse
import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.authentication import is_loopback
from pier_megatron.exchange.membership import Membership
from pier_megatron.exchange.topology import Topology
from pier_megatron.integration import current, own_world, refusals, run_identity
from pier_megatron.integration.checkpoint.stored_run import folder_of_island
from pier_megatron.integration.samples import samples_of_iteration
from pier_megatron.megatron_api import versions
from pier_megatron.outer import Shards
from pier_megatron.outer.elastic import ElasticMembership

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

type _SetUp = tuple[list[DistributedDataParallel], MegatronOptimizer, OptimizerParamScheduler | None]


def use_own_folders(args: argparse.Namespace) -> None:
    """Changes Megatron's arguments so that islands do not write the same files.

    Megatron makes the index of data sets on the first rank while the others wait. Ranks of other jobs do not, and would read
    what is half written.
    """
    if args.save is not None:
        args.save = str(folder_of_island(Path(args.save), args.pier_island))
    if args.pier_island > 0 and not args.mock_data:
        shared = args.data_cache_path
        args.data_cache_path = f"{args.save}/index" if shared is None else f"{shared}/island_{args.pier_island}"


def membership(
    config: PierConfig, topology: Topology, shards: Sequence[Sequence[Shards]], device: torch.device
) -> ElasticMembership:
    """Makes this island known to the others."""
    assert config.lighthouse is not None
    assert config.island is not None
    world = own_world.ranks()
    if topology.ranks_beside(dist.get_rank()) < world.size() and is_loopback(config.island_address):
        raise PierConfigError(
            f"--pier-island-address {config.island_address}: the {world.size()} ranks of this island are on several "
            "nodes, and this address reaches the node only that it is used on. Pass the first node's address, or on each "
            "node its own."
        )
    timeout = datetime.timedelta(seconds=config.island_timeout)
    # Islands meet behind training too, where Megatron uses its communicators.
    apart = dist.new_group(timeout=own_world.time_out(), backend="gloo", group_desc="PIER_INSIDE_ISLAND")
    assert isinstance(apart, dist.ProcessGroup)
    run = run_identity.in_common(versions.megatron_args(), config, shards, world, device)
    address, codec, secret = config.island_address, config.codec, config.secret_file
    found = Membership(config.island, config.lighthouse, address, apart, codec, timeout, run, config.groups, secret)
    return ElasticMembership(found, config.island, 60 * config.island_wait)


def describe(config: PierConfig) -> list[str]:
    """Lists the islands that this island knows of, line by line."""
    return [
        f"island {config.island}, at {config.island_address}: this job; {config.lighthouse} lists the other islands",
        f"an outer step is retried without silent islands, or after {config.island_timeout} s; too few islands for "
        f"{config.island_wait} min end the job with a save",
    ]


def join[**P](setup_model_and_optimizer: Callable[P, _SetUp], /, *args: P.args, **kwargs: P.kwargs) -> _SetUp:
    """Begins at the iteration of the islands that are already training."""
    model, optimizer, scheduler = setup_model_and_optimizer(*args, **kwargs)
    settings = versions.megatron_args()
    pier = current.pier_optimizer()
    if pier is None or pier.loop.config.lighthouse is None:
        # Without training there is no optimizer, and nothing to join.
        return model, optimizer, scheduler
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
            # The other islands did so too: Megatron steps the scheduler in trained iterations only.
            scheduler.step((len(passed) - skipped) * size)
        if dist.get_rank() == 0:
            print(f" Pier: island {loop.config.island} joins the others at iteration {loop.iteration}", flush=True)
    if settings.save and loop.iteration == loop.config.train_iters and loop.progress.last_common_step > stepped:
        # The outer step of the last iteration, taken here: nothing follows that would save it.
        save = versions.require("megatron.training.training", "save_checkpoint")
        save(loop.iteration, model, optimizer, scheduler, settings.num_floating_point_operations_so_far)
    return model, optimizer, scheduler
