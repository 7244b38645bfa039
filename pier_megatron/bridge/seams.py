"""Everything of Megatron-Bridge's that Pier replaces, checked as a whole before any of it is touched.

What it replaces in megatron-core is the same as under flags.
"""

import functools
from collections.abc import Callable
from typing import Any

from pier_megatron.bridge import training
from pier_megatron.integration import datasets, own_log, votes
from pier_megatron.integration import seams as of_flags
from pier_megatron.integration.checkpoint import groups_files, helpers, hooks
from pier_megatron.megatron_api import run
from pier_megatron.megatron_api.seam import Needed, Seam, check_there, install
from pier_megatron.processes import end_with_one_message

_CHECKPOINTING = "megatron.bridge.training.checkpointing"
_EVAL = "megatron.bridge.training.eval"
_FLOPS = "megatron.bridge.training.utils.flop_utils"
_PRETRAIN = "megatron.bridge.training.pretrain"
_TRAIN = "megatron.bridge.training.train"


def validate(validate: Callable[..., Any], config: Any) -> Any:
    """Checks a configuration, and replaces what its run needs replaced."""
    result = training.validate(validate, config)
    loop = run.loop()
    assert loop is not None
    install(of_flags.used((*TABLE, *of_flags.CORE), loop.arguments()))
    return result


BEFORE_ARGUMENTS = (
    Seam("megatron.bridge.training.config", "ConfigContainer.validate", validate),
    Seam("megatron.bridge.training.initialize", "compile_helpers", datasets.compile_unless_shipped),
    *of_flags.HELPERS,
)
"""What is replaced in every run that has imported Pier."""

TABLE = (
    # The loop.
    Seam(_TRAIN, "train_step", training.train_step),
    Seam(_TRAIN, "_dummy_train_step", training.skip_iteration),
    Seam(_EVAL, "evaluate", training.evaluate),
    Seam(_TRAIN, "training_log", own_log.log_own_group),
    # The world of a group, and its part of the run.
    Seam("megatron.bridge.training.initialize", "_initialize_distributed", training.form),
    Seam("megatron.bridge.training.setup", "setup_data_iterators", training.read_own_samples),
    Seam(_PRETRAIN, "train", training.train),
    Seam(_TRAIN, "checkpoint_and_decide_exit", votes.end_together),
    Seam(_FLOPS, "resolve_global_flops_runtime_stats", training.count_own_tokens, since="0.19"),
    # Checkpoints.
    Seam(_CHECKPOINTING, "_build_sharded_state_dict_metadata", hooks.describe_the_run),
    Seam(_CHECKPOINTING, "save_checkpoint", hooks.save),
    Seam(_CHECKPOINTING, "load_checkpoint", training.load),
    Seam(_CHECKPOINTING, "maybe_finalize_async_save", groups_files.finalize_when_all_have_saved),
    Seam("megatron.bridge.training.state", "GlobalState.initialize_async_checkpoint_worker", helpers.start),
)
"""What a run under Megatron-Bridge replaces besides :data:`pier_megatron.integration.seams.CORE`."""


NEEDED = (
    Needed("megatron.bridge.models.gpt_provider", "local_layer_spec"),
    Needed("megatron.bridge.training.config", "runtime_config_update"),
    Needed("megatron.bridge.training.initialize", "get_rank_safe get_world_size_safe"),
    Needed("megatron.bridge.training.train", "get_world_size_safe"),
    Needed("megatron.bridge.training.utils.train_utils", "get_world_size_safe"),
    Needed("megatron.bridge.training.utils.pg_utils", "get_pg_collection"),
    Needed(
        "megatron.bridge.utils.common_utils",
        "get_master_addr_safe get_master_port_safe get_rank_safe get_world_size_safe print_rank_last",
    ),
)
"""What Pier looks up by name besides :data:`pier_megatron.integration.seams.NEEDED`."""


@functools.cache
def register() -> None:
    """Adds Pier to Megatron-Bridge's training loop; calling it again does nothing.

    Raises:
        UnsupportedMegatronError: If this Megatron or Megatron-Bridge lacks something that Pier needs.
    """
    of_flags.check_needed((*of_flags.NEEDED, *NEEDED))
    check_there((*TABLE, *of_flags.CORE))
    install(BEFORE_ARGUMENTS)
    helpers.end_forks_with_parent()
    end_with_one_message()
