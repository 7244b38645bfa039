"""Everything of Megatron's that Pier replaces or calls by name, checked as a whole before any of it is touched.

A new release that lacks one of these symbols fails at start-up with the symbol's name. Where two functions are put around the
same one of Megatron's, the later row is around the earlier one and says so.
"""

import functools
import os
from collections.abc import Iterable

from pier_megatron.integration import (
    arguments,
    averaged_losses,
    communication,
    datasets,
    elastic_island,
    evaluation,
    examination,
    layer_wise,
    own_group,
    own_log,
    scoring,
    training,
)
from pier_megatron.integration.checkpoint import files, formats, helpers, hooks
from pier_megatron.integration.inner import torch_adam
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.seam import Needed, Seam, install
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


WITHOUT_PIER = (Seam("megatron.core.datasets.utils", "compile_helpers", datasets.compile_unless_shipped),)
"""What the launcher replaces in every run."""

CORE = (
    Seam(_PARALLEL_STATE, "initialize_model_parallel", own_group.form_groups),
    Seam(_GROUPS, "ProcessGroupCollection.setup_process_groups_for_ddp", own_group.average_inside),
    Seam(_LAYER_WISE, "get_grad_norm_fp32", layer_wise.over_own_group),
    Seam(_LAYER_WISE, "count_zeros_fp32", layer_wise.over_own_group),
    Seam(_LAYER_WISE, "LayerWiseDistributedOptimizer.sharded_state_dict", layer_wise.number_copies),
    Seam("megatron.core.rerun_state_machine", "RerunStateMachine._reduce_any", communication.vote_of_those_who_average),
    Seam("megatron.core.timers", "Timers.__call__", own_log.wait_for_own_group),
    Seam("megatron.core.timers", "dist_all_gather_func", own_log.gather_times_of_own_group),
    Seam(_CHECKPOINTING, "load", files.load_whole_files),
    Seam(f"{_STRATEGIES}.filesystem_async", "get_write_results_queue", helpers.start),
    Seam(f"{_STRATEGIES}.async_utils", "PersistentAsyncCaller.async_loop", helpers.end_with_the_rank),
    Seam(_OPTIMIZER, "DistributedOptimizer.sharded_state_dict", torch_adam.with_state),
    Seam(_OPTIMIZER, "DistributedOptimizer.sharded_param_state_fully_reshardable", formats.counting_padding),
    Seam(_OPTIMIZER, "DistributedOptimizer.load_state_dict", torch_adam.with_counters),
    Seam(_OPTIMIZER, "DistributedOptimizer._set_main_param_and_optimizer_states", torch_adam.with_counter),
)
"""What is replaced in megatron-core, whatever training loop is around it."""

TABLE = (
    # Arguments.
    Seam(_ARGUMENTS, "add_megatron_arguments", arguments.add_flags),
    Seam(_ARGUMENTS, "validate_args", arguments.validate, imported_by=_INITIALIZE),
    # Elastic islands.
    Seam(_TRAINING, "train", elastic_island.count_all_islands),
    Seam(_TRAINING, "build_train_valid_test_data_iterators", elastic_island.read_own_samples),
    Seam(_TRAINING, "setup_model_and_optimizer", elastic_island.join),
    # The loop.
    Seam(_TRAINING, "get_megatron_optimizer", training.build_optimizer),
    Seam(_TRAINING, "get_megatron_muon_optimizer", training.build_optimizer, until="0.17"),
    Seam(_TRAINING, "wrap_model_chunks_with_ddp", own_group.lay_out_inside, since="0.18"),
    Seam(_TRAINING, "train", training.train, over=elastic_island.count_all_islands),
    Seam(_TRAINING, "train_step", training.train_step),
    Seam(_TRAINING, "dummy_train_step", training.skip_iteration),
    Seam(_TRAINING, "evaluate_and_print_results", evaluation.look_at_what_groups_agree_on),
    Seam(_TRAINING, "evaluate", evaluation.evaluate_each),
    Seam(_TRAINING, "training_log", own_log.log_own_group),
    # Collectives between outer steps.
    Seam(_TRAINING, "checkpoint_and_decide_exit", communication.ask_to_exit_when_together),
    Seam(_TRAINING, "maybe_finalize_async_save", communication.ask_for_saves_when_together),
    Seam(_TRAINING, "calc_params_l2_norm", communication.in_the_group),
    # Training scripts import it by name, from here in all releases, once the launcher has put it in place.
    Seam(
        "megatron.training.utils",
        "average_losses_across_data_parallel_group",
        averaged_losses.average_over_those_who_train_together,
    ),
    # Checkpoints.
    Seam("megatron.training.checkpointing", "_build_sharded_state_dict_metadata", hooks.describe_the_run),
    Seam(_TRAINING, "save_checkpoint", hooks.save),
    Seam(_TRAINING, "load_checkpoint", hooks.load),
    Seam(_INITIALIZE, "init_persistent_async_worker", helpers.start),
    *CORE,
)
"""What every run under Pier replaces. Rows of features come after these, in runs that use them."""

