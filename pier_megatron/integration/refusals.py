"""Settings of Megatron with which Pier cannot work, or not as the user would expect: each with its reason and a remedy."""

import argparse
import importlib.util

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError, Problems, division
from pier_megatron.integration.inner.requirements import MOMENTS, keeps_halves, keeps_main_parameters, scaled
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.args import captures_full_iterations, flag
from pier_megatron.settings import Settings
from pier_megatron.values import is_in_object_store

# Flags that cannot work, with the reason, by attribute of Megatron's arguments. An attribute that a release does not have is
# not set; every other value that is neither None, False nor 0 is refused.
_FSDP = "FSDP shards the parameters itself; Pier lays its state over the distributed optimizer's shards"
_REFUSED = {
    "use_megatron_fsdp": _FSDP,
    "use_torch_fsdp2": _FSDP,
    "optimizer_cpu_offload": "it keeps the FP32 main parameters in an optimizer of its own on the host",
    "optimizer_cuda_graph": "the outer step would be captured into the graph and replayed at every iteration",
    "perform_rl_step": "reinforcement learning swaps the parameters outside the optimizer",
    "inprocess_restart": "a restart inside the process keeps process groups of Pier's that are dead, and an iteration that the "
    "outer loop does not know of; let torchrun restart the job (--max-restarts)",
    "data_parallel_random_init": "groups must start from identical weights",
}
# Flags that shard weights, by the sizes that Megatron derives from them.
_WEIGHT_SHARDS = {
    "gtp_weight_remat_size": "tensor_parallel_num_weight_shards",
    "expert_gtp_weight_remat_size": "expert_tensor_parallel_num_weight_shards",
}
# What cannot be used in a lazy start, in which the groups are further instances of the distributed optimizer.
_IN_LAZY_START = {
    "hybrid_context_parallel": "it moves data between the data-parallel ranks of its own group only",
    "moe_expert_rank_capacity_factor": "one group alone would run an iteration again whose gradients all groups average",
    "save_wgrads_interval": "Megatron reduces these gradients over one instance of its distributed optimizer only",
}


def _met(beside: str, *table: tuple[object, str]) -> list[str]:
    """Messages of a table's rows whose condition holds.

    Args:
        beside: What the rows cannot be used with.
        table: Condition; flag as it is typed, a colon, and the reason with a remedy.
    """
    return [f"{why.replace(':', f' cannot be used with {beside}:', 1)}." for holds, why in table if holds]


