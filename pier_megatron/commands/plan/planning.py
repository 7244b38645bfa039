"""Makes a plan: from a launch command and a cluster to plain values."""

import argparse
import dataclasses
from collections.abc import Collection
from pathlib import Path

from pier_megatron import features
from pier_megatron.commands import job_arguments, planned_sizes
from pier_megatron.commands.findings import Findings
from pier_megatron.commands.launch_command import LaunchCommand
from pier_megatron.commands.plan import fit, measured, verdict, ways
from pier_megatron.commands.plan.cluster import Cluster
from pier_megatron.commands.plan.model import Job, Plan, predict
from pier_megatron.commands.script_sources import ScriptSources
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.integration.arguments import config_from_args
from pier_megatron.megatron_api.args import uses_pier


def make_plan(
    command: LaunchCommand, cluster: Cluster, is_given: bool = False, log: Path | None = None, before: Collection[str] = ()
) -> Plan:
    """Plans a job; needs no GPU.

    ``is_given`` says that the cluster's TFLOP/s are the job's own, ``log`` is the output of a run of it, on fewer GPUs or
    iterations if need be, and ``before`` are the planner's own flags, which belong before the job.

    Returns:
        Plain values: a verdict, the ways to train, memory in bytes, times in seconds, what was assumed.

    Raises:
        PierConfigError: If the job would not start, its size cannot be seen, it has sites, or the log says nothing of it.
    """
    args, warnings = _arguments(command, before)
    config, job = config_from_args(args) if uses_pier(args) else None, Job.of(args)
    if config is not None and config.sites is not None:
        raise PierConfigError(
            f"--pier-sites {config.sites}: pier-megatron plan does not count averages inside sites. Plan with --pier-groups "
            f"{config.sites} instead of --pier-sites and --pier-site-interval: the links between sites carry the same."
        )
    source = "given" if is_given else "not measured: give --tflops, or --log of a short run"
    if log is not None and not is_given:
        cluster = dataclasses.replace(cluster, flops=measured.operations_per_second(log, args, job, cluster))
        is_given, source = True, f"measured in {log}"
    memory = fit.memory_of(args, config)
    needed = fit.needed(memory, args)
    fix = fit.remedy(args, config, cluster.memory) if needed > cluster.memory else None
    if config is None:
        rows = {ways.SYNCHRONOUS: _stock_row(args, job, cluster)}
    else:
        rows = ways.rows(args, config, job, cluster, is_given, fix)
    if needed > cluster.memory:
        fixed = rows.get(fix.flags) if fix is not None and job.groups > 1 else None
        answer = verdict.does_not_fit(needed, cluster.memory, fix, None if fixed is None else fixed.gain)
    elif config is None:
        answer = "Stock optimizer: every iteration is synchronous. With --optimizer pier plan says what groups gain."
    else:
        answer = verdict.of_rows(rows, config.groups, is_given)
    return {
        "verdict": answer,
        "rows": {name: dataclasses.asdict(row) for name, row in rows.items()},
        "gpus": job.gpus,
        "parameters per rank": job.shard,
        "memory": memory,
        "memory needed": needed,
        "memory of a GPU": cluster.memory,
        "fits": needed <= cluster.memory,
        "tflops": {"per GPU": cluster.flops / 1e12, "source": source, "measured": is_given},
        "iterations": args.train_iters,
        "prediction": dataclasses.asdict(predict(job, cluster)),
        "assumed": warnings + _assumed(args, config, job, cluster, source, rows),
    } | ({} if config is None else _of_groups(args, config, job, cluster))


def _arguments(command: LaunchCommand, before: Collection[str]) -> tuple[argparse.Namespace, list[str]]:
    """Megatron's arguments of a job, and warnings of its command line."""
    command.find_megatron()
    findings, sources = Findings(), ScriptSources.of(command)
    job_arguments.look_at_plugin(command, sources, findings)
    args = job_arguments.read(command, sources, findings, before)
    if args is None or findings.errors:
        raise PierConfigError(*findings.errors or findings.warnings)
    return args, findings.warnings + job_arguments.assume_vocabulary(args)


def _assumed(
    args: argparse.Namespace,
    config: PierConfig | None,
    job: Job,
    cluster: Cluster,
    source: str,
    rows: dict[str, ways.Row],
) -> list[str]:
    """What figures rest on, and what they leave out, one sentence each."""
    sites = cluster.sites(job.gpus)
    between = f"a site {cluster.site_rate / 1e9:.3g} GB/s to others, " if sites > 1 else ""
    links = " by data sheets: give --node-bandwidth as measured" if cluster.is_of_data_sheets else ""
    found = [
        f"{cluster.flops / 1e12:.3g} TFLOP/s per GPU, {source}",
        f"{between}a node sends {cluster.node_rate / 1e9:.3g} GB/s to others{links}",
    ]
    if not ways.is_hidden(args) and job.replicas > 1:
        own = rows.get(ways.OWN)
        then = "" if own is None else f"; with them in all rows this job is {own.gain_with_flags:.2f} x as fast"
        found.append(f"no gradients hidden behind compute: no --overlap-grad-reduce, --overlap-param-gather{then}")
    if args.recompute_granularity == "full":
        found.append("activations, which the job recomputes, are not counted")
    used = [name for name, value in features.settings(args).items() if value]
    found += [f"what {', '.join(used)} changes in time is not counted"] if used else []
    if config is not None:
        found.append(f"{config.lazy_start / config.train_iters:.0%} of the run is synchronous (lazy start)")
        found.append("the loss is not predicted: docs/should-i-use-it.md")
    return found


def _stock_row(args: argparse.Namespace, job: Job, cluster: Cluster) -> ways.Row:
    """What a job without an outer loop takes."""
    prediction, hidden = predict(job, cluster), ways.is_hidden(args)
    # Shards of one optimizer are reduced and gathered once, as inside a group; whole gradients are reduced everywhere.
    shared = prediction.local if hidden else prediction.compute + prediction.inner
    return ways.synchronous_row(shared if job.is_shared_out else prediction.of_synchronous(hidden), args.train_iters)


def _of_groups(args: argparse.Namespace, config: PierConfig, job: Job, cluster: Cluster) -> Plan:
    """What an outer loop takes, and how the job depends on its link."""
    return {
        "groups": config.groups,
        "interval": config.sync_interval,
        "bytes between groups per outer step and rank": 8 * (config.groups - 1) / config.groups * job.owned,
        "sites": cluster.sites(job.gpus),
        "link": cluster.site_bandwidth if cluster.sites(job.gpus) > 1 else cluster.node_bandwidth,
        "over the link's rate": ways.over_rates(args, job, cluster, config),
        "taken by the outer loop": planned_sizes.lines_of_outer_loop(args, config),
    }
