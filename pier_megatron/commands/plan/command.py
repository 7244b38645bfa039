"""``pier-megatron plan``: what a job will cost and win on a cluster, from its launch command alone."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from pier_megatron.commands.launch_command import LaunchCommand, add_command_argument
from pier_megatron.commands.plan import compression, loss, stock
from pier_megatron.commands.plan.model import CLUSTERS, Cluster, Job, Prediction, predict
from pier_megatron.commands.plan.skipping import describe_skipping, predict_skipping
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.values import Number, existing_folder, file_to_write, positive

_INTERVALS = (10, 50, 200, 500)

# Below this gain over synchronous training nobody should take on another optimizer.
_WORTH = 1.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own flags."""
    parser.add_argument("--cluster", choices=list(CLUSTERS), required=True, help="where the job runs")
    parser.add_argument(
        "--node-bandwidth", type=positive(1e6), metavar="GB/S", help="what a node sends in an all-reduce, if measured"
    )
    parser.add_argument(
        "--latency", type=Number(float, 0, 1e6), metavar="MS", help="of a message between groups, if they are far apart"
    )
    parser.add_argument("--tflops", type=positive(1e6), help="what a GPU achieves on this model, if measured on one group")
    parser.add_argument(
        "--log", type=existing_folder, metavar="DIR", help="TensorBoard folder of such a run with Pier: what groups cost"
    )
    parser.add_argument(
        "--plot",
        type=file_to_write,
        metavar="PNG",
        help="draw the mean iteration over the number of GPUs, too (--optimizer pier)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_command_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the plan; returns the exit status."""
    plan = make_plan(LaunchCommand.parse(options.command), _cluster(options), options.tflops, options.log)
    if options.plot and "scaling" not in plan:
        raise PierConfigError(f"--plot {options.plot} draws what groups win: it needs a job with --optimizer pier.")
    if options.plot:
        draw_scaling(plan["scaling"], options.plot)
    print(json.dumps(plan, indent=2) if options.json else "\n".join(_text(plan)))
    return 0


def _cluster(options: argparse.Namespace) -> Cluster:
    cluster = CLUSTERS[options.cluster]
    if options.node_bandwidth is not None:
        cluster = dataclasses.replace(cluster, node_bandwidth=options.node_bandwidth * 1e9)
    if options.latency is not None:
        cluster = dataclasses.replace(cluster, latency=options.latency / 1e3)
    return cluster


def make_plan(command: LaunchCommand, cluster: Cluster, tflops: float | None = None, log: Path | None = None) -> dict[str, Any]:
    """Plans a job with ``--optimizer pier``, or with a flag inside a group; needs no GPU.

    Args:
        command: Its launch command.
        cluster: Where it runs.
        tflops: What a GPU achieves on this model, in 1e12 operations per second; None for the cluster's figure.
        log: Folder of the log of a run of the job that has begun, on fewer iterations if need be.

    Returns:
        Plain values: the job, memory in bytes, times in seconds, a verdict.

    Raises:
        PierConfigError: If the job would not start or its size cannot be seen.
    """
    from pier_megatron.integration import planned_job

    found = command.planned_job()
    args, config, job = found.args, found.config, sizes_of(found.args)
    flops = None if tflops is None else tflops * 1e12
    if config is None:
        if log is not None:
            raise PierConfigError(f"--log {log} says what groups lose: it needs a job with --optimizer pier.")
        return stock.make_plan(args, job, cluster, flops)
    prediction = predict(job, cluster, flops)
    expected = loss.expected_shares(None if log is None else loss.read(log), config, args.global_batch_size)
    return {
        "groups": config.groups,
        "gpus": job.gpus,
        "parameters per rank": job.shard,
        "calibrated": cluster.is_calibrated,
        "memory": planned_job.memory(args) | outer_memory(config, job.owned),
        "memory of a GPU": cluster.memory,
        "prediction": dataclasses.asdict(prediction),
        "bytes between groups per outer step and rank": 8 * (config.groups - 1) / config.groups * job.owned,
        "bytes in pairs per outer step and rank": 4 * job.owned if config.groups > 1 else 0.0,
        "break-even interval": prediction.break_even_interval(),
        "compression": [dataclasses.asdict(saving) for saving in compression.savings(job, cluster, prediction.compute)],
        "modes": _modes(prediction, config),
        "scaling": _scaling(job, args.global_batch_size, cluster, config, flops),
        "skipping": predict_skipping(args, job, cluster, flops),
        "iterations": args.train_iters,
        "loss": expected,
        "verdict": _verdict(prediction, config, job),
    }


def sizes_of(args: argparse.Namespace) -> Job:
    """Sizes of a job, from Megatron's arguments.

    Raises:
        PierConfigError: If the vocabulary's size is unknown.
    """
    from pier_megatron.integration import planned_job
    from pier_megatron.integration.inner.requirements import are_shared_out

    flops, shard = planned_job.operations(args), planned_job.parameters_of_largest_shard(args)
    if flops is None or shard is None:
        raise PierConfigError("the vocabulary's size comes from the tokenizer, which is not loaded here: add --vocab-size.")
    return Job(
        flops=flops,
        shard=shard,
        gpus=args.world_size,
        tensor_parallel=args.tensor_model_parallel_size,
        replicas=args.data_parallel_size * args.context_parallel_size,
        groups=args.pier_groups or 1,
        sent_between_stages=planned_job.elements_between_stages(args),
        is_shared_out=are_shared_out(args),
    )


def outer_memory(config: PierConfig, owned: float) -> dict[str, float]:
    """What Pier takes of a GPU's memory, in bytes, for so many owned parameters."""
    from pier_megatron.outer.memory import bytes_per_parameter, work_bytes

    in_fragment = owned / config.fragments
    chunk = math.ceil(min(config.chunk_numel_on("cuda"), in_fragment))
    in_fragments = [math.ceil(in_fragment / chunk)] * config.fragments
    work = {"chunks of an outer step on their way": float(work_bytes(config, chunk, in_fragments))}
    state = {} if config.offload else {"outer state, --pier-offload to move it": bytes_per_parameter(config) * owned}
    return state | work


def _scaling(
    job: Job, global_batch: int, cluster: Cluster, config: PierConfig, flops: float | None
) -> dict[int, dict[str, float]]:
    """Mean iterations of other numbers of groups of the same size on the same global batch, in seconds, by number of GPUs."""
    found = {}
    for factor in (2.0**power for power in range(-10, 11)):
        groups = job.groups * factor
        # More replicas than the batch has sequences would have nothing to train on.
        if groups != int(groups) or job.replicas * factor > global_batch:
            continue
        scaled = dataclasses.replace(job, gpus=int(job.gpus * factor), replicas=int(job.replicas * factor), groups=int(groups))
        prediction = predict(scaled, cluster, flops)
        interval = config.sync_interval
        found[scaled.gpus] = {
            "synchronous": prediction.synchronous,
            "synchronous, overlap flags": prediction.synchronous_hidden,
            f"Pier, H = {interval}, blocking": prediction.mean_iteration(interval),
            f"Pier, H = {interval}, overlapped by H / 2": prediction.mean_iteration(interval, overlap=interval // 2),
            "compute alone": prediction.compute,
        }
    return found


def draw_scaling(scaling: dict[int, dict[str, float]], path: Path) -> None:
    """Draws predicted iteration times over the number of GPUs.

    Args:
        scaling: Seconds by way of training, by number of GPUs.
        path: Of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name in next(iter(scaling.values())):
        style = "--" if name == "compute alone" else "o-"
        axes.plot(list(scaling), [modes[name] for modes in scaling.values()], style, markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="GPUs, global batch unchanged", ylabel="mean iteration, seconds (predicted)")
    axes.set_xticks(list(scaling), [str(gpus) for gpus in scaling], minor=False)
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _modes(prediction: Prediction, config: PierConfig) -> dict[str, float]:
    """Mean iteration of a whole run by the way it is trained, in seconds."""
    lazy = config.lazy_start / config.train_iters
    modes = {
        "synchronous": prediction.synchronous,
        "synchronous, overlap flags": prediction.synchronous_hidden,
    }
    for interval in sorted({*_INTERVALS, config.sync_interval}):
        modes[f"DiLoCo from the first iteration, H = {interval}"] = prediction.mean_iteration(interval)
        for name, how in (
            ("blocking", {}),
            ("overlapped by H / 2", {"overlap": interval // 2}),
            ("4 fragments, each overlapped by H / 8", {"overlap": interval // 8, "fragments": 4}),
            ("blocking, int8", {"dtype": "int8"}),
        ):
            local = prediction.mean_iteration(interval, **how)
            modes[f"Pier, H = {interval}, {name}"] = lazy * prediction.synchronous_hidden + (1 - lazy) * local
        in_pairs = prediction.mean_iteration_in_pairs(interval)
        modes[f"NoLoCo, H = {interval}, blocking"] = lazy * prediction.synchronous_hidden + (1 - lazy) * in_pairs
    return modes


def _verdict(prediction: Prediction, config: PierConfig, job: Job) -> str:
    if job.groups == 1:
        return "Do not use it: there is one group, hence nothing to relax."
    blocking = prediction.mean_iteration(config.sync_interval)
    hidden = prediction.mean_iteration(config.sync_interval, overlap=config.sync_interval // 2)
    best, gain = min(blocking, hidden), prediction.synchronous_hidden / min(blocking, hidden)
    how = " with --pier-overlap" if blocking > 1.02 * best else ""
    if gain >= _WORTH:
        return f"Use it{how}: the local phase runs {gain:.2f} x as fast as synchronous training with overlap flags."
    return (
        f"Do not use it: the local phase would run {gain:.2f} x as fast as synchronous training with overlap flags, which hide "
        "nearly all that Pier saves."
    )


def _in_pairs(plan: dict[str, Any]) -> list[str]:
    prediction, groups = plan["prediction"], plan["groups"]
    return [
        f"an outer step in pairs (--pier-preset noloco): {prediction['pairs'] * 1e3:,.0f} ms on the wire in FP32; "
        f"{plan['bytes in pairs per outer step and rank'] / 1e6:,.0f} MB per rank, so that pairs at H / "
        f"{2 * (groups - 1) / groups:.2f} send as much as all groups at H",
        f"latency of an outer step: {prediction['ring_latency'] * 1e3:,.2f} ms around a ring of all groups, "
        f"{prediction['pair_latency'] * 1e3:,.2f} ms in pairs",
    ]


def _of_groups(plan: dict[str, Any]) -> list[str]:
    prediction = plan["prediction"]
    return [
        f"{plan['groups']} groups on {plan['gpus']} GPUs, {plan['parameters per rank'] / 1e9:.2f} G parameters per rank",
        f"an iteration: {prediction['compute'] * 1e3:,.0f} ms of compute, {prediction['inner'] * 1e3:,.0f} ms inside a group",
        f"an outer step: {prediction['exchange']['fp32'] * 1e3:,.0f} ms on the wire in FP32, "
        f"{prediction['exchange']['int8'] * 1e3:,.0f} ms in int8, {prediction['passes'] * 1e3:,.0f} ms of its own; "
        f"{plan['bytes between groups per outer step and rank'] / 1e6:,.0f} MB per rank",
        *(_in_pairs(plan) if plan["groups"] > 1 else ()),
        *compression.table([compression.Saving(**saving) for saving in plan["compression"]]),
        *describe_skipping(plan["skipping"], " of the local phase"),
        f"blocking Pier is faster than synchronous training from H = {plan['break-even interval']:.1f} on",
    ]


def _text(plan: dict[str, Any]) -> list[str]:
    modes, has_groups = plan["modes"], "groups" in plan
    reference = modes["synchronous, overlap flags"]
    needed, there = sum(plan["memory"].values()), plan["memory of a GPU"]
    remedy = "Lower --micro-batch-size or recompute activations" + (", add --pier-offload" if has_groups else "")
    lines = [
        *(_of_groups(plan) if has_groups else stock.describe(plan)),
        *(f"memory per rank: {name}: {size / 1e9:.2f} GB" for name, size in plan["memory"].items()),
        f"memory per rank: {needed / 1e9:.2f} GB together, of {there / 1e9:.0f} GB"
        + ("" if needed <= there else f": does not fit. {remedy}"),
        "",
        f"{'mean iteration of the run':58} {'ms':>9} {'x as fast':>10} {'days':>8} {'GPU-hours':>11}",
    ]
    for name, seconds in modes.items():
        total = seconds * plan["iterations"]
        lines.append(
            f"{name:58} {seconds * 1e3:9,.0f} {reference / seconds:10.2f} {total / 86400:8.2f} "
            f"{total / 3600 * plan['gpus']:11,.0f}"
        )
    if not plan["calibrated"]:
        lines.append("Not calibrated: this cluster's figures follow from data sheets. Give --tflops and --node-bandwidth.")
    return [*lines, "", *(loss.text(plan["loss"], plan["groups"]) if plan.get("loss") else ()), plan["verdict"]]
