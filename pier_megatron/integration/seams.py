"""Everything of Megatron's that Pier replaces or calls by name, checked as a whole before any of it is touched.

A new release that lacks one of these symbols fails at start-up with the symbol's name. Where two functions are put around the
same one of Megatron's, the later row is around the earlier one and says so.
"""

import builtins
import dataclasses
import functools
import importlib
import inspect
import operator
import os
from collections.abc import Callable, Iterable
from typing import Any

from pier_megatron.integration import (
    arguments,
    communication,
    datasets,
    evaluation,
    examination,
    island_world,
    logged_means,
    scoring,
    training,
    versions,
)
from pier_megatron.integration.checkpoint import files, helpers, hooks
from pier_megatron.integration.compression import activations, choice, gradients, parameters, tensor_parallel, traffic
from pier_megatron.integration.inner import torch_adam
from pier_megatron.integration.pipeline import layered, skipping

_ARGUMENTS = "megatron.training.arguments"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_CHECKPOINTING = "megatron.core.dist_checkpointing"
_INITIALIZE = "megatron.training.initialize"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_PARALLEL_STATE = "megatron.core.parallel_state"
_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_TRAINING = "megatron.training.training"
_TRANSFERS = "megatron.core.pipeline_parallel.p2p_communication"


@dataclasses.dataclass(frozen=True)
class Seam:
    """A function that is put around one of Megatron's, where Megatron looks it up by name.

    Attributes:
        module: Full name of a Megatron module.
        name: Name of the function, or of a method as ``RerunStateMachine._reduce_any``.
        around: Function called in its place, with the original and then its arguments. Names of arguments that come before
            those must be positional only. Its docstring says why.
        over: Function that an earlier row has put around the same one; None if there is none.
        releases: Releases that have the function.
        imported_by: Module that imports the function by name in some releases.
        called_by: Function of the module that calls this one, which is one of Python's; replaced where the caller is defined,
            and nowhere else.
    """

    module: str
    name: str
    around: Callable[..., Any]
    over: Callable[..., Any] | None = None
    releases: tuple[str, ...] = ()
    imported_by: str | None = None
    called_by: str | None = None

    @property
    def exists(self) -> bool:
        """Whether this release has the function."""
        return not self.releases or versions.release() in self.releases

    def original(self) -> Any:
        """Returns the function that is there.

        Raises:
            UnsupportedMegatronError: If there is none, or nothing that calls one of Python's.
        """
        module = importlib.import_module(self.module)
        if self.called_by is not None:
            if self.name not in inspect.unwrap(versions.require(self.module, self.called_by)).__code__.co_names:
                raise versions.missing(f"{self.name}() in {self.module}.{self.called_by}")
            return vars(builtins)[self.name]
        found = versions.require(self.module, self.name)
        owner, _, attribute = self.name.rpartition(".")
        if owner and attribute not in vars(operator.attrgetter(owner)(module)):
            raise versions.missing(f"{self.module}.{self.name} itself, not that of a base class")
        return found

    def install(self) -> None:
        """Puts the function in place."""
        original = self.original()

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.around(original, *args, **kwargs)

        if self.called_by is not None:
            inspect.unwrap(versions.require(self.module, self.called_by)).__globals__[self.name] = wrapper
            return
        *path, attribute = self.name.split(".")
        owners = [functools.reduce(getattr, path, importlib.import_module(self.module))]
        if self.imported_by is not None and hasattr(other := importlib.import_module(self.imported_by), attribute):
            owners.append(other)
        for owner in owners:
            setattr(owner, attribute, wrapper)


@dataclasses.dataclass(frozen=True)
class Needed:
    """Symbols that Pier looks up by name while it runs.

    Attributes:
        module: Full name of a Megatron module.
        names: Names in it, separated by spaces.
        releases: Releases that have them; all where it is empty.
    """

    module: str
    names: str
    releases: tuple[str, ...] = ()


WITHOUT_PIER = (Seam("megatron.core.datasets.utils", "compile_helpers", datasets.compile_unless_shipped),)
"""What the launcher replaces in every run."""

