"""Everything of Megatron's that Pier replaces or calls by name, checked as a whole before any of it is touched.

A new release that lacks one of these symbols fails at start-up with the symbol's name. A row is installed in runs that use it,
once their arguments are known.
"""

import argparse
import functools
import os
from collections.abc import Callable, Iterable
from typing import Concatenate

from pier_megatron import features
from pier_megatron.integration import (
    arguments,
    datasets,
    elastic_island,
    evaluation,
    examination,
    own_log,
    own_world,
    samples,
    training,
    votes,
)
from pier_megatron.integration.checkpoint import files, formats, groups_files, helpers, hooks
from pier_megatron.integration.inner import layer_wise, torch_adam
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.megatron_api.seam import Needed, Seam, check_there, install
from pier_megatron.processes import end_with_one_message

_ARGUMENTS = "megatron.training.arguments"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_CHECKPOINTING = "megatron.core.dist_checkpointing"
_GROUPS = "megatron.core.process_groups_config"
_INITIALIZE = "megatron.training.initialize"
_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_PARALLEL_STATE = "megatron.core.parallel_state"
_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_TRAINING = "megatron.training.training"


def validate[**P, R](
    validate_args: Callable[Concatenate[argparse.Namespace, P], R],
    args: argparse.Namespace,
    /,
    *rest: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Checks the arguments of a run, and replaces what it needs replaced."""
    if _is_examined(args):
        examination.confine(args)
    result = arguments.validate(validate_args, args, *rest, **kwargs)
    of_features = [row for feature in features.used(args) for row in feature.seams()]
    install([*used(TABLE, args), *of_features])
    return result


def used(rows: Iterable[Seam], args: argparse.Namespace) -> list[Seam]:
    """Returns the rows that a run with these arguments installs."""
    return [row for row in rows if row.used_by(args)]


def _in_groups(args: argparse.Namespace) -> bool:
    return uses_pier(args) and args.pier_groups > 1


def _in_one_launch(args: argparse.Namespace) -> bool:
    return _in_groups(args) and args.pier_lighthouse is None


def _in_elastic_islands(args: argparse.Namespace) -> bool:
    return uses_pier(args) and args.pier_lighthouse is not None


def _logs_progress(args: argparse.Namespace) -> bool:
    return _in_groups(args) and args.log_progress


def _skips_iterations(args: argparse.Namespace) -> bool:
    return uses_pier(args) and bool(args.iterations_to_skip or args.pier_sync_seconds)


def _saves(args: argparse.Namespace) -> bool:
    return uses_pier(args) and args.save is not None


def _saves_together(args: argparse.Namespace) -> bool:
    return _saves(args) and _in_one_launch(args)


def _loads(args: argparse.Namespace) -> bool:
    return uses_pier(args) and (args.load or getattr(args, "pretrained_checkpoint", None)) is not None


def _saves_behind(args: argparse.Namespace) -> bool:
    return uses_pier(args) and args.async_save


def _is_examined(args: argparse.Namespace) -> bool:
    return examination.VARIABLE in os.environ


def _with_muon(args: argparse.Namespace) -> bool:
    return uses_pier(args) and args.optimizer != "adam"


def _is_layer_wise(args: argparse.Namespace) -> bool:
    return _with_muon(args) and getattr(args, "use_layer_wise_distributed_optimizer", False)


WITHOUT_PIER = (Seam("megatron.core.datasets.utils", "compile_helpers", datasets.compile_unless_shipped),)
"""What the launcher replaces in every run."""

HELPERS = (Seam(f"{_STRATEGIES}.async_utils", "PersistentAsyncCaller.async_loop", helpers.end_with_the_rank),)
"""What is replaced in processes that help a rank save, which never see its arguments."""

BEFORE_ARGUMENTS = (
    Seam(_ARGUMENTS, "add_megatron_arguments", arguments.add_flags),
    Seam(_ARGUMENTS, "validate_args", validate, is_imported=True),
    *HELPERS,
)
"""What is replaced in every run that knows Pier's flags."""

CORE = (
    Seam(
        "megatron.core.rerun_state_machine",
        "RerunStateMachine._reduce_any",
        votes.vote_of_those_who_average,
        used_by=_in_one_launch,
    ),
    Seam(_CHECKPOINTING, "save", groups_files.save_in_one_folder, used_by=_saves_together),
    Seam(_CHECKPOINTING, "load", files.load_whole_files, used_by=_loads),
    Seam(f"{_STRATEGIES}.filesystem_async", "get_write_results_queue", helpers.start, used_by=_saves),
    Seam(
        _OPTIMIZER,
        "DistributedOptimizer.sharded_param_state_fully_reshardable",
        formats.counting_padding,
        used_by=lambda args: _saves(args) or _loads(args),
    ),
    *(
        Seam(_OPTIMIZER, f"DistributedOptimizer.{method}", around, used_by=torch_adam.is_used)
        for method, around in (
            ("sharded_state_dict", torch_adam.with_state),
            ("load_state_dict", torch_adam.with_counters),
            ("_set_main_param_and_optimizer_states", torch_adam.with_counter),
        )
    ),
)
"""What is replaced in megatron-core, whatever training loop is around it."""

TABLE = (
    # The loop.
    Seam(_TRAINING, "get_megatron_optimizer", training.build_optimizer),
    Seam(_TRAINING, "get_megatron_muon_optimizer", training.build_optimizer, used_by=_with_muon, until="0.17"),
    Seam(layer_wise.BUILDERS, "_ddp_wrap", layer_wise.lay_out, used_by=_is_layer_wise, since="0.19"),
    Seam(_TRAINING, "train", training.train, used_by=_in_elastic_islands),
    Seam(_TRAINING, "train_step", training.train_step),
    Seam(_TRAINING, "dummy_train_step", training.skip_iteration, used_by=_skips_iterations),
    Seam(_TRAINING, "evaluate", evaluation.evaluate_each),
    Seam(_TRAINING, "training_log", own_log.log_own_group),
    # The world of a group, and its part of the run.
    Seam(_INITIALIZE, "_initialize_distributed", own_world.form, used_by=_in_groups),
    Seam(_TRAINING, "get_start_time_from_progress_log", own_world.count_ranks_of_group, used_by=_logs_progress, since="0.18"),
    Seam(_TRAINING, "train", samples.count_all_groups, is_outermost=True, used_by=_in_groups),
    Seam(_TRAINING, "build_train_valid_test_data_iterators", samples.read_own_samples, used_by=_in_groups),
    Seam(_TRAINING, "consume_seqlen_stats_in_iteration", votes.estimate_tokens, used_by=_in_groups, since="0.18"),
    Seam(_TRAINING, "checkpoint_and_decide_exit", votes.end_together),
    Seam(_TRAINING, "setup_model_and_optimizer", elastic_island.join, used_by=_in_elastic_islands),
    # Checkpoints.
    Seam("megatron.training.checkpointing", "_build_sharded_state_dict_metadata", hooks.describe_the_run, used_by=_saves),
    Seam(_TRAINING, "save_checkpoint", hooks.save, used_by=_saves),
    Seam(_TRAINING, "load_checkpoint", hooks.load, used_by=_loads),
    Seam(_TRAINING, "maybe_finalize_async_save", groups_files.finalize_when_all_have_saved, used_by=_saves_behind),
    Seam(_INITIALIZE, "init_persistent_async_worker", helpers.start, used_by=_saves_behind),
    *CORE,
    # pier-megatron doctor --start.
    Seam("megatron.training.ft_integration", "setup", examination.leave_out, used_by=_is_examined),
    Seam(_TRAINING, "train_step", examination.look_on, is_outermost=True, used_by=_is_examined),
)
"""What is replaced once the arguments are known. Rows of features come after these, in runs that use them."""

NEEDED = (
    Needed("megatron.core", "tensor_parallel"),
    Needed(_CHECKPOINTING, "ShardedTensor load_common_state_dict load_content_metadata"),
    Needed(f"{_CHECKPOINTING}.dict_utils", "extract_matching_values nested_values"),
    Needed(f"{_CHECKPOINTING}.mapping", "ShardedBase ShardedObject"),
    Needed(f"{_CHECKPOINTING}.optimizer", "get_param_id_to_sharded_param_map make_sharded_optimizer_tensor"),
    Needed(f"{_CHECKPOINTING}.serialization", "save_integrity_manifest", since="0.19"),
    Needed(f"{_CHECKPOINTING}.utils", "add_prefix_for_sharding"),
    Needed("megatron.core.fp8_utils", "is_float8tensor"),
    Needed("megatron.core.fp8_utils", "get_grouped_quantized_members is_grouped_tensor_with_quantized_storage", since="0.19"),
    Needed(
        "megatron.core.num_microbatches_calculator",
        "get_current_running_global_batch_size get_num_microbatches init_num_microbatches_calculator "
        "unset_num_microbatches_calculator update_num_microbatches",
    ),
    Needed(_BUFFERS, "dist_all_gather_func dist_reduce_scatter_func _ParamAndGradBucketGroup.finish_grad_sync"),
    Needed("megatron.core.optimizer", "Adam ChainedOptimizer get_megatron_optimizer"),
    Needed("megatron.core.optimizer.optimizer", "param_group_identifier_keys"),
    Needed(_LAYER_WISE, "LayerWiseDistributedOptimizer"),
    Needed(_LAYER_WISE, "tag_params_for_buffer_routing", since="0.19"),
    Needed(
        _PARALLEL_STATE,
        "get_context_parallel_group get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
        "get_embedding_group get_expert_data_parallel_group get_expert_tensor_parallel_group get_model_parallel_group "
        "get_nccl_options "
        "get_pipeline_model_parallel_group get_pipeline_model_parallel_rank get_tensor_and_data_parallel_group "
        "get_tensor_model_parallel_group get_tensor_model_parallel_rank _DATA_PARALLEL_GROUP _DATA_PARALLEL_GROUP_WITH_CP "
        "_MPU_DATA_PARALLEL_RANK _MPU_DATA_PARALLEL_WORLD_SIZE _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    ),
    Needed(_PARALLEL_STATE, "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", since="0.19"),
    Needed(
        "megatron.core.pipeline_parallel.schedules",
        "backward_step deallocate_output_tensor forward_backward_no_pipelining forward_step get_tensor_shapes",
    ),
    Needed(_GROUPS, "ProcessGroupCollection"),
    Needed("megatron.core.rerun_state_machine", "get_rerun_state_machine"),
    Needed("megatron.core.tensor_parallel", "checkpoint get_cuda_rng_tracker"),
    Needed("megatron.core.tokenizers.utils.build_tokenizer", "vocab_size_with_padding"),
    Needed("megatron.core.transformer.enums", "AttnBackend"),
    Needed("megatron.core.transformer.module", "param_is_not_shared"),
    Needed("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
    Needed("megatron.core.transformer.transformer_block", "TransformerBlock get_num_layers_to_build"),
    Needed("megatron.core.utils", "get_model_config unwrap_model"),
    Needed(_ARGUMENTS, "core_transformer_config_from_args parse_args"),
    Needed("megatron.training.checkpointing", "read_metadata"),
    Needed("megatron.training.global_vars", "_GLOBAL_ARGS get_args get_signal_handler get_tensorboard_writer get_wandb_writer"),
    Needed(
        "megatron.training.theoretical_memory_usage",
        "compute_activation_memory_without_sp compute_weight_and_optimizer_memory",
    ),
    Needed(_TRAINING, "_TRAIN_START_TIME mpu num_floating_point_operations update_train_iters"),
    Needed("megatron.training.utils", "print_rank_last"),
)
"""What Pier looks up by name while it runs."""


def check_needed(rows: Iterable[Needed] = NEEDED) -> None:
    """Looks for everything that Pier looks up by name while it runs.

    Args:
        rows: Symbols to look for.

    Raises:
        UnsupportedMegatronError: If this Megatron lacks something of it.
    """
    for needed in (row for row in rows if row.exist):
        for name in needed.names.split():
            versions.require(needed.module, name)


@functools.cache
def register() -> None:
    """Adds Pier to Megatron's training loop; call it after Megatron can be imported and before it parses arguments.

    A run without ``--optimizer pier`` and without a flag that works with every optimizer trains as before. By flags and with
    PyTorch's own Adam it can also load its checkpoints, see :mod:`pier_megatron.integration.inner.torch_adam`. Calling it
    again does nothing.

    Raises:
        UnsupportedMegatronError: If this Megatron lacks something that Pier needs.
    """
    check_needed()
    check_there(TABLE)
    install(BEFORE_ARGUMENTS)
    helpers.end_forks_with_parent()
    end_with_one_message()
