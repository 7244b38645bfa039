"""Megatron's training loop: where the optimizer is built, where an iteration begins."""

import argparse
import contextlib
import copy
import datetime
import faulthandler
import functools
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.exchange.sites import SiteExchange
from pier_megatron.exchange.topology import Rank, Topology, domain_name, node_name
from pier_megatron.exchange.worlds import Launch
from pier_megatron.integration import cautions, current, elastic_island, nccl_options, own_world, startup
from pier_megatron.integration.all_groups import AllGroups
from pier_megatron.integration.arguments import config_from_args, settle_iterations
from pier_megatron.integration.copies import Copies
from pier_megatron.integration.inner.choice import commit_main_parameters, owners
from pier_megatron.integration.inner.layer_wise import check_laid_out
from pier_megatron.integration.resting import Clock
from pier_megatron.integration.samples import (
    DataIterator,
    check_groups_read_different_samples,
    pass_samples,
    samples_of_iteration,
)
from pier_megatron.megatron_api import log, versions
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.outer import GroupExchange, OuterLoop, OuterStepReport

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from pier_megatron.integration.optimizer import PierOptimizer

_TRAINING = "megatron.training.training"

DESERTED_STATUS = 75
"""Exit status of a job that has saved and ended for lack of other islands; EX_TEMPFAIL of sysexits.h: try again."""


class _DesertedWhileSkippingError(Exception):
    """Too few islands for the outer step of an iteration after which Megatron neither saves nor decides to end."""


def build_optimizer[**P](
    get_megatron_optimizer: "Callable[P, MegatronOptimizer]", /, *args: P.args, **kwargs: P.kwargs
) -> "MegatronOptimizer":
    """Puts Pier around the optimizer that Megatron has built."""
    optimizer = get_megatron_optimizer(*args, **kwargs)
    if not uses_pier(versions.megatron_args()):
        current.set_optimizer(None)
        return optimizer
    # Sample-based runs know their iterations only now. Megatron's own arguments must not know them yet: it would build the
    # learning-rate scheduler by iterations, without the warmup and the decay that are given in samples.
    settled = copy.copy(versions.megatron_args())
    settle_iterations(settled)
    return with_outer_loop(optimizer, versions.given(get_megatron_optimizer, args, kwargs)["model_chunks"], settled)


def with_outer_loop(
    optimizer: "ChainedOptimizer",
    model_chunks: "Sequence[DistributedDataParallel]",
    args: argparse.Namespace,
    words: Callable[[str], str] = str,
) -> "PierOptimizer":
    """Builds the outer loop around the optimizer that Megatron has built; called by all ranks.

    Args:
        optimizer: Megatron's optimizer, which has not stepped.
        model_chunks: Virtual stages of the model on this rank, in order.
        args: Megatron's arguments, with ``train_iters`` set.
        words: Names of flags in what is printed, put into the user's words.
    """
    from pier_megatron.integration.optimizer import PierOptimizer

    config = config_from_args(args)
    check_laid_out(optimizer)
    members = owners(optimizer, model_chunks)
    shards = [member.main_parameters() for member in members]
    numels = [sum(tensor.numel() for alike in of_member for tensor in alike.tensors) for of_member in shards]
    device = optimizer.get_loss_scale().device
    # Looked at before all ranks meet: none has taken its share then.
    available = psutil.virtual_memory().available
    is_elastic = config.lighthouse is not None
    if is_elastic:
        elastic_island.use_own_folders(versions.megatron_args())
    startup.check_folder("--save", versions.megatron_args().save)
    launch, timeout = own_world.launch(), own_world.time_out()
    between = functools.partial(nccl_options.options, args, nccl_options.BETWEEN_GROUPS, timeout)
    exchange = GroupExchange(launch.connect("BETWEEN_GROUPS", timeout, between()), config.codec)
    topology = Topology.gather(_own_rank(config), exchange.process_group)
    topology.check()
    beside = topology.ranks_beside(launch.rank)
    startup.check_host_memory(config, numels, beside, available, is_pinned=device.type == "cuda")
    sites = None
    if config.sites is not None:
        sites = SiteExchange(exchange, *site_communicators(launch, config, args, timeout))
    everyone = AllGroups(launch, model_chunks[0], timeout) if launch.groups > 1 else None
    gradients = launch.connect("GRADIENTS", timeout, between()) if config.lazy_start else None
    membership = elastic_island.membership(config, topology, shards, device) if is_elastic else None
    copies = Copies(members, model_chunks, device)
    owner_of = {id(main): member for member in members for _, main in member.parameters()}

    def commit() -> None:
        commit_main_parameters(members, model_chunks)
        copies.compare(loop.iteration)

    loop = OuterLoop(
        shards,
        config,
        exchange,
        group=own_world.ranks(),
        device=device,
        inner_state=lambda main: owner_of[id(main)].state_of(main),
        store_inner_state=lambda main, tensors: owner_of[id(main)].store(main, tensors),
        on_change=commit,
        report=_report,
        islands=membership,
        sites=sites,
    )
    startup.check_groups_agree(loop)
    clock = None if config.sync_seconds is None else Clock(loop, config.sync_seconds, own_world.ranks())
    pier = PierOptimizer(optimizer, model_chunks, loop, copies, clock, everyone, gradients)
    # NCCL's watchdog ends a process whose peers have died by an abort, which no handler of exceptions sees.
    faulthandler.enable()
    if config.overlap:
        for chunk in pier.model_chunks:
            # Megatron would wait for the device, hence for the exchange, at each transfer between pipeline stages. It guards
            # against a race that PyTorch fixed long before the supported releases.
            versions.require("megatron.core.utils", "get_model_config")(chunk).batch_p2p_sync = False
    if dist.get_rank() == 0:
        who = elastic_island.describe(config) if is_elastic else topology.describe()
        who += [_at_a_signal(args, config), *_logged(config)]
        print(words(startup.describe(who, topology, loop, cautions.warnings(args, config))), flush=True)
    loop.rehearse()
    current.set_optimizer(pier)
    return pier


