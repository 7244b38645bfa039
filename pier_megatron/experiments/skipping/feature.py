"""Micro-batches that skip pipeline stages in training, and evaluation without some of the stages.

SkipPipe (arXiv 2502.19913) in two ways. With a table, a skipped stage passes its input on: schedule and messages remain
Megatron's, so this saves compute but no transfer. With routes (:mod:`routing`), micro-batches go past it to the rank of another
stage, of any replica of the group. A stage learns from the micro-batches that visit it; their gradients are summed and divided
by the number of all micro-batches, as in the paper.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from pier_megatron.errors import PierConfigError
from pier_megatron.experiments.skipping import routing
from pier_megatron.experiments.skipping.pipeline.paths import Paths, most, search, wanted
from pier_megatron.experiments.skipping.pipeline.schedule import Pipeline
from pier_megatron.experiments.skipping.pipeline.simulator import BACKWARD, makespan
from pier_megatron.features import Cost, refuse
from pier_megatron.megatron_api import batches, versions
from pier_megatron.megatron_api.args import flag
from pier_megatron.megatron_api.seam import Seam
from pier_megatron.settings import SEED, setting
from pier_megatron.values import any_path, numbers, share

if TYPE_CHECKING:
    from torch import Tensor, nn

_FSDP = "it gathers and reduces parameters around layers, and expects all of them to run"
_REFUSED = {
    "overlap_moe_expert_parallel_comm": "it runs the layers of two micro-batches in turns, past their block",
    "mtp_num_layers": "stages of multi-token prediction have layers outside the block that would be skipped",
    "hybrid_layer_pattern": "the layers of a hybrid model are in another block than the one that can be skipped",
    "fine_grained_activation_offloading": "it expects every micro-batch in every stage",
    "use_megatron_fsdp": _FSDP,
    "use_torch_fsdp2": _FSDP,
}
"""What does not go through a chunk's own block of layers, for each micro-batch in full, with the reason."""

REFUSED = (*_REFUSED, *routing.REFUSED)
"""All that is refused, by a table or by routes."""

# Below this gain the start says that skipping is hardly worth its loss.
_WORTH = 0.95

# Micro-batches of a table that are printed.
_SHOWN = 96


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of skipping."""

    skip_fraction: float = setting(
        0.0,
        "Fraction of the pairs of a micro-batch and a virtual pipeline stage that training skips. The same table holds in "
        "every step (SkipPipe, arXiv 2502.19913). Trades model quality for time.",
        metavar="SHARE",
        accepts=share("such as 0.25"),
    )
    skip_routes: str | None = setting(
        None,
        "File with the routes of micro-batches past the stages that they skip and through the ranks of other replicas of their "
        "group; replaces --pier-skip-fraction. examples/skip_routes.py writes it. Default: none.",
        metavar="FILE",
        accepts=any_path,
    )
    skip_seed: int = setting(0, "Seed of the random search for that table.", metavar="SEED", accepts=SEED)
    eval_skip: str | None = setting(
        None,
        "Virtual pipeline stages that evaluation skips, such as 1,2,5, numbered from 0 in the order of the layers; never the "
        "first or the last. Default: none.",
        metavar="STAGES",
        accepts=numbers,
    )


def is_skipping(args: argparse.Namespace) -> bool:
    """Whether micro-batches skip stages in training by a table."""
    return bool(getattr(args, "pier_skip_fraction", None))


def is_used(args: argparse.Namespace) -> bool:
    """Whether stages are skipped in training or left out in evaluation."""
    return is_skipping(args) or routing.is_used(args) or getattr(args, "pier_eval_skip", None) is not None


def prepare(args: argparse.Namespace) -> None:
    """Nothing: all checks need what Megatron's validation fills in."""


def check(args: argparse.Namespace) -> None:
    """Refuses models, pipelines and fractions with which nothing can be skipped.

    Raises:
        PierConfigError: With the flag, the arithmetic and a remedy.
    """
    refuse(args, _REFUSED, _flags(args), "they replay the passes of all micro-batches through all stages")
    check_stages(args)
    if routing.is_used(args):
        routing.check(args)
    if is_skipping(args):
        check_micro_batches(args)


def cost(args: argparse.Namespace) -> Cost:
    """Says what activations routes keep; by a table, the last micro-batch of a step is whole and needs what all would."""
    return routing.cost(args) if routing.is_used(args) else Cost()


def seams() -> Sequence[Seam]:
    """What is put around Megatron's setting up of the model, and its choice of a schedule."""
    return (
        Seam("megatron.training.training", "setup_model_and_optimizer", set_up, is_outermost=True),
        Seam("megatron.training.training", "get_forward_backward_func", routing.get_schedule, is_outermost=True),
    )


