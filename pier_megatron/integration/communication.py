"""Confines what Megatron does in every iteration to the ranks of one group."""

import contextlib
from collections.abc import Iterator
from typing import Any

from pier_megatron.integration import versions

# The groups over which Megatron reduces losses, token counts and statistics in an iteration. The second of each pair exists
# from 0.19 on.
_PARALLEL_STATE_GROUPS = ("_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT")
_COLLECTION_GROUPS = ("dp_cp", "dp_cp_gtp_remat")


@contextlib.contextmanager
def confined_to_group(model_chunk: Any) -> Iterator[None]:
    """Inside, the data-parallel group of the iteration is the part of it in this rank's Pier group.

    Not for the construction of models or optimizers, which size their buffers by the same groups.

    Args:
        model_chunk: Any chunk of the model; from 0.19 on it carries its own collection of process groups.
    """
    parallel_state = versions.require("megatron.core", "parallel_state")
    group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    collection = _process_group_collection(model_chunk)
    with contextlib.ExitStack() as stack:
        for owner, names in ((parallel_state, _PARALLEL_STATE_GROUPS), (collection, _COLLECTION_GROUPS)):
            for name in names:
                original = getattr(owner, name, None)
                if original is not None:
                    stack.callback(setattr, owner, name, original)
                    setattr(owner, name, group)
        yield


def _process_group_collection(module: Any) -> Any:
    """The collection that a model carries below its wrappers, or None."""
    while not hasattr(module, "pg_collection") and hasattr(module, "module"):
        module = module.module
    return getattr(module, "pg_collection", None)
