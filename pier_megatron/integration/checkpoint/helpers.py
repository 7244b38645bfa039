"""The processes that help Megatron save: they outlive the signal that makes a run save and end, and never their rank.

torchrun and Slurm send the signal to every process of a rank. With ``--exit-signal-handler`` the rank goes on to where the
groups meet, and saves; without its helpers that save fails, or never ends. A rank that is killed would leave its persistent
worker behind, with memory of the GPU, and the job could not start again.
"""

import atexit
import ctypes
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

from pier_megatron.integration import versions
from pier_megatron.integration.arguments import uses_pier

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"


def install() -> None:
    """Lets helpers live as long as they are needed."""
    versions.wrap("megatron.training.initialize", "init_persistent_async_worker", _start_deaf)
    versions.wrap(f"{_STRATEGIES}.filesystem_async", "get_write_results_queue", _start_deaf)
    versions.wrap(f"{_STRATEGIES}.async_utils", "PersistentAsyncCaller.async_loop", _end_with_the_rank)


def _end_with_the_rank(async_loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The worker's main function: has the kernel (Linux's prctl, PR_SET_PDEATHSIG) kill it when its rank dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    return async_loop(*args, **kwargs)


def _start_deaf(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    settings = versions.megatron_args()
    if not (uses_pier(settings) and settings.exit_signal_handler):
        return start(*args, **kwargs)
    # Python's own helper, which would take the signal off the mask that children inherit.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {settings.exit_signal})
    try:
        return start(*args, **kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        atexit.unregister(_end_helpers)
        atexit.register(_end_helpers)


def _end_helpers() -> None:
    """Ends helpers after an error: Python would do it with a signal that they may not hear, and wait for them."""
    for helper in multiprocessing.active_children():
        if helper.daemon:
            helper.kill()