def set_up[**P, R: tuple["list[nn.Module]", object, object]](
    setup_model_and_optimizer: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Lets micro-batches pass the stages that they skip."""
    result = setup_model_and_optimizer(*args, **kwargs)
    settings = versions.megatron_args()
    if is_used(settings):
        chunks, *_ = result
        make_skippable(chunks, settings)
        if routing.is_used(settings):
            routing.check_copies(settings)
    return result


def make_skippable(chunks: "list[nn.Module]", args: argparse.Namespace) -> None:
    """Gives this rank's inner stages a way past their layers.

    Args:
        chunks: The rank's virtual stages, in order.
        args: Megatron's, validated.

    Raises:
        PierConfigError: If the model is none whose layers are in one block.
    """
    rank = versions.require("megatron.core", "parallel_state").get_pipeline_model_parallel_rank()
    block_of_layers = versions.require("megatron.core.transformer.transformer_block", "TransformerBlock")
    micro_batches = versions.require("megatron.core.num_microbatches_calculator", "get_num_microbatches")
    table = functools.cache(functools.partial(paths, args))
    omitted = omitted_in_evaluation(args)
    for chunk, model in enumerate(versions.require("megatron.core.utils", "unwrap_model")(chunks)):
        block = getattr(model, "decoder", None)
        if not isinstance(block, block_of_layers) or hasattr(model, "encoder"):
            raise PierConfigError(
                f"{_flags(args)} cannot be used with {type(model).__name__}: what can be skipped is "
                "the one TransformerBlock of a model such as GPTModel. Drop them."
            )
        stage = chunk * args.pipeline_model_parallel_size + rank
        if 0 < stage < number_of_stages(args) - 1:
            block.forward = functools.partial(_forward, block, block.forward, stage, micro_batches, table, omitted)


def _forward[**P](
    block: Any,
    forward: "Callable[P, Tensor]",
    stage: int,
    micro_batches: Callable[[], int],
    table: Callable[[int], Paths],
    omitted: Collection[int],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> "Tensor":
    """Runs the layers of a stage, or hands its input on if the micro-batch skips them."""
    if block.training:
        # Megatron's schedules tell layers which micro-batch comes, for the sake of CUDA graphs. A stage may have none to skip.
        is_skipped = any((stage, layer.current_microbatch) in table(micro_batches()).skipped for layer in block.layers[:1])
    else:
        is_skipped = stage in omitted
    # A copy: the schedule empties the output of a stage once it is sent, and refuses views.
    return block.input_tensor.clone() if is_skipped else forward(*args, **kwargs)


def number_of_stages(args: argparse.Namespace) -> int:
    """Virtual stages of the pipeline, those of all ranks together."""
    return int(args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1))


def pipeline(args: argparse.Namespace, micro_batches: int) -> Pipeline:
    """A step of a validated job, in Megatron's order."""
    ranks = args.pipeline_model_parallel_size
    group = micro_batches if getattr(args, "pier_layered", False) else args.microbatch_group_size_per_vp_stage or ranks
    return Pipeline(ranks, args.virtual_pipeline_model_parallel_size or 1, micro_batches, group)


def layers_of_stages(args: argparse.Namespace) -> tuple[float, ...]:
    """Number of layers in each virtual stage of a validated job."""
    config = versions.require("megatron.training.arguments", "core_transformer_config_from_args")(args)
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        count = functools.partial(
            versions.require("megatron.core.transformer.transformer_block", "get_num_layers_to_build"), config
        )
    else:
        count = layout.get_num_layers_to_build
    chunks, ranks = args.virtual_pipeline_model_parallel_size or 1, args.pipeline_model_parallel_size
    return tuple(float(count(vp_stage=chunk, pp_rank=rank)) for chunk in range(chunks) for rank in range(ranks))


def backward_cost(args: argparse.Namespace) -> float:
    """Time of a backward pass in forward passes; full recomputation repeats the forward one."""
    return BACKWARD + (getattr(args, "recompute_granularity", None) == "full")


def paths(args: argparse.Namespace, micro_batches: int) -> Paths:
    """The table of a step; the same on every rank, in every step with as many micro-batches, and after a resume."""
    if not is_skipping(args):
        return Paths(number_of_stages(args), micro_batches, frozenset())
    seed = getattr(args, "pier_skip_seed", None) or 0
    costs = layers_of_stages(args)
    return search(pipeline(args, micro_batches), args.pier_skip_fraction, seed, costs, backward_cost(args))


def share_of_whole_step(args: argparse.Namespace, table: Paths) -> float:
    """Simulated time of a step, as a multiple of a step without skipping.

    Args:
        args: Megatron's, validated.
        table: Stages that each micro-batch of the step visits.
    """
    step, costs, backward = pipeline(args, table.micro_batches), layers_of_stages(args), backward_cost(args)
    return makespan(step, costs, table.skipped, backward) / makespan(step, costs, (), backward)


def omitted_in_evaluation(args: argparse.Namespace) -> frozenset[int]:
    """Stages that evaluation leaves out."""
    given = getattr(args, "pier_eval_skip", None)
    return frozenset() if given is None else frozenset(map(int, given.split(",")))


def check_stages(args: argparse.Namespace) -> None:
    """Refuses a pipeline without inner stages, and evaluation without stages that it has not or cannot miss.

    Raises:
        PierConfigError: With the flag, the arithmetic and a remedy.
    """
    ranks, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    stages = number_of_stages(args)
    if stages < 3:
        raise PierConfigError(
            f"{_flags(args)}: {ranks} pipeline ranks x {chunks} virtual stages = {stages}, but the first and the last stage "
            "are never skipped. Use --pipeline-model-parallel-size 3 or more, or 2 with --num-virtual-stages-per-pipeline-rank."
        )
    wrong = sorted(omitted_in_evaluation(args) - set(range(1, stages - 1)))
    if wrong:
        raise PierConfigError(
            f"--pier-eval-skip {args.pier_eval_skip}: {', '.join(map(str, wrong))} cannot be left out. Of {ranks} pipeline "
            f"ranks x {chunks} virtual stages = {stages} stages, from 0 to {stages - 1}, the first and the last hold the ends "
            f"of the model. Use stages from 1 to {stages - 2}."
        )


def check_micro_batches(args: argparse.Namespace) -> None:
    """Refuses a fraction that the steps of some phase cannot have.

    Raises:
        PierConfigError: With the flag, the arithmetic and a remedy.
    """
    stages, fraction = number_of_stages(args), args.pier_skip_fraction
    for source, _, count in batches.phases_to_come(args):
        pairs, limit = wanted(stages, count, fraction), most(stages, count)
        share = f"--pier-skip-fraction {fraction} of {stages} stages x {count} micro-batches ({source}) = {pairs}"
        if pairs > limit:
            remedy = f"Use {limit / (stages * count):.3f} or less, or more" if limit else "Use more"
            raise PierConfigError(
                f"{share}, but the first and the last stage are whole, and so is the last micro-batch: ({stages} - 2) x "
                f"({count} - 1) = {limit} at most. {remedy} micro-batches or virtual stages."
            )
        if pairs == 0:
            raise PierConfigError(f"{share}: nothing would be skipped. Use {0.5 / (stages * count):.3f} or more, or drop it.")


def describe(args: argparse.Namespace) -> list[str]:
    """Lists the skipped stages and the expected time of a step, line by line."""
    lines = []
    if is_skipping(args):
        counts = list(dict.fromkeys(batches.training_phases(args).values()))
        tables = [paths(args, count) for count in counts]
        for count, table in zip(counts, tables, strict=True):
            lines.append(
                f"Pier skipping: {len(table.skipped)} of {table.stages} x {count} (stages x micro-batches) = "
                f"{table.fraction:.1%} are skipped; predicted: {share_of_whole_step(args, table):.3f} x a whole step"
            )
        lines.append(
            f"  predicted, not measured: passes in Megatron's order, by layers, backward {backward_cost(args):g} x forward,"
            " and no time for messages, for the ends of the model or between steps"
        )
        shown = tables[-1]
        ranks, cut = args.pipeline_model_parallel_size, "..." if counts[-1] > _SHOWN else ""
        lines += [
            f"  stage {stage:{len(str(shown.stages - 1))}} on rank {stage % ranks:{len(str(ranks - 1))}} "
            f"{shown.row(stage)[:_SHOWN]}{cut}"
            for stage in range(shown.stages)
        ]
    if routing.is_used(args):
        lines += routing.describe(args)
    omitted = sorted(omitted_in_evaluation(args))
    if omitted:
        lines.append(
            f"Pier skipping: evaluation leaves out {len(omitted)} of {number_of_stages(args)} stages: "
            f"{', '.join(map(str, omitted))}"
        )
    return lines


def warnings(args: argparse.Namespace) -> list[str]:
    """Says where skipping gains little, one sentence each; nothing if nothing is skipped in training."""
    if not is_skipping(args):
        return []
    share = share_of_whole_step(args, paths(args, max(batches.training_phases(args).values())))
    if share <= _WORTH:
        return []
    return [
        f"--pier-skip-fraction {args.pier_skip_fraction}: a step is predicted to take {share:.3f} x as long as a whole one: "
        "the first and the last stage, which are never skipped, have as much to do as before. Make them smaller "
        "(--num-virtual-stages-per-pipeline-rank, --pipeline-model-parallel-layout), or use more micro-batches than ranks."
    ]


def _flags(args: argparse.Namespace) -> str:
    """The flags that are used, with their values."""
    names = ("pier_skip_fraction", "pier_skip_routes", "pier_eval_skip")
    given = {flag(name): getattr(args, name, None) for name in names}
    return " and ".join(f"{name} {value}" for name, value in given.items() if value)


def look() -> Callable[[], list[str]]:
    """Nothing to tell."""
    return list
