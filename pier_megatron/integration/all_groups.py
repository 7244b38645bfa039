"""What spans all groups of a launch in the lazy start and in evaluation, over Pier's communicators.

Losses, numbers of tokens and routers' counts are then those of the whole batch, to the last bit as in stock Megatron. A name
that is missing here changes a statistic of the lazy start; between outer steps nothing crosses the groups whatever its name.
"""

import contextlib
import copy
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pier_megatron.exchange.worlds import Launch
from pier_megatron.integration import current
from pier_megatron.megatron_api import run, versions
from pier_megatron.outer import OuterLoop

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from pier_megatron.integration.optimizer import PierOptimizer

# Names of data-parallel groups in Megatron's global state and in the collection that a model carries, as far as a release has
# them; and of those that balance the load of experts.
_DATA_PARALLEL = tuple(
    f"_DATA_PARALLEL_GROUP{with_context}{with_remat}"
    for with_context in ("", "_WITH_CP")
    for with_remat in ("", "_WITH_GTP_REMAT")
)
_OF_COLLECTION = ("dp", "dp_cp", "dp_cp_gtp_remat")
_BALANCING, _BALANCING_OF_COLLECTION = "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "tp_dp_cp"


class AllGroups:
    """Process groups of Megatron, each with those in its place in all other groups of the launch."""

    def __init__(self, launch: Launch, model_chunk: "DistributedDataParallel", timeout: datetime.timedelta) -> None:
        """Connects the groups; called by all ranks of the launch.

        Args:
            launch: Place of this process.
            model_chunk: Any chunk of the model; from 0.19 on it carries its own collection of process groups.
            timeout: Timeout of collectives.
        """
        self._launch, self._timeout = launch, timeout
        self._widened: dict[tuple[int, ...], dist.ProcessGroup] = {}
        parallel_state, collection = versions.require("megatron.core", "parallel_state"), _collection(model_chunk)
        balances = versions.require("megatron.core.utils", "get_model_config")(model_chunk).num_moe_experts is not None
        names = [*_DATA_PARALLEL, *([_BALANCING] if balances else ())]
        of_collection = [*_OF_COLLECTION, *([_BALANCING_OF_COLLECTION] if balances else ())]
        self._replaced = [(parallel_state, self._all_of(parallel_state, names))]
        if collection is not None:
            self._replaced.append((collection, self._all_of(collection, of_collection)))

    def _all_of(self, owner: object, names: Sequence[str]) -> dict[str, dist.ProcessGroup]:
        found = {name: getattr(owner, name, None) for name in names}
        return {name: self.widened(group) for name, group in found.items() if group is not None}

    def collection(self, own: "ProcessGroupCollection", names: Sequence[str]) -> "ProcessGroupCollection":
        """A copy of a collection of this group, with some of its process groups widened to all groups."""
        widened = copy.copy(own)
        vars(widened).update(self._all_of(own, names))
        return widened

    def widened(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The ranks of a process group and those in their places in the other groups; called by all ranks of the launch."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._widened:
            self._widened[ranks] = self._launch.widened(group, self._timeout)
        return self._widened[ranks]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside, Megatron's data-parallel groups are those of the whole launch."""
        with contextlib.ExitStack() as stack:
            for owner, groups in self._replaced:
                stack.enter_context(versions.replaced(owner, groups))
            yield


def _collection(module: "DistributedDataParallel") -> "ProcessGroupCollection | None":
    """The collection that a model carries below its wrappers, or None."""
    while not hasattr(module, "pg_collection") and hasattr(module, "module"):
        module = module.module
    return getattr(module, "pg_collection", None)


def any_group(loop: OuterLoop, values: Sequence[bool]) -> list[bool]:
    """Which of some values are true on any rank of any group; called by all of them."""
    votes = torch.tensor(values, dtype=torch.int32, device=loop.device)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    found: list[bool] = (loop.exchange.gather(votes).result().amax(0) > 0).tolist()
    return found


@current.in_pier_runs
def vote_of_those_who_average(
    vote: Callable[..., bool | tuple[bool, ...]], optimizer: "PierOptimizer", machine: object, value: bool | list[bool]
) -> bool | tuple[bool, ...]:
    """Asks all groups in the lazy start whether an iteration has to be run again: they average its gradients."""
    if optimizer.loop.is_local:
        return vote(machine, value)
    votes = any_group(optimizer.loop, value if isinstance(value, list) else [value])
    return tuple(votes) if isinstance(value, list) else votes[0]


@current.in_pier_runs
def end_together[**P, R](decide: Callable[P, R], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Looks for signals and at the clock where all groups meet, which is also where they hold equal parameters.

    The answer is the same in all groups, whenever a signal arrives.
    """
    loop, settings = optimizer.loop, versions.megatron_args()
    if loop.is_deserted:
        with versions.with_megatron_args({"exit_duration_in_mins": -1.0}):
            return decide(*args, **kwargs)
    if loop.exchange.size == 1:
        # An elastic island may save and end in any iteration, without others.
        return decide(*args, **kwargs)
    limit, told = settings.exit_duration_in_mins, [False, False]
    handler = _signal_handler() if settings.exit_signal_handler else None
    if (limit or handler) and (loop.groups_meet or not loop.is_local):
        has_signal = handler is not None and any(handler.signals_received())  # type: ignore[attr-defined]
        told = any_group(loop, [has_signal, bool(limit) and time.time() - _begun() > 60 * limit])
    with contextlib.ExitStack() as stack:
        if handler is not None:
            stack.enter_context(versions.replaced(handler, {"signals_received": lambda: told[:1]}))
        stack.enter_context(versions.with_megatron_args({"exit_duration_in_mins": -1.0 if told[1] else None}))
        return decide(*args, **kwargs)


def _signal_handler() -> object:
    loop = run.loop()
    return versions.require("megatron.training.global_vars", "get_signal_handler")() if loop is None else loop.signal_handler()


def _begun() -> float:
    loop = run.loop()
    begun: float = versions.require("megatron.training.training", "_TRAIN_START_TIME") if loop is None else loop.begun()
    return begun


@current.in_pier_runs
def estimate_tokens(consume: Callable[[], tuple[float | None, ...]], optimizer: "PierOptimizer") -> tuple[float | None, ...]:
    """Estimates the tokens of packed sequences in all groups, from which operations are counted, by those of this group."""
    return tuple(count if count is None else count * optimizer.loop.config.groups for count in consume())