TABLE = (
    # Arguments.
    Seam(_ARGUMENTS, "add_megatron_arguments", arguments.add_flags),
    Seam(_ARGUMENTS, "validate_args", arguments.validate, imported_by=_INITIALIZE),
    Seam(_ARGUMENTS, "validate_args", layered.validate, over=arguments.validate, imported_by=_INITIALIZE),
    Seam(_ARGUMENTS, "validate_args", skipping.validate, over=layered.validate, imported_by=_INITIALIZE),
    # It sets one of Pier's own flags, which is checked further in.
    Seam(_ARGUMENTS, "validate_args", choice.validate, over=skipping.validate, imported_by=_INITIALIZE),
    # Islands.
    Seam(_PARALLEL_STATE, "initialize_model_parallel", island_world.form_islands),
    Seam(_PARALLEL_STATE, "destroy_model_parallel", island_world.return_to_the_launch),
    Seam(_TRAINING, "train", island_world.count_all_islands),
    Seam(_TRAINING, "build_train_valid_test_data_iterators", island_world.read_own_samples),
    Seam(_INITIALIZE, "_compile_dependencies", island_world.one_after_the_other),
    Seam("megatron.training.dist_signal_handler", "DistributedSignalHandler.signals_received", island_world.hear_all_islands),
    # All functions that print for the whole job are in the same file, which has moved in 0.18.
    Seam("megatron.training.utils", "print", island_world.print_once, called_by="print_rank_0"),
    # The loop.
    Seam(_TRAINING, "get_megatron_optimizer", training.build_optimizer),
    Seam(_TRAINING, "get_megatron_optimizer", choice.compile_codecs, over=training.build_optimizer),
    Seam(_TRAINING, "get_megatron_muon_optimizer", training.build_optimizer, releases=("0.17",)),
    Seam(_TRAINING, "setup_model_and_optimizer", training.join),
    Seam(_TRAINING, "setup_model_and_optimizer", skipping.set_up, over=training.join),
    Seam(_TRAINING, "train", training.train, over=island_world.count_all_islands),
    Seam(_TRAINING, "train_step", training.train_step),
    Seam(_TRAINING, "dummy_train_step", training.skip_iteration),
    Seam(_TRAINING, "get_forward_backward_func", layered.get_schedule),
    Seam(_TRAINING, "evaluate_and_print_results", evaluation.look_at_what_groups_agree_on),
    Seam(_TRAINING, "evaluate", evaluation.evaluate_each),
    Seam(_TRAINING, "training_log", logged_means.average_over_groups),
    Seam(_TRAINING, "training_log", traffic.log, over=logged_means.average_over_groups),
    # Collectives between outer steps.
    Seam("megatron.core.rerun_state_machine", "RerunStateMachine._reduce_any", communication.vote_of_those_who_average),
    Seam(_TRAINING, "checkpoint_and_decide_exit", communication.ask_to_exit_when_together),
    Seam(_TRAINING, "maybe_finalize_async_save", communication.ask_for_saves_when_together),
    Seam(_TRAINING, "calc_params_l2_norm", communication.in_the_group),
    # Checkpoints.
    Seam(_CHECKPOINTING, "load", files.load_whole_files),
    Seam("megatron.training.checkpointing", "_build_sharded_state_dict_metadata", hooks.describe_the_run),
    Seam(_TRAINING, "save_checkpoint", hooks.save),
    Seam(_TRAINING, "save_checkpoint", gradients.save, over=hooks.save),
    Seam(_TRAINING, "load_checkpoint", hooks.load),
    Seam(_INITIALIZE, "init_persistent_async_worker", helpers.start),
    Seam(f"{_STRATEGIES}.filesystem_async", "get_write_results_queue", helpers.start),
    Seam(f"{_STRATEGIES}.async_utils", "PersistentAsyncCaller.async_loop", helpers.end_with_the_rank),
    Seam(_OPTIMIZER, "DistributedOptimizer.sharded_state_dict", torch_adam.with_state),
    Seam(_OPTIMIZER, "DistributedOptimizer.load_state_dict", torch_adam.with_counters),
    Seam(_OPTIMIZER, "DistributedOptimizer._set_main_param_and_optimizer_states", torch_adam.with_counter),
    # Bytes inside a group.
    Seam(_BUFFERS, "_ParamAndGradBucketGroup.start_grad_sync", gradients.start),
    Seam(_BUFFERS, "_ParamAndGradBucketGroup.start_param_sync", parameters.start),
    Seam(_TRANSFERS, "_p2p_ops", activations.transfer),
    Seam(_TRANSFERS, "_batched_p2p_ops", activations.transfer),
    Seam("megatron.core.tensor_parallel.mappings", "_reduce", tensor_parallel.sum_encoded),
    Seam("megatron.core.tensor_parallel.layers", "ColumnParallelLinear.__init__", tensor_parallel.build),
)
"""What every run under Pier replaces."""

