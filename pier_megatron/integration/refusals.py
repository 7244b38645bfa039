"""Settings of Megatron with which Pier cannot work, or not as the user would expect: each with its reason and a remedy."""

import argparse

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.authentication import is_loopback
from pier_megatron.exchange.topology import NAMED
from pier_megatron.integration.checkpoint.size import INNER_STATE, bytes_per_parameter
from pier_megatron.integration.inner.requirements import are_shared_out
from pier_megatron.megatron_api.args import captures_full_iterations, flag, strings

# What cannot work, with the reason, by attribute of Megatron's arguments. An attribute that a release does not have is not set;
# every other value that is neither None, False nor 0 is refused.
_FSDP = "FSDP shards the parameters itself; Pier lays its state over the distributed optimizer's shards"
_QUANTISED = "parameters are quantised from the main parameters by a step that outer steps do not repeat"
_REFUSED = {
    "use_megatron_fsdp": _FSDP,
    "use_torch_fsdp2": _FSDP,
    "use_precision_aware_optimizer": "it keeps the FP32 main parameters inside Transformer Engine's FusedAdam, where the outer "
    "step cannot reach them",
    "optimizer_cpu_offload": "it keeps the FP32 main parameters in an optimizer of its own on the host",
    "optimizer_cuda_graph": "the outer step would be captured into the graph and replayed at every iteration",
    "fp8_param_gather": f"FP8 {_QUANTISED}",
    "fp4_param_gather": f"FP4 {_QUANTISED}",
    "hybrid_context_parallel": "it moves data between all data-parallel ranks in every iteration, hence across groups",
    "moe_router_enable_expert_bias": "it counts tokens over all groups in every iteration",
    "moe_expert_rank_capacity_factor": "it asks all ranks for overflows in every iteration",
    "dsa_indexer_loss_coeff": "its loss is averaged over all groups in every iteration",
    "ckpt_assume_constant_structure": "what a checkpoint holds depends on the phase and on whether the groups have just met",
    "perform_rl_step": "reinforcement learning swaps the parameters outside the optimizer",
    "data_parallel_random_init": "groups must start from identical weights",
    "save_wgrads_interval": "Megatron reduces these gradients over one optimizer instance only, so they would be wrong",
}


def refuse_what_cannot_work(args: argparse.Namespace) -> None:
    """Refuses what no value of another flag could mend.

    Raises:
        PierConfigError: With the flag and the reason.
    """
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise PierConfigError(f"{flag(name)} cannot be used with --optimizer pier: {reason}.")
    if getattr(args, "override_ckpt_iteration", None) is not None:
        raise PierConfigError(
            f"--override-ckpt-iteration {args.override_ckpt_iteration} cannot be used with --optimizer pier: Pier's state is "
            "of the iteration that was saved. Start from its weights with --finetune."
        )
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        raise PierConfigError(
            "--non-persistent-ckpt-type local cannot be used with --optimizer pier: local checkpoints do not say what run they "
            "are of. Use global, or save persistently (--save-interval) with --pier-islands."
        )
    if getattr(args, "ckpt_convert_format", None) not in (None, "torch_dist"):
        raise PierConfigError(
            f"--ckpt-convert-format {args.ckpt_convert_format} cannot be used with --optimizer pier: it stores the model of "
            "one group with the optimizer state of another. Convert with --optimizer adam --use-distributed-optimizer, which "
            "reads the weights that all groups agree on and the inner state of group 0."
        )
    if args.fp8 and args.fp8_recipe == "delayed":
        raise PierConfigError(
            "--fp8-recipe delayed cannot be used with --optimizer pier: it derives the scales of FP8 from a history of maxima "
            "that each group has for itself, and a checkpoint holds the first group's only. Use --fp8-recipe tensorwise, "
            "blockwise or mxfp8, which keep no history."
        )
    if captures_full_iterations(args):
        raise PierConfigError(
            "CUDA graphs of the full iteration cannot be used with --optimizer pier: they capture the gradient "
            "collectives, which change when the lazy start ends. Capture layers instead."
        )


def refuse_division_by_none(args: argparse.Namespace) -> None:
    """Refuses a run whose evaluations Megatron cannot count.

    Raises:
        PierConfigError: With the remedy.
    """
    if not args.eval_interval and not (args.skip_train or args.full_validation):
        raise PierConfigError(
            f"--eval-interval: {'not given' if args.eval_interval is None else 0}. Megatron divides --train-iters by it when "
            "it builds the data sets, also with --eval-iters 0. Add --eval-interval with a multiple of --pier-sync-interval."
        )


