"""The processes that write a checkpoint."""

from megatron.core.dist_checkpointing.strategies import filesystem_async


def fork_what_hands_over_results() -> None:
    """What the writers of a checkpoint hand their results over with: a fork need not import PyTorch once more."""
    queue = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = lambda mp_mode="fork": queue(mp_mode)