def _logged(config: PierConfig) -> list[str]:
    if config.groups == 1:
        return []
    means = "means over all groups" if config.sites is None else "means over one group of each site"
    logged = means if config.lighthouse is None and config.has_common_anchor else "those of this group"
    return [f"Megatron logs losses and norms of one group in the local phase; outer-step lines log {logged}"]


def _at_a_signal(args: argparse.Namespace, config: PierConfig) -> str:
    lazily = ", in the lazy start at once" if config.lazy_start else ""
    when = "at once" if config.lighthouse is not None else f"at the next multiple of {config.sync_interval}{lazily}"
    if not args.exit_signal_handler:
        needed = "--exit-signal-handler" if args.save is not None else "--exit-signal-handler and --save"
        how = f"With {needed} the job saves at SIGTERM, or at --exit-signal (SIGINT: Ctrl-C), and ends {when}"
        return f"Ctrl-C and SIGTERM lose unsaved work. {how}"
    name = signal.Signals(getattr(args, "exit_signal", signal.SIGTERM)).name
    saves = "saves and" if args.save is not None else "(which saves nothing without --save)"
    said = [f"--exit-signal-handler: at {name} the job {saves} ends {when}"]
    if name != "SIGINT":
        said.append("Ctrl-C loses unsaved work (--exit-signal SIGINT saves at Ctrl-C)")
    if dist.is_torchelastic_launched() and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        said.append("torchrun kills it 30 s after the signal, unless told otherwise (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)")
    return "; ".join(said)


