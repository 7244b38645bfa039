"""Records the collectives that a process takes part in, whoever starts them.

``torch.distributed`` hands every collective to PyTorch's dispatcher, so one dispatch mode sees them all: Megatron's,
Transformer Engine's, the plugin's, asynchronous and coalesced ones.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as this rank saw it.

    Attributes:
        name: Of the operation, such as ``allreduce_``.
        ranks: Global ranks that take part.
        nbytes: Bytes of the tensors that this rank puts in, 0 for a barrier.
    """

    name: str
    ranks: tuple[int, ...]
    nbytes: int


class CollectiveCensus(TorchDispatchMode):
    """Counts the collectives inside a ``with`` block.

    Attributes:
        collectives: In the order in which they were started.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "namespace", None) == "c10d":
            self.collectives.append(_describe(func, args))
        return func(*args, **(kwargs or {}))

    def crossing(self, group_of: Mapping[int, int]) -> list[Collective]:
        """Those whose ranks belong to more than one group.

        Args:
            group_of: Group of each global rank.
        """
        return [found for found in self.collectives if len({group_of[rank] for rank in found.ranks}) > 1]


def table(collectives: list[Collective]) -> list[str]:
    """Lists collectives for people, equal ones together: count, name, ranks, bytes."""
    bytes_of: dict[tuple[str, tuple[int, ...]], list[int]] = collections.defaultdict(list)
    for found in collectives:
        bytes_of[found.name, found.ranks].append(found.nbytes)
    return [
        f"{len(sizes):5d} x {name:28} {sum(sizes):14,} bytes over ranks {', '.join(map(str, ranks))}"
        for (name, ranks), sizes in bytes_of.items()
    ]


def _describe(func: Callable[..., Any], args: tuple[Any, ...]) -> Collective:
    group = next((found for found in map(_as_group, args) if found is not None), None)
    ranks = dist.get_process_group_ranks(group) if group is not None else range(dist.get_world_size())
    name = getattr(func, "__name__", str(func)).split(".")[0]
    # Inputs come last where a collective has outputs too.
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) or (isinstance(arg, list) and arg)]
    return Collective(name, tuple(ranks), 0 if "barrier" in name else _nbytes(tensors[-1]) if tensors else 0)


def _as_group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return None


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_nbytes(item) for item in value) if isinstance(value, list | tuple) else 0
