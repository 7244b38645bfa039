"""What spans all groups of a launch in the lazy start and in evaluation, over Pier's communicators.

Losses, numbers of tokens and routers' counts are then those of the whole batch, to the last bit as in stock Megatron. A name
that is missing here changes a statistic of the lazy start; between outer steps nothing crosses the groups whatever its name.
"""

import contextlib
import copy
import datetime
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from pier_megatron.exchange.worlds import Launch
from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.process_groups_config import ProcessGroupCollection

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
            model_chunk: One chunk of the model; from 0.19 on it carries its own collection of process groups.
            timeout: Timeout of collectives.
        """
        self._launch, self._timeout = launch, timeout
        self._widened: dict[tuple[int, ...], dist.ProcessGroup] = {}
        parallel_state, collection = versions.require("megatron.core", "parallel_state"), _collection(model_chunk)
        config = versions.require("megatron.core.utils", "get_model_config")(model_chunk)
        # The ranks that balance experts also share the maxima of a delayed FP8 recipe.
        balances = config.num_moe_experts is not None or (config.fp8 and config.fp8_recipe == "delayed")
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
