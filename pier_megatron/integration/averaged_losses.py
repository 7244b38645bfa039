"""Losses that a training script averages itself in every micro-batch, as Megatron-LM's pretrain_bert.py does."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pier_megatron.integration import current, worlds
from pier_megatron.integration.gradient_averaging import own_data_parallel_ranks
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer

# The group that the function asks for, without and since the one of weight rematerialisation in 0.19.
_GROUPS = ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT")


@current.in_pier_runs
def average_over_those_who_train_together[**P, R](
    average: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Averages over the own group where groups train apart, and over all of them in the lazy start and in evaluation."""
    parallel_state, over_all = versions.require("megatron.core", "parallel_state"), worlds.own().over_all
    if optimizer.loop.is_local and optimizer.model_chunks[0].training:
        group = own_data_parallel_ranks()
    elif over_all is not None:
        group = over_all[0]
    else:
        return average(*args, **kwargs)
    there = [name for name in _GROUPS if getattr(parallel_state, name, None) is not None]
    with versions.replaced(parallel_state, dict.fromkeys(there, group)):
        return average(*args, **kwargs)
