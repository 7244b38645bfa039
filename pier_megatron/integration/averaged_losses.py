"""Losses that a training script averages itself in every micro-batch, as Megatron-LM's pretrain_bert.py does."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pier_megatron.integration import current
from pier_megatron.integration.communication import REPLICAS, groups_replaced
from pier_megatron.integration.own_group import own_data_parallel_ranks
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer


@current.in_pier_runs
def average_over_those_who_train_together[**P, R](
    average: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Averages over the own group where groups train apart, and over all of them in the lazy start and in evaluation."""
    if not (optimizer.loop.is_local and optimizer.model_chunks[0].training):
        return average(*args, **kwargs)
    parallel_state = versions.require("megatron.core", "parallel_state")
    with groups_replaced(parallel_state, REPLICAS, own_data_parallel_ranks()):
        return average(*args, **kwargs)
