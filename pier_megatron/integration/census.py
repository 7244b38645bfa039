"""Records the collectives that a process takes part in, whoever starts them.

``torch.distributed`` hands every collective to PyTorch's dispatcher, so one dispatch mode sees them all: Megatron's,
Transformer Engine's, the plugin's, asynchronous, coalesced and functional ones. PyTorch's own ``CommDebugMode`` only counts
them: it knows neither their ranks nor their bytes.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from pier_megatron.exchange.topology import some_of

if TYPE_CHECKING:
    from torch._ops import OpOverload


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as this rank saw it.

    Attributes:
        name: Name of the operation, such as ``allreduce_``.
        ranks: Ranks of the launch that take part, in order; of a message, its sender and its receiver.
        nbytes: Bytes of the tensors that this rank puts in, 0 for a barrier and for what it receives.
    """

    name: str
    ranks: tuple[int, ...]
    nbytes: int


class CollectiveCensus(TorchDispatchMode):
    """Counts the collectives inside a ``with`` block.

    Attributes:
        collectives: In the order in which they were started.
    """

    def __init__(self, first: int = 0) -> None:
        """Begins without any; ``first`` is the rank in the launch with which the world of this rank's group begins."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[Collective] = []
        self._first = first

    def __torch_dispatch__(
        self,
        func: "OpOverload[..., object]",
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        names = (argument.name for argument in func._schema.arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        group = next((found for found in map(_as_group, given.items()) if found is not None), None)
        # What takes a process group is a collective, whatever library it is from.
        if group is not None:
            name = func.__name__.split(".")[0]
            self.collectives.append(Collective(name, self._ranks(group, given), _nbytes_of_input(name, given)))
        return func(*args, **kwargs)

    def _ranks(self, group: dist.ProcessGroup, given: Mapping[str, Any]) -> tuple[int, ...]:
        everyone = tuple(self._first + rank for rank in dist.get_process_group_ranks(group))
        peer = next((given[name] for name in ("dst", "src") if name in given), None)
        return everyone if peer is None else tuple(sorted({self._first + dist.get_rank(), everyone[peer]}))

    def crossing(self, group_of: Mapping[int, int]) -> list[Collective]:
        """Those whose ranks belong to more than one group, given the group of each rank of the launch."""
        return [found for found in self.collectives if len({group_of[rank] for rank in found.ranks}) > 1]


def table(collectives: list[Collective]) -> list[str]:
    """Lists collectives for people, equal ones together: count, name, ranks, bytes."""
    bytes_of: dict[tuple[str, tuple[int, ...]], list[int]] = collections.defaultdict(list)
    for found in collectives:
        bytes_of[found.name, found.ranks].append(found.nbytes)
    return [
        f"{len(sizes):5d} x {name:28} {sum(sizes):14,} bytes over ranks {some_of(map(str, ranks))}"
        for (name, ranks), sizes in bytes_of.items()
    ]


def _as_group(argument: tuple[str, object]) -> dist.ProcessGroup | None:
    """The process group that an argument stands for: itself, boxed or by its name."""
    name, value = argument
    if isinstance(value, dist.ProcessGroup):
        return value
    if name == "group_name" and isinstance(value, str):
        return _resolve_process_group(value)  # type: ignore[arg-type]
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return None


def _nbytes_of_input(name: str, given: Mapping[str, object]) -> int:
    if "barrier" in name or "recv" in name:
        return 0
    # Inputs follow outputs; functional collectives are given outputs by name.
    tensors = [value for key, value in given.items() if key != "out" and _nbytes(value)]
    return _nbytes(tensors[-1]) if tensors else 0


def _nbytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