def refuse_what_cannot_work(args: argparse.Namespace) -> None:
    """Refuses what no value of another flag could mend.

    Raises:
        PierConfigError: With a message for each such flag: the flag and the reason.
    """
    names = ("override_ckpt_iteration", "non_persistent_ckpt_type", "ckpt_convert_format")
    iteration, kind, form = (getattr(args, name, None) for name in names)
    moments = scaled(args, MOMENTS)
    quantised = [flag(name) for name in ("fp8_param_gather", "fp4_param_gather") if getattr(args, name, None)]
    table: list[tuple[object, str]] = [(getattr(args, name, None), f"{flag(name)}: {why}") for name, why in _REFUSED.items()]
    table += [
        (
            iteration is not None,
            f"--override-ckpt-iteration {iteration}: Pier's state is of the iteration that was saved. Start from its weights "
            "with --finetune",
        ),
        (
            kind == "local",
            "--non-persistent-ckpt-type local: local checkpoints do not say what run they are of. Use global",
        ),
        (
            getattr(args, "dist_ckpt_strictness", None) == "raise_all",
            "--dist-ckpt-strictness raise_all: a checkpoint holds more than a run asks for, such as what stock Megatron reads "
            "and the inner state of other groups, and Megatron would refuse to load it. Use raise_unexpected",
        ),
        (
            form not in (None, "torch_dist"),
            f"--ckpt-convert-format {form}: it stores the model of one group with the optimizer state of another. Convert with "
            "--optimizer adam --use-distributed-optimizer, which reads the weights that all groups agree on and the inner "
            "state of group 0",
        ),
        (
            captures_full_iterations(args),
            "--cuda-graph-impl of the full iteration: it captures the gradient collectives, which change when the lazy start "
            "ends. Capture layers instead",
        ),
        (
            moments and not keeps_main_parameters(args),
            f"--fp8-recipe {getattr(args, 'fp8_recipe', None)} with {' and '.join(moments)}: Megatron stores such moments "
            "without their scales. Use bf16 or fp32",
        ),
        (
            keeps_halves(args) and getattr(args, "dist_ckpt_optim_fully_reshardable", False),
            "--dist-ckpt-optim-fully-reshardable with --use-precision-aware-optimizer: Megatron gathers halves of main "
            "parameters as FP32 numbers and cannot read them back. Drop one",
        ),
        (
            keeps_main_parameters(args) and quantised,
            f"{' and '.join(quantised)} with main parameters in FusedAdam: Megatron gives it no part of a quantised parameter "
            "to step. Drop --use-precision-aware-optimizer, or keep main parameters in FP32 (--main-params-dtype fp32, and "
            "--fp8-recipe tensorwise, blockwise or mxfp8)",
        ),
    ]
    is_old = versions.is_between(None, "0.18")
    unfinished = "before 0.19, Megatron does not finish a gather that an outer step forces. Use megatron-core 0.19"
    found = _met("--optimizer pier", *table, *((is_old, f"{name}: {unfinished}") for name in quantised))
    Problems(found).report()


def refuse_for_inner_optimizer(args: argparse.Namespace) -> None:
    """Refuses what the chosen inner optimizer cannot do; of arguments that Megatron has not validated.

    Raises:
        PierConfigError: With a message for each problem.
    """
    inner = args.pier_inner_optimizer
    if inner != "muon":
        return
    problems, is_layer_wise = Problems(), args.use_distributed_optimizer
    with problems.collecting():
        if importlib.util.find_spec("emerging_optimizers") is None:
            raise PierConfigError(
                f"--pier-inner-optimizer {inner} needs the package emerging-optimizers, which is not installed: "
                "pip install 'emerging-optimizers>=0.2', or this plugin with the extra [muon]."
            )
    quantised = [flag(name) for name in ("fp8_param_gather", "fp4_param_gather") if getattr(args, name, None)]
    problems.found += _met(
        f"--pier-inner-optimizer {inner}",
        (args.fp16, f"--fp16: Megatron's {inner} has no loss scaling. Use --bf16"),
        *(
            (True, f"{name}: Megatron quantises only what its distributed optimizer over AdamW gathers. Drop it")
            for name in quantised
        ),
        (
            is_layer_wise and versions.is_between(None, "0.17"),
            "--use-distributed-optimizer: before 0.18, the layer-wise optimizer that it stands for gathers parameters in "
            "another way. Use Megatron 0.18 or newer, or drop it",
        ),
        (
            is_layer_wise and not args.bf16,
            "--use-distributed-optimizer in FP32: Megatron's layer-wise optimizer steps bf16 models only. Add --bf16, or drop "
            "it",
        ),
        (
            is_layer_wise and not getattr(args, "use_layer_wise_param_layout", True),
            "--no-use-layer-wise-param-layout: parameters are gathered from parts of unequal length then, by a call of the "
            "inner step that outer steps do not repeat. Drop it",
        ),
        (
            is_layer_wise and args.expert_model_parallel_size > 1,
            f"--expert-model-parallel-size {args.expert_model_parallel_size} with --use-distributed-optimizer: Megatron's "
            "layer-wise optimizer has no place for the biases of experts, and without them it has not been tried. Drop "
            "--use-distributed-optimizer",
        ),
    )
    problems.report()