def _refuse_reductions_over_all_groups(args: argparse.Namespace) -> None:
    """Refuses values of flags that make the model itself talk to all groups in every iteration."""
    for balancing in strings(args.moe_router_load_balancing_type):
        if balancing in ("global_aux_loss", "quantile_balancing"):
            raise PierConfigError(
                f"--moe-router-load-balancing-type {balancing} counts tokens over all groups in every iteration. Use aux_loss "
                "or seq_aux_loss."
            )


def check_sizes_and_intervals(args: argparse.Namespace, config: PierConfig) -> None:
    """Checks that need what Megatron's validation has filled in.

    Raises:
        PierConfigError: With the flag, the values, the arithmetic and a remedy.
    """
    _refuse_reductions_over_all_groups(args)
    if config.lighthouse is not None:
        _refuse_in_jobs(args, config)
    if config.islands and args.full_validation:
        raise PierConfigError(
            "--full-validation cannot be used with --pier-islands: islands whose shares of the samples differ by one would "
            "wait for each other. Use --eval-iters."
        )
    if config.islands and getattr(args, "non_persistent_ckpt_type", None) is not None:
        raise PierConfigError(
            f"--non-persistent-ckpt-type {args.non_persistent_ckpt_type} cannot be used with --pier-islands: islands find the "
            "checkpoint that all of them have among persistent ones. Use --save-interval."
        )
    for attribute, name in (("gtp_weight_remat_size", ""), ("expert_gtp_weight_remat_size", "expert_")):
        if config.groups > 1 and not config.islands and getattr(args, attribute, 1) > 1:
            weight_shards = f"{name}tensor_parallel_num_weight_shards"
            raise PierConfigError(
                f"{flag(weight_shards)} {getattr(args, weight_shards)} cannot be used with --pier-groups {config.groups}: "
                "Megatron shards weights so in one instance of the distributed optimizer only, and each group is one. Drop it."
            )
    config.check_data_parallel_size(args.data_parallel_size, args.context_parallel_size)
    if args.num_experts is not None:
        _check_expert_data_parallel_size(args, config.groups)
    if args.save is not None:
        if args.ckpt_format != "torch_dist":
            raise PierConfigError(
                f"--ckpt-format {args.ckpt_format} cannot be used with --optimizer pier: it stores the model of one group "
                "with the optimizer state of another. Use --ckpt-format torch_dist."
            )
        if config.save_inner_state == "first" and config.islands:
            raise PierConfigError(
                "--pier-save-inner-state first cannot be used with --pier-islands: each island saves a checkpoint of its own. "
                "Save all."
            )
        if config.save_inner_state == "first":
            remedy = ", or use --pier-save-inner-state all"
            for name in ("rampup_batch_size", "step_batch_size_schedule"):
                # Of these Megatron says at which sample, not in which iteration.
                if getattr(args, name, None):
                    raise PierConfigError(
                        f"{flag(name)} cannot be used with --pier-save-inner-state first: Megatron may save where the batch "
                        "grows, also between outer steps, and what all groups but the first have learned since would be lost. "
                        "Save all."
                    )
            for iteration in getattr(args, "phase_transition_iterations", None) or ():
                config.check_interval("--phase-transition-iterations", iteration, "saving the first group only", remedy)
            for name in ("save_interval", "non_persistent_save_interval", "exit_interval"):
                if getattr(args, name, None):
                    config.check_interval(flag(name), getattr(args, name), "saving the first group only", remedy)
    if config.groups > 1 and not config.islands and getattr(args, "check_weight_hash_across_dp_replicas_interval", None):
        raise PierConfigError(
            "--check-weight-hash-across-dp-replicas-interval cannot be used with groups that are instances: it compares all "
            "groups, also before the first iteration of a run that resumes, and their weights differ between outer steps. Drop "
            "it, since Pier compares copies inside a group itself, some of them at each outer step; or add --pier-islands: it "
            "then compares each group by itself."
        )
    if getattr(args, "gpu_sniff_test_interval", None):
        # All ranks take part, hence only where the groups meet.
        config.check_interval(
            "--gpu-sniff-test-interval", args.gpu_sniff_test_interval, "the test of GPUs, a meeting of all ranks,"
        )


def _refuse_in_jobs(args: argparse.Namespace, config: PierConfig) -> None:
    """Refuses flags of Megatron that are incompatible with islands that join; Pier's own: :meth:`PierConfig.check_elastic`."""
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(args, name, None):
            raise PierConfigError(
                f"{flag(name)} cannot be used with --pier-lighthouse: an island that joins counts the samples of the "
                "iterations that it was not there for by one batch size. Use a constant --global-batch-size."
            )
    if config.island and args.data_cache_path is None and args.save is None and not args.mock_data:
        raise PierConfigError(
            f"--pier-island {config.island} without --save and --data-cache-path: islands that share data would write the same "
            "index of it at the same time. Give one of the two."
        )


