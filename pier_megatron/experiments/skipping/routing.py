"""Micro-batches that go by routes of their own, past the stages that they skip: what start-up reads, refuses and says."""

import argparse
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.skipping.pipeline.routes import Routes
from pier_megatron.features import Cost, refuse
from pier_megatron.megatron_api import batches, versions
from pier_megatron.megatron_api.args import strings
from pier_megatron.settings import settings_of
from pier_megatron.values import existing_file

if TYPE_CHECKING:
    from torch import nn

_IN_PASSES = "its ranks of several replicas communicate inside each pass, but routes give them different micro-batches"
_UNTRIED = "it has not been tried, and delayed scales are reduced over replicas inside each pass"
REFUSED = {
    "pier_skip_fraction": "the file says what is skipped",
    "pier_layered": "it is another order of the passes",
    "virtual_pipeline_model_parallel_size": "a rank has one stage on a route",
    "fp8": _UNTRIED,
    "fp4": _UNTRIED,
    "variable_seq_lengths": "messages have the shape of a whole sequence",
    "defer_embedding_wgrad_compute": "it counts the passes of Megatron's own order",
    "export_kd_teacher_load": "stages send a teacher's messages too, not only those of the student",
    "moe_paged_stash": "it counts the passes of Megatron's own order",
}
"""Arguments that routes refuse, with the reason; they come on top of those that skipping refuses."""


def is_used(args: argparse.Namespace) -> bool:
    """Whether micro-batches go by routes in training."""
    return getattr(args, "pier_skip_routes", None) is not None


@functools.cache
def read(path: str) -> Routes:
    """Reads routes from a file.

    Raises:
        PierConfigError: If there are none in it.
    """
    try:
        return Routes.of_text(existing_file(path).read_text())
    except (PierConfigError, argparse.ArgumentTypeError, OSError, UnicodeDecodeError) as error:
        raise PierConfigError(f"--pier-skip-routes {path}: {error}. examples/skip_routes.py writes such a file.") from error


def replicas_of_group(args: argparse.Namespace) -> int:
    """Model replicas that train together between outer steps; validated arguments of an elastic island are of the whole run."""
    replicas: int = args.data_parallel_size // settings_of(args).groups
    return replicas


def check_job(args: argparse.Namespace) -> None:
    """Refuses what no routes support.

    Raises:
        PierConfigError: With the flag, the values and a remedy.
    """
    refuse(args, REFUSED, "--pier-skip-routes")
    if args.expert_model_parallel_size > 1:
        raise PierConfigError(
            f"--expert-model-parallel-size {args.expert_model_parallel_size} cannot be used with --pier-skip-routes: "
            f"{_IN_PASSES}. Use 1, or --pier-skip-fraction."
        )
    if args.num_experts and (args.expert_tensor_parallel_size or 1) > args.tensor_model_parallel_size:
        raise PierConfigError(
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} above --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} cannot be used with --pier-skip-routes: {_IN_PASSES}. Use "
            f"{args.tensor_model_parallel_size} or less."
        )
    if "global_aux_loss" in strings(args.moe_router_load_balancing_type):
        raise PierConfigError(
            f"--moe-router-load-balancing-type global_aux_loss cannot be used with --pier-skip-routes: {_IN_PASSES}. Use "
            "aux_loss or seq_aux_loss."
        )