def refuse_division_by_none(args: argparse.Namespace) -> None:
    """Refuses a run whose evaluations Megatron cannot count.

    Raises:
        PierConfigError: With the remedy.
    """
    if not args.eval_interval and not (args.skip_train or args.full_validation):
        advice = " with a multiple of --pier-sync-interval" if args.pier else ", such as the length of the run"
        raise PierConfigError(
            f"--eval-interval: {'not given' if args.eval_interval is None else 0}. Megatron divides --train-iters by it when "
            f"it builds the data sets, also with --eval-iters 0. Add --eval-interval{advice}."
        )


def check_sizes_and_intervals(args: argparse.Namespace, config: PierConfig) -> None:
    """Checks that need what Megatron's validation has filled in.

    Raises:
        PierConfigError: With a message for each problem: the flag, the values, the arithmetic and a remedy.
    """
    problems, first = Problems(refused(args, config)), config.save_inner_state == "first" and args.save is not None
    with problems.collecting():
        config.check_data_parallel_size(args.data_parallel_size, args.context_parallel_size)
    if args.num_experts is not None or args.expert_tensor_parallel_size != args.tensor_model_parallel_size:
        with problems.collecting():
            # The world of an elastic island is one group. Megatron divides it so without experts, too.
            check_experts(args, config.groups // config.launches)
    remedy, meetings = ", or use --pier-save-inner-state all", []
    if first:
        meetings = [
            ("--phase-transition-iterations", each) for each in getattr(args, "phase_transition_iterations", None) or ()
        ]
        names = ("save_interval", "non_persistent_save_interval", "exit_interval")
        meetings += [(flag(name), interval) for name in names if (interval := getattr(args, name, None))]
    for given, iteration in meetings:
        with problems.collecting():
            config.check_interval(given, iteration, "saving the first group only", remedy)
    with problems.collecting():
        _check_instances(args, config.groups)
    if config.lazy_start and config.groups > config.launches:
        problems.found += _met(
            f"a lazy start of {config.lazy_start} iterations",
            *(
                (getattr(args, name, None), f"{flag(name)}: {why}. Add --pier-lazy-start-iters 0, or drop it")
                for name, why in _IN_LAZY_START.items()
            ),
            *(
                (
                    getattr(args, size, 1) > 1,
                    f"{flag(shards)} {getattr(args, shards, None)}: Megatron shards weights so in one instance of the "
                    "distributed optimizer only. Add --pier-lazy-start-iters 0, or drop it",
                )
                for size, shards in _WEIGHT_SHARDS.items()
            ),
        )
    problems.report()


def refused(args: argparse.Namespace, config: Settings) -> list[str]:
    """Messages of what does not go together, table by table; of arguments as typed or validated."""
    saves, kind = args.save is not None, getattr(args, "non_persistent_ckpt_type", None)
    first = saves and config.save_inner_state == "first"
    growing = [flag(name) for name in ("rampup_batch_size", "step_batch_size_schedule") if getattr(args, name, None)]
    found = _met(
        "--optimizer pier",
        (
            saves and args.ckpt_format != "torch_dist",
            f"--ckpt-format {args.ckpt_format}: it stores the model of one group with the optimizer state of another. Use "
            "--ckpt-format torch_dist",
        ),
    )
    if (project := getattr(args, "wandb_project", None)) and importlib.util.find_spec("wandb") is None:
        found.append(
            f"--wandb-project {project}: the package wandb is not installed, and Megatron's last rank would end without it. "
            "Install it (pip install wandb), or drop the flag."
        )
    if config.groups > 1:
        clipped = "Megatron clips after its optimizer's step, so that groups differ where an outer step has just united them"
        found += _met("several groups", (getattr(args, "qk_clip", False), f"--qk-clip: {clipped}. Drop it"))
    if config.groups > config.launches:
        asks = "each group would ask for itself, and might end alone. Use --exit-signal-handler"
        found += _met("several groups in a launch", (getattr(args, "adlr_autoresume", False), f"--adlr-autoresume: {asks}"))
        if is_in_object_store(args.save or ""):
            found.append(
                f"--save {args.save} with several groups in a launch: they write into one folder of a file system, where the "
                "first merges their metadata. Save to a folder that all share."
            )
    if first:
        # Of these Megatron says at which sample, not in which iteration.
        lost = (
            "Megatron may save where the batch grows, also between outer steps, and what all groups but the first have learned"
        )
        found += _met(
            "--pier-save-inner-state first",
            *((True, f"{name}: {lost} since would be lost. Save all") for name in growing),
        )
    if config.lighthouse is not None:
        counts = "an island that joins computes the samples of the iterations it missed from a single batch size"
        found += _met(
            "--pier-lighthouse",
            *((True, f"{name}: {counts}. Use a constant --global-batch-size") for name in growing),
            (
                args.full_validation,
                "--full-validation: each island evaluates its share of the samples, and some have one more. Use --eval-iters",
            ),
            (
                kind is not None,
                f"--non-persistent-ckpt-type {kind}: an island looks for its checkpoint among persistent ones. Use "
                "--save-interval",
            ),
            (
                saves and getattr(args, "no_save_optim", False),
                "--no-save-optim: an island knows its folder by its own state there. Drop it",
            ),
            (first, "--pier-save-inner-state first: each island saves a checkpoint of its own. Save all"),
            (
                config.island and args.data_cache_path is None and not saves and not args.mock_data,
                f"--pier-island {config.island} without --save and --data-cache-path: islands that share data would write the "
                "same index of it at the same time. Give one of the two",
            ),
        )
    return found


def check_lazy_start(config: PierConfig, iteration: int) -> None:
    """Refuses a lazy start in an elastic island.

    Args:
        config: Settings of the run.
        iteration: Iteration at which the island begins to train.

    Raises:
        PierConfigError: If that is in the lazy start.
    """
    if config.is_lazy(iteration + 1):
        raise PierConfigError(
            f"--pier-lighthouse at iteration {iteration} of a lazy start of {config.lazy_start}: elastic islands cannot "
            "train synchronously. Run the lazy start in one launch, without --pier-lighthouse, and --load its "
            "checkpoint with --pier-override-checkpoint; or pass --pier-lazy-start-iters 0."
        )


def _check_instances(args: argparse.Namespace, groups: int) -> None:
    instances, ranks = args.num_distributed_optimizer_instances, args.data_parallel_size * args.context_parallel_size // groups
    if ranks % instances:
        raise PierConfigError(
            f"--num-distributed-optimizer-instances {instances} does not divide the {ranks} data-parallel ranks of a group "
            f"({division(ranks, instances)}): it is the number of instances inside each group. Drop it, or use a divisor of "
            f"{ranks}."
        )


def check_experts(args: argparse.Namespace, groups: int) -> None:
    """Checks that groups of ranks have whole replicas of the experts; of validated arguments.

    Raises:
        PierConfigError: With the arithmetic.
    """
    tensor, expert = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    pipeline = args.pipeline_model_parallel_size
    of_replica = tensor * expert * pipeline
    replicas, rest = divmod(args.world_size, of_replica)
    if rest:
        raise PierConfigError(
            f"--expert-model-parallel-size {expert}: the experts of one model replica take ETP {tensor} x EP {expert} x PP "
            f"{pipeline} = {of_replica} ranks, and the world size {args.world_size} is no multiple of it "
            f"({division(args.world_size, of_replica)}). Start {of_replica} ranks or a multiple, or lower "
            "--expert-model-parallel-size or --expert-tensor-parallel-size."
        )
    if replicas % groups:
        raise PierConfigError(
            f"--pier-groups {groups} does not divide the expert-data-parallel size {replicas} (world size "
            f"{args.world_size} / (ETP {tensor} x EP {expert} x PP {pipeline})): every group needs whole replicas of the "
            "experts. Lower --pier-groups, --expert-model-parallel-size or --expert-tensor-parallel-size."
        )
