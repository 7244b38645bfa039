"""Makes a plan: from a launch command and a cluster to plain values."""

import argparse
import dataclasses
import math
from collections.abc import Collection
from pathlib import Path

from pier_megatron.commands import job_arguments
from pier_megatron.commands.findings import Findings
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.plan import (
    compression_gain,
    fit,
    loss,
    measured,
    routes,
    sizes,
    stock,
    waiting,
    ways,
)
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, Plan, predict
from pier_megatron.commands.plan.skipping_gain import predict_skipping
from pier_megatron.commands.plan.verdict import gain_of, verdict
from pier_megatron.commands.script_sources import ScriptSources
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.flags import WITH_ANY_OPTIMIZER
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.settings import flag_of


@dataclasses.dataclass(frozen=True)
class Speed:
    """TFLOP/s of a plan.

    Attributes:
        source: Words for where they come from, and how to have better ones.
        is_measured: Whether they are of this job.
    """

    source: str
    is_measured: bool


_ASSUMED = Speed("assumed: measure them with --tflops, or --log of a short run", is_measured=False)
_GIVEN = Speed("from --tflops", is_measured=True)


def make_plan(
    command: LaunchCommand,
    cluster: Cluster,
    is_measured: bool = False,
    log: Path | None = None,
    wanted_routes: routes.Wanted | None = None,
    before: Collection[str] = (),
) -> Plan:
    """Plans a job with ``--optimizer pier``, or with a flag inside a group; needs no GPU.

    Args:
        command: Launch command of the job.
        cluster: Cluster on which it runs.
        is_measured: Whether the cluster's TFLOP/s are of this job.
        log: Output or TensorBoard folder of a run of the job that has begun, on fewer GPUs or iterations if need be.
        wanted_routes: Routes to search, see :mod:`routes`; None for none.
        before: Flags of the planner's own, which belong before the job.

    Returns:
        Plain values: the job, memory in bytes, times in seconds, a verdict.

    Raises:
        PierConfigError: If the job would not start, its size cannot be seen, it has sites, or the log says nothing of it.
    """
    args, warnings = _arguments(command, before)
    from pier_megatron.integration.arguments import config_from_args

    config, job = config_from_args(args) if uses_pier(args) else None, sizes.sizes_of(args)
    if config is not None and config.sites is not None:
        raise PierConfigError(
            f"--pier-sites {config.sites}: pier-megatron plan does not count averages inside sites. Plan with --pier-groups "
            f"{config.sites} in place of --pier-sites and --pier-site-interval: the links between sites carry the same."
        )
    board = loss.read(log) if log is not None and log.is_dir() else None
    run = None if log is None else measured.read(log, board)
    has_noise = board is not None and loss.has_noise(board)
    if run is not None and not run.iterations and not has_noise:
        raise PierConfigError(
            f"--log {log}: neither times of iterations nor noise of pseudo-gradients in it. Give the output of a run, or the "
            "folder of one with --log-timers-to-tensorboard."
        )
    speed = _GIVEN if is_measured else _ASSUMED
    if log is not None and run is not None and run.iterations and not is_measured:
        cluster = dataclasses.replace(cluster, flops=measured.operations_per_second(run, log, args, job, cluster))
        speed = Speed(f"measured in {log}", is_measured=True)
    memory = fit.memory_of(args, config)
    needed = fit.needed(memory, args)
    remedy = fit.remedy(args, config, cluster.memory) if needed > cluster.memory else None
    plan = {
        "gpus": job.gpus,
        "parameters per rank": job.shard,
        "links from data sheets": cluster.is_of_data_sheets,
        "memory": memory,
        "memory needed": needed,
        "memory of a GPU": cluster.memory,
        "fits": needed <= cluster.memory,
        "tflops": {"per GPU": cluster.flops / 1e12, "source": speed.source, "measured": speed.is_measured},
        "iterations": args.train_iters,
        "warnings": warnings,
        "compresses": args.pier_compress is not None,
    } | _routes(args, job, cluster, wanted_routes)
    if config is None:
        line = stock.verdict(needed, cluster, remedy, speed.source)
        return {"verdict": line} | plan | stock.make_plan(args, job, cluster)
    line = verdict(
        job,
        cluster,
        config,
        source=speed.source,
        is_measured=speed.is_measured,
        memory=needed,
        remedy=remedy,
        can_overlap=fit.can_overlap(args, config, cluster.memory),
    )
    try:
        expected = loss.expected_shares(board if has_noise else None, config, args.global_batch_size)
    except PierConfigError as error:
        if run is None or not run.iterations:
            raise
        # The log has said how fast the job is, and that is what it was given for.
        expected = {"why": str(error)}
    return {"verdict": line, "loss": expected} | plan | _of_groups(args, config, job, cluster, speed)