def check_lazy_start(config: PierConfig, iteration: int) -> None:
    """Refuses to begin a lazy start in an island that is a job.

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


def warnings(args: argparse.Namespace, config: PierConfig) -> list[str]:
    """What works, but not as the user may expect, one sentence each; of arguments that have been validated."""
    found = []
    if getattr(args, "pier_waits_for_saves", False):
        found.append(
            "--async-save is turned off by Megatron, because --use-persistent-ckpt-worker is missing: training waits for every "
            "save. Add that flag, with --async-strategy mcore without nvidia-resiliency-ext 0.6, or drop --async-save."
        )
    if config.lighthouse is not None and config.secret_file is None and not is_loopback(config.island_address):
        found.append(
            f"--pier-island-address {config.island_address} without --pier-secret-file: whoever reaches the lighthouse can "
            "join the run, and what it sends is averaged into the model. Make a secret with pier-megatron lighthouse "
            "--new-secret FILE, copy it to all islands and pass --pier-secret-file FILE."
        )
    if config.lighthouse is not None and config.lazy_start and args.load is None:
        found.append(
            f"--pier-lighthouse with a lazy start of {config.lazy_start} iterations and without --load: this job can only join "
            "islands that have it behind them. For the first ones, run it in one launch and --load its checkpoint, or pass "
            "--pier-lazy-start-iters 0."
        )
    if args.data_parallel_size == 1:
        found.append(
            "one model replica (data-parallel size 1): nobody to train apart from, so that outer steps act on this replica "
            "alone and nothing is exchanged. Use more ranks, or less tensor, pipeline or context parallelism."
        )
    elif config.groups == 1:
        replicas = args.data_parallel_size
        found.append(
            f"--pier-groups 1 (by default one per node): all {replicas} model replicas train as one group. Nothing is "
            f"exchanged, and outer steps act on this group alone. Pass --pier-groups {replicas}, or another divisor of "
            f"{replicas}, to train groups apart on one node."
        )
    if config.inner_optimizer != "adam" and not are_shared_out(args):
        replicas = args.data_parallel_size * args.context_parallel_size
        copies = replicas // config.groups
        if copies > 1:
            found.append(
                f"--pier-inner-optimizer {config.inner_optimizer}: each of the {copies} data-parallel ranks of an island "
                f"({replicas} / --pier-groups {config.groups}) steps, keeps and exchanges all parameters of its part of the "
                f"model, where 1 / {copies} of them would do. With --bf16 add --use-distributed-optimizer: Megatron's "
                "layer-wise optimizer shares them out."
            )
    if args.save is not None and config.groups // config.launches > NAMED:
        sizes = bytes_per_parameter(args, config)
        apart = sum(size for name, size in sizes.items() if name.startswith(INNER_STATE))
        if apart:
            found.append(
                f"--save with {config.groups:,} groups: each stores an inner state of its own, {apart:,.0f} of "
                f"{sum(sizes.values()):,.0f} bytes per parameter. --pier-save-inner-state first stores that of group 0 alone, "
                "from which all groups then resume."
            )
    return found + _waits(args, config)


def _waits(args: argparse.Namespace, config: PierConfig) -> list[str]:
    """What makes Megatron wait for the device, hence for an exchange that training should hide."""
    if not config.overlap:
        return []
    found = []
    intervals = {
        "log_interval": "at every log Megatron waits for the device",
        "train_sync_interval": "Megatron waits for the device every so many iterations",
    }
    for name, waits in intervals.items():
        interval = getattr(args, name, None)
        if interval and interval < config.overlap:
            found.append(
                f"{flag(name)} {interval}: {waits}, hence for what is on the wire then. With --pier-overlap {config.overlap} "
                f"that is {-(-config.overlap // interval)} times in each exchange, and so much of it is not hidden. Use "
                f"{flag(name)} {config.overlap} or more."
            )
    if args.timing_log_level > 0:
        found.append(
            f"--timing-log-level {args.timing_log_level}: its timers wait for the device several times in every iteration, "
            f"without barriers too, hence for what is on the wire. With --pier-overlap {config.overlap} next to nothing of an "
            "exchange is hidden. Use --timing-log-level 0."
        )
    return found


def _check_expert_data_parallel_size(args: argparse.Namespace, groups: int) -> None:
    tensor, expert = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    pipeline = args.pipeline_model_parallel_size
    replicas = args.world_size // (tensor * expert * pipeline)
    if replicas % groups:
        raise PierConfigError(
            f"--pier-groups {groups} does not divide the expert-data-parallel size {replicas} (world size "
            f"{args.world_size} / (ETP {tensor} x EP {expert} x PP {pipeline})): every group needs whole replicas of the "
            "experts. Lower --pier-groups or --expert-model-parallel-size."
        )