EXAMINATION = (
    Seam(_ARGUMENTS, "validate_args", examination.confine, over=choice.validate, imported_by=_INITIALIZE),
    Seam("megatron.training.ft_integration", "setup", examination.leave_out),
    Seam(_TRAINING, "train_step", examination.look_on, over=training.train_step),
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
    Needed("megatron.training.checkpointing", "get_rng_state"),
    Needed(
        "megatron.core.num_microbatches_calculator",
        "get_current_running_global_batch_size get_num_microbatches init_num_microbatches_calculator "
        "unset_num_microbatches_calculator update_num_microbatches",
    ),
    Needed(_BUFFERS, "dist_all_gather_func dist_reduce_scatter_func _ParamAndGradBucketGroup.finish_grad_sync"),
    Needed("megatron.core.optimizer", "ChainedOptimizer"),
    Needed("megatron.core.optimizer.layer_wise_optimizer", "LayerWiseDistributedOptimizer"),
    Needed(
        _PARALLEL_STATE,
        "RankGenerator get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_embedding_group "
        "get_expert_data_parallel_group get_expert_tensor_parallel_group get_inter_distributed_optimizer_instance_group "
        "get_pipeline_model_parallel_group get_pipeline_model_parallel_rank get_tensor_model_parallel_group "
        "get_tensor_model_parallel_rank _DATA_PARALLEL_GROUP_WITH_CP _EXPERT_DATA_PARALLEL_GROUP "
        "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP _MPU_DATA_PARALLEL_RANK _MPU_DATA_PARALLEL_WORLD_SIZE",
    ),
    Needed(_PARALLEL_STATE, "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", releases=("0.19",)),
    Needed(_PARALLEL_STATE, "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", releases=("0.19",)),
    Needed("megatron.core.rerun_state_machine", "get_rerun_state_machine"),
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
    Needed(_TRAINING, "_TRAIN_START_TIME mpu num_floating_point_operations update_train_iters"),
    Needed("megatron.training.utils", "print_rank_last"),
)
"""What Pier looks up by name while it runs."""


class SeamOrderError(RuntimeError):
    """Two functions are put around the same one of Megatron's in an order in which they do not work."""


def install(seams: Iterable[Seam]) -> None:
    """Replaces Megatron's functions: all of them, or none if one of them is not there.

    Raises:
        UnsupportedMegatronError: If this Megatron lacks a function.
        SeamOrderError: If a function would be put around another one than its row says.
    """
    present = [seam for seam in seams if seam.exists]
    outermost: dict[tuple[str, str], Callable[..., Any]] = {}
    for seam in present:
        seam.original()
        symbol = seam.module, seam.name
        if outermost.get(symbol) is not seam.over:
            beneath, expected = (
                "nothing" if function is None else f"{function.__module__}.{function.__qualname__}"
                for function in (outermost.get(symbol), seam.over)
            )
            raise SeamOrderError(
                f"{seam.around.__module__}.{seam.around.__qualname__} around {seam.module}.{seam.name} finds {beneath} there, "
                f"must find {expected}: the rows of the table of seams are out of order."
            )
        outermost[symbol] = seam.around
    for seam in present:
        seam.install()


_is_registered = False


def register() -> None:
    """Adds Pier to Megatron's training loop; call it after Megatron can be imported and before it parses arguments.

    A run without ``--optimizer pier`` and without a flag that works with every optimizer trains as before; with PyTorch's own
    Adam it can also load its checkpoints, see :mod:`pier_megatron.integration.inner.torch_adam`. Calling it again does nothing.

    Raises:
        UnsupportedMegatronError: If this Megatron lacks something that Pier needs.
    """
    global _is_registered
    if _is_registered:
        return
    for needed in NEEDED:
        if not needed.releases or versions.release() in needed.releases:
            for name in needed.names.split():
                versions.require(needed.module, name)
    examined = EXAMINATION if examination.VARIABLE in os.environ else ()
    scored = SCORING if scoring.VARIABLE in os.environ else ()
    install((*TABLE, *examined, *scored))
    helpers.end_forks_with_parent()
    _is_registered = True