def site_communicators(
    launch: Launch, config: PierConfig, args: argparse.Namespace, timeout: datetime.timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Communicators inside and across sites of the rank's peers."""
    assert config.sites is not None
    size, options = config.groups_in_site, functools.partial(nccl_options.options, args)
    first = launch.group - launch.group % size
    inside = launch.connect("INSIDE_SITES", timeout, options(nccl_options.INSIDE_SITES, timeout), range(first, first + size))
    peers = range(launch.group % size, config.groups, size)
    across = launch.connect("BETWEEN_SITES", timeout, options(nccl_options.BETWEEN_GROUPS, timeout), peers)
    # A site has several groups, and there are several sites.
    assert inside is not None
    assert across is not None
    return inside, across


def _own_rank(config: PierConfig) -> Rank:
    launch, node = own_world.launch(), node_name()
    tensor_parallel = dist.get_process_group_ranks(
        versions.require("megatron.core", "parallel_state").get_tensor_model_parallel_group()
    )[0]
    domain = domain_name(launch.rank, node, config.ranks_per_domain)
    return Rank(launch.rank, node, domain, launch.group, launch.first_of_group + tensor_parallel)


def _report(report: OuterStepReport) -> None:
    optimizer = current.pier_optimizer()
    assert optimizer is not None
    report.write(log.print_last, log.tensorboard(), log.wandb(), optimizer.loop.iteration)


@current.in_pier_runs
def train_step[**P, R: tuple[object, ...]](
    train_step: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Tells the outer loop of the iteration, and averages over all groups or the own one."""
    given = versions.given(train_step, args, kwargs)
    step = functools.partial(train_step, *args, **kwargs)
    return take_step(optimizer, given["iteration"] + 1, given["data_iterator"], given["opt_param_scheduler"], step)


def take_step[R: tuple[object, ...]](
    optimizer: "PierOptimizer",
    iteration: int,
    data_iterator: DataIterator,
    scheduler: "OptimizerParamScheduler",
    step: Callable[[], R],
) -> R:
    """Takes a training step in the phase of its iteration.

    Args:
        optimizer: Optimizer of the run.
        iteration: Iteration that begins, counted from 1.
        data_iterator: Megatron's, one for each model chunk where there are several.
        scheduler: Megatron's of the learning rate.
        step: Megatron's training step.
    """
    if not optimizer.has_seen_samples:
        device = torch.device(torch.cuda.current_device())
        check_groups_read_different_samples(data_iterator, optimizer.loop.exchange, device)
        optimizer.has_seen_samples = True
    loop = optimizer.loop
    optimizer.begin_iteration(iteration)
    # Elastic islands alone have a clock, and no lazy start.
    if optimizer.clock is not None:
        optimizer.clock.begin_iteration()
    with contextlib.nullcontext() if loop.is_local else optimizer.together():
        result = step()
    if optimizer.clock is not None:
        optimizer.clock.end_iteration(scheduler)
    _, _, _, should_exit, exit_code, *_ = result
    if should_exit and (not loop.is_local or loop.exchange.size == 1):
        # Megatron saves what there was before the iteration.
        loop.take_back_iteration()
    elif should_exit:
        raise RuntimeError(
            f"Megatron's rerun state machine ends the run at iteration {iteration} with exit code {exit_code}, "
            "but only in this group: the others train on other parameters and did not see what it saw. They stop at the "
            "next outer step. Restart from the last checkpoint; --rerun-mode disabled does without the check."
        )
    return result


@current.in_pier_runs
def skip_iteration(_: Callable[..., None], optimizer: "PierOptimizer", /, data_iterator: DataIterator) -> None:
    """Does what is due in iterations that Megatron skips (``--iterations-to-skip``), where it does not call ``train_step``."""
    pass_over_iteration(optimizer, data_iterator)
    if optimizer.loop.is_deserted:
        raise _DesertedWhileSkippingError


def pass_over_iteration(optimizer: "PierOptimizer", data_iterator: DataIterator) -> None:
    """Does what is due in an iteration in which nothing is trained, and reads its samples."""
    optimizer.begin_iteration(optimizer.loop.iteration + 1)
    pass_samples(data_iterator)
    if optimizer.clock is not None:
        optimizer.clock.rest()
    optimizer.loop.end_iteration(has_trained=False)


@current.in_pier_runs
def train[**P, R](train: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Lets the job of a deserted island fail, once its state is saved: its run is not at its end."""
    loop, given = optimizer.loop, versions.given(train, args, kwargs)
    try:
        return train(*args, **kwargs)
    except _DesertedWhileSkippingError:
        settings = versions.megatron_args()
        samples = samples_of_iteration()
        settings.consumed_train_samples += samples
        settings.skipped_train_samples += samples
        # This call saves, because the island is marked as deserted.
        versions.require(_TRAINING, "checkpoint_and_decide_exit")(
            given["model"],
            optimizer,
            given["opt_param_scheduler"],
            loop.iteration,
            settings.num_floating_point_operations_so_far,
            given["checkpointing_context"],
            given["train_data_iterator"],
        )
        versions.require(_TRAINING, "maybe_finalize_async_save")(blocking=True, terminate=True)
    except SystemExit as ended:
        if not loop.is_deserted or ended.code:
            raise
    if dist.get_rank() == 0:
        print(
            f" Pier: too few islands for longer than --pier-island-wait {loop.config.island_wait} minutes: the job ends with "
            f"status {DESERTED_STATUS}. Start it again: it takes its outer step once others are there.",
            flush=True,
        )
    raise SystemExit(DESERTED_STATUS)