EXAMINATION = (
    Seam(_ARGUMENTS, "validate_args", examination.confine, over=arguments.validate, imported_by=_INITIALIZE),
    Seam("megatron.training.ft_integration", "setup", examination.leave_out),
    Seam(_TRAINING, "train_step", examination.look_on, is_outermost=True),
)
"""What ``pier-megatron doctor --start`` replaces besides."""

SCORING = (Seam(_TRAINING, "evaluate", scoring.write_scores, over=evaluation.evaluate_each),)
"""What ``pier-megatron experts score`` replaces besides."""

NEEDED = (
    Needed("megatron.core", "tensor_parallel"),
    Needed(_CHECKPOINTING, "ShardedTensor load_common_state_dict load_content_metadata"),
    Needed(f"{_CHECKPOINTING}.dict_utils", "extract_matching_values nested_values"),
    Needed(f"{_CHECKPOINTING}.mapping", "ShardedBase ShardedObject"),
    Needed(f"{_CHECKPOINTING}.optimizer", "get_param_id_to_sharded_param_map make_sharded_optimizer_tensor"),
    Needed(f"{_CHECKPOINTING}.utils", "add_prefix_for_sharding"),
    Needed("megatron.core.fp8_utils", "is_float8tensor"),
    Needed("megatron.core.fp8_utils", "get_grouped_quantized_members is_grouped_tensor_with_quantized_storage", since="0.19"),
    Needed(
        "megatron.core.num_microbatches_calculator",
        "get_current_running_global_batch_size get_num_microbatches init_num_microbatches_calculator "
        "unset_num_microbatches_calculator update_num_microbatches",
    ),
    Needed(_BUFFERS, "dist_all_gather_func dist_reduce_scatter_func _ParamAndGradBucketGroup.finish_grad_sync"),
    Needed("megatron.core.optimizer", "ChainedOptimizer get_megatron_optimizer"),
    Needed("megatron.core.optimizer.optimizer", "param_group_identifier_keys"),
    Needed("megatron.core.optimizer.optimizer", "SEPARATE_GRAD_NORM_GROUPS", since="0.19"),
    Needed(_LAYER_WISE, "LayerWiseDistributedOptimizer"),
    Needed(
        _PARALLEL_STATE,
        "RankGenerator get_context_parallel_group "
        "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_embedding_group "
        "get_expert_data_parallel_group get_expert_tensor_parallel_group get_inter_distributed_optimizer_instance_group "
        "get_intra_distributed_optimizer_instance_group get_model_parallel_group get_nccl_options "
        "get_pipeline_model_parallel_group get_pipeline_model_parallel_rank get_tensor_and_data_parallel_group "
        "get_tensor_model_parallel_group get_tensor_model_parallel_rank _DATA_PARALLEL_GROUP_WITH_CP "
        "_EXPERT_DATA_PARALLEL_GROUP _MPU_DATA_PARALLEL_RANK "
        "_MPU_DATA_PARALLEL_WORLD_SIZE _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    ),
    Needed(_PARALLEL_STATE, "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", since="0.19"),
    Needed(_PARALLEL_STATE, "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", since="0.19"),
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
    Needed("megatron.training.global_vars", "_GLOBAL_ARGS get_args get_tensorboard_writer get_wandb_writer"),
    Needed(
        "megatron.training.theoretical_memory_usage",
        "compute_activation_memory_without_sp compute_weight_and_optimizer_memory",
    ),
    Needed(_TRAINING, "mpu num_floating_point_operations update_train_iters"),
    Needed("megatron.training.utils", "print_rank_last"),
)
"""What Pier looks up by name while it runs."""


def table() -> tuple[Seam, ...]:
    """All rows that are installed in this process before it parses arguments, in order."""
    examined = EXAMINATION if examination.VARIABLE in os.environ else ()
    scored = SCORING if scoring.VARIABLE in os.environ else ()
    return (*TABLE, *examined, *scored)


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

    A run without ``--optimizer pier`` and without a flag that works with every optimizer trains as before; with PyTorch's own
    Adam it can also load its checkpoints, see :mod:`pier_megatron.integration.inner.torch_adam`, and with
    ``--dist-ckpt-optim-fully-reshardable`` it stores what is behind a padded gradient bucket too. Calling it again does
    nothing.

    Raises:
        UnsupportedMegatronError: If this Megatron lacks something that Pier needs.
    """
    check_needed()
    install(table())
    helpers.end_forks_with_parent()
    end_with_one_message()
