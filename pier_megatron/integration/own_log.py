"""What Megatron logs: in the local phase losses, norms and times of this rank's group alone, in the lazy start of all groups.

The means over all groups are part of the next outer step's report.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from pier_megatron.integration import current
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from pier_megatron.integration.optimizer import PierOptimizer


@current.in_pier_runs
def log_own_group[R](training_log: Callable[..., R], optimizer: "PierOptimizer", /, *args: object, **kwargs: object) -> R:
    """Logs what this group has seen, marked as such, and keeps its loss and gradient norm for the next outer step's report."""
    loop = optimizer.loop
    if not loop.is_local:
        with optimizer.together():
            return training_log(*args, **kwargs)
    given = versions.given(training_log, args, kwargs)
    # Megatron's first loss is that of the language model; stages before the last one have none.
    losses = [] if given["skipped_iter"] else list(given["loss_dict"].values())
    loop.note_training(losses[0] if losses else None, given["grad_norm"])
    with _marked(training_log, optimizer):
        return training_log(*args, **kwargs)


def _marked(training_log: Callable[..., object], optimizer: "PierOptimizer") -> AbstractContextManager[None]:
    """Inside, Megatron's line ends with the group that it is of."""
    config, group = optimizer.loop.config, optimizer.loop.exchange.rank
    index = group if config.island is None else config.island
    if config.groups == 1:
        return nullcontext()
    module = sys.modules[inspect.unwrap(training_log).__module__]
    print_line: Callable[[str], None] = module.print_rank_last
    return versions.replaced(
        module, {"print_rank_last": lambda line: print_line(f"{line} losses and norms: group {index} of {config.groups} |")}
    )