def _arguments(command: LaunchCommand, before: Collection[str]) -> tuple[argparse.Namespace, list[str]]:
    """Megatron's arguments of a job that uses Pier, and warnings of its command line."""
    from pier_megatron.integration.arguments import uses_group_settings

    command.find_megatron()
    findings, sources = Findings(), ScriptSources.of(command)
    job_arguments.look_at_plugin(command, sources, findings)
    args = job_arguments.read(command, sources, findings, before)
    if args is None or findings.errors:
        raise PierConfigError(*findings.errors or findings.warnings)
    if not uses_pier(args) and not uses_group_settings(args):
        flags = ", ".join(flag_of(setting.name) for setting in WITH_ANY_OPTIMIZER)
        raise PierConfigError(f"the job does not use Pier: it has no --optimizer pier, and none of {flags}.")
    return args, findings.warnings + job_arguments.assume_vocabulary(args)


def _routes(args: argparse.Namespace, job: Job, cluster: Cluster, wanted: routes.Wanted | None) -> Plan:
    """Routes that the job shall have, or has."""
    from pier_megatron.features.skipping import routing

    if wanted is not None:
        return {"routes": routes.make(args, job, cluster, wanted)}
    return {"routes": routes.of_job(args, job, cluster)} if routing.is_used(args) else {}


def _of_groups(args: argparse.Namespace, config: PierConfig, job: Job, cluster: Cluster, speed: Speed) -> Plan:
    """What an outer loop makes of the job."""
    from pier_megatron.integration import planned_sizes

    prediction = predict(job, cluster)
    modes, own = ways.modes(prediction, config)
    break_even = prediction.break_even_interval()
    modes |= ways.sites(job, cluster, config)
    return {
        "groups": config.groups,
        "interval": config.sync_interval,
        "gain": dataclasses.asdict(gain_of(ways.of_job(config), job, cluster, config, speed.is_measured)),
        "prediction": dataclasses.asdict(prediction),
        "bytes between groups per outer step and rank": 8 * (config.groups - 1) / config.groups * job.owned,
        "bytes in pairs per outer step and rank": 4 * job.owned if config.groups > 1 else 0.0,
        # JSON has no infinity.
        "break-even interval": None if job.groups == 1 or math.isinf(break_even) else break_even,
        "compression": [dataclasses.asdict(saving) for saving in compression_gain.savings(job, cluster, prediction.compute)],
        "waits": waiting.waits(args, config, prediction, cluster.memory),
        "modes": modes,
        "mode of the job": own,
        "sites": cluster.sites(job.gpus),
        "sweeps": {
            "interval": ways.over_intervals(prediction, config),
            "link": ways.over_rates(job, cluster, config),
            "gpus": ways.over_gpus(job, args.global_batch_size, cluster, config),
        },
        "link": cluster.site_bandwidth if cluster.sites(job.gpus) > 1 else cluster.node_bandwidth,
        "skipping": predict_skipping(args, job, cluster),
        "taken by the outer loop": planned_sizes.lines_of_outer_loop(args, config),
    }
