"""The processes that help Megatron save: they outlive the signal that makes a run save and end, and never their rank.

torchrun and Slurm send the signal to every process of a rank. With ``--exit-signal-handler`` the rank goes on to where the
groups meet, and saves; without its helpers that save fails, or never ends. A rank that is killed would leave its persistent
worker behind, with memory of the GPU, and the job could not start again.

A rank waits for its helpers without looking whether they live. If one is killed, for lack of memory for example, the rank ends
with an error: it would wait for ever.
"""

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection, resource_tracker
from typing import TYPE_CHECKING

from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.args import uses_pier
from pier_megatron.processes import rank

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

# Whether processes that are forked now are helpers.
_is_starting = False
# Whether helpers die because their rank ends.
_is_ending = False

# Time in which a rank ends by itself if what has ended its helper was meant for both.
_GRACE_SECONDS = 3.0


def end_with_the_rank[**P, R](async_loop: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The worker's main function; between it and the rank there may be a server that forks."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return async_loop(*args, **kwargs)


def _end_with(process: "BaseProcess") -> None:
    process.join()
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent dies: Linux's prctl, PR_SET_PDEATHSIG. Elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def end_forks_with_parent() -> None:
    """Lets helper processes end with the rank that forks them from now on."""
    os.register_at_fork(after_in_child=lambda: end_with_parent() if _is_starting else None)


def start[**P, R](start: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Marks helper processes that start meanwhile."""
    global _is_starting
    settings = versions.megatron_args() if versions.is_training() else None
    if settings is None or not uses_pier(settings):
        return start(*args, **kwargs)
    # Python's own helper, which would take a signal off the mask that children inherit.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {settings.exit_signal} if settings.exit_signal_handler else ())
    _is_starting, before = True, set(multiprocessing.active_children())
    try:
        return start(*args, **kwargs)
    finally:
        _is_starting = False
        for helper in set(multiprocessing.active_children()) - before:
            threading.Thread(target=_end_without, args=(helper,), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        atexit.unregister(_end_helpers)
        atexit.register(_end_helpers)


def _end_without(helper: "BaseProcess") -> None:
    """Ends this rank once a helper has died: neither Megatron nor the queues between them look whether it lives."""
    # Not by waiting for the process, which is for the thread that has started it.
    connection.wait([helper.sentinel])
    time.sleep(_GRACE_SECONDS)
    if _is_ending or not helper.exitcode:
        return
    how = f"was killed by signal {-helper.exitcode}" if helper.exitcode < 0 else f"has ended with status {helper.exitcode}"
    print(
        f"Pier: rank {rank()} ends: {helper.name} (process {helper.pid}), which helps it save checkpoints, {how}. The rank "
        "would wait for it for ever. Behind training it holds a copy of the rank's state in host memory: look for an "
        "out-of-memory kill on this node (dmesg), give the job more memory or drop --async-save. The last complete checkpoint "
        "stays as it is: start again from there.",
        file=sys.__stderr__,
        flush=True,
    )
    os._exit(1)


def _end_helpers() -> None:
    """Ends helpers after an error: Python would do it with a signal that they may not hear, and wait for them."""
    global _is_ending
    _is_ending = True
    for helper in multiprocessing.active_children():
        if helper.daemon:
            helper.kill()