def check(args: argparse.Namespace) -> None:
    """Refuses what does not go with routes, and routes for another job; sets when ranks of several replicas meet.

    Raises:
        PierConfigError: With the flag, the values and a remedy.
    """
    check_job(args)
    routes = read(args.pier_skip_routes)
    given = f"--pier-skip-routes {args.pier_skip_routes}"
    if routes.stages != args.pipeline_model_parallel_size:
        raise PierConfigError(
            f"{given} is for {routes.stages} stages, and --pipeline-model-parallel-size is "
            f"{args.pipeline_model_parallel_size}. Use {routes.stages}, or plan routes for this job."
        )
    if routes.replicas != replicas_of_group(args):
        raise PierConfigError(
            f"{given} is for {routes.replicas} model replicas, and a group has {replicas_of_group(args)} "
            f"({args.data_parallel_size} replicas / {settings_of(args).groups} groups). Plan "
            "routes for this job."
        )
    for source, _, count in batches.phases_to_come(args):
        if count != routes.micro_batches:
            raise PierConfigError(
                f"{given} is for steps of {routes.micro_batches} micro-batches of a replica, and with {source} there are "
                f"{count}. Plan routes for this batch; a batch that ramps up has none."
            )
    # Otherwise ranks of several replicas would meet inside passes, which may wait for each other's: so parameters are gathered
    # before the first pass, and gradients are reduced after the last.
    args.align_param_gather, args.align_grad_reduce = args.overlap_param_gather, args.overlap_grad_reduce


def cost(args: argparse.Namespace) -> Cost:
    """Says of how many micro-batches a rank keeps activations: Megatron's first stage of as many as there are stages."""
    routes = read(args.pier_skip_routes)
    return Cost(activations=max(1.0, routes.held / min(routes.stages, routes.micro_batches)))


def describe(args: argparse.Namespace) -> list[str]:
    """Says what the routes are, line by line."""
    routes = read(args.pier_skip_routes)
    whole = 2 * (routes.stages - 1) * len(routes.paths)
    hosts = f"; planned for the hosts {', '.join(routes.hosts)}, in the order of ranks" if routes.hosts else ""
    return [
        f"Pier skipping: by routes, {routes.fraction:.1%} of {routes.stages} stages x {len(routes.paths)} micro-batches of "
        f"{routes.replicas} replica{'s' * (routes.replicas > 1)} are skipped; {routes.messages} messages in a step, "
        f"{whole} through all stages",
        f"  {routes.swaps} visits of a stage after a later one, {routes.crossings} messages one way to another replica, "
        f"activations of {routes.held} micro-batches at most on a rank{hosts}",
    ]


def get_schedule[**P](
    get_forward_backward_func: Callable[P, Callable[..., object]], /, *args: P.args, **kwargs: P.kwargs
) -> Callable[..., object]:
    """Runs training steps by routes."""
    schedule = get_forward_backward_func(*args, **kwargs)
    given = versions.megatron_args()
    return functools.partial(run, given, schedule) if is_used(given) else schedule


def run(
    args: argparse.Namespace,
    schedule: Callable[..., object],
    /,
    *,
    model: Sequence["nn.Module"],
    num_microbatches: int,
    forward_only: bool = False,
    **kwargs: object,
) -> object:
    """Runs a training step by routes, and an evaluation by Megatron's schedule.

    Args:
        args: Megatron's, validated.
        schedule: Megatron's function.
        model: The rank's stage, alone in its list.
        num_microbatches: Number of micro-batches of this step.
        forward_only: Whether it is an evaluation.
        kwargs: Other arguments of the schedule.
    """
    if forward_only:
        return schedule(model=model, num_microbatches=num_microbatches, forward_only=True, **kwargs)
    from pier_megatron.experiments.skipping import executor

    return executor.run(read(args.pier_skip_routes), model=model, num_microbatches=num_microbatches, **kwargs)


def check_copies(args: argparse.Namespace) -> None:
    """Refuses nodes with different files: they would wait for each other's messages for ever.

    Raises:
        PierConfigError: On every rank, with the ranks that have another file than rank 0.
    """
    import torch.distributed as dist

    own = hashlib.sha256(Path(args.pier_skip_routes).read_bytes()).hexdigest()
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    others = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
    if others:
        raise PierConfigError(
            f"--pier-skip-routes {args.pier_skip_routes}: ranks {', '.join(map(str, others))} have read "
            "another file than rank 0. Give all nodes the same one."
        )
