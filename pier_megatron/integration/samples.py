"""What the groups read, and how much of it: not the same samples, and every rank of a group in step with the others."""

import hashlib
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from pier_megatron.errors import PierConfigError
from pier_megatron.integration import own_world
from pier_megatron.megatron_api import versions
from pier_megatron.outer import GroupExchange

if TYPE_CHECKING:
    from megatron.core.rerun_state_machine import RerunDataIterator

type DataIterator = RerunDataIterator | list[RerunDataIterator | None] | None
"""Megatron's, one for each model chunk where there are several; None on ranks that read nothing."""

_BATCHES = "megatron.core.num_microbatches_calculator"


def count_all_groups[**P, R](train: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Lets Megatron's loop count the samples of all groups.

    The loop multiplies by the data-parallel size in its own body, so no smaller function could be wrapped. Only the loop's own
    name for ``parallel_state`` is replaced: everyone else asks for the size of the group's process groups, and gets it.
    """
    parallel_state, groups = versions.require("megatron.core", "parallel_state"), own_world.groups()
    if groups == 1:
        return train(*args, **kwargs)
    counting = types.SimpleNamespace(**vars(parallel_state))
    counting.get_data_parallel_world_size = lambda: groups * parallel_state.get_data_parallel_world_size()
    with versions.replaced(versions.require("megatron.training", "training"), {"mpu": counting}):
        return train(*args, **kwargs)


def read_own_samples[**P, R](build_data_iterators: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Gives each group its share of the samples. The first group makes the index of the data sets, the others read it."""
    parallel_state, settings = versions.require("megatron.core", "parallel_state"), versions.megatron_args()
    if own_world.groups() == 1:
        return build_data_iterators(*args, **kwargs)
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    number = own_world.launch().group if settings.pier_island is None else settings.pier_island
    # Megatron's own means to answer with another size and rank than those of the process group.
    place = {
        "_MPU_DATA_PARALLEL_WORLD_SIZE": settings.pier_groups * size,
        "_MPU_DATA_PARALLEL_RANK": number * size + rank,
    }
    with versions.replaced(parallel_state, place), own_world.first_group_first("samples"):
        return build_data_iterators(*args, **kwargs)


def check_groups_read_different_samples(data_iterator: DataIterator, exchange: GroupExchange, device: torch.device) -> None:
    """Refuses groups whose next micro-batch is the same; called by all ranks, before their first iteration.

    Args:
        data_iterator: Megatron's; the micro-batch is looked at and put back.
        exchange: Collectives between the groups.
        device: Device of these collectives.

    Raises:
        PierConfigError: With the groups.
    """
    fingerprint = next((fingerprint_of(_peek(iterator)) for iterator in _iterators(data_iterator)), None)
    # A checksum of 48 bits is exact in float64. Ranks that read nothing have no opinion.
    own = torch.tensor([-1.0 if fingerprint is None else float(fingerprint)], dtype=torch.float64, device=device)
    everyone = exchange.gather(own).result().flatten().tolist()
    groups: dict[float, int] = {}
    for second, found in enumerate(everyone):
        first = groups.setdefault(found, second)
        if first != second and found >= 0:
            raise PierConfigError(
                f"Groups {first} and {second} read identical data: their first micro-batches are the same to the last bit, so "
                "they would learn the same twice. Give each data-parallel rank samples of its own, as Megatron's samplers do "
                "by parallel_state.get_data_parallel_rank()."
            )


def pass_samples(data_iterator: DataIterator) -> None:
    """Reads the micro-batches of an iteration that is not trained, on every rank that reads any.

    Megatron's own ``dummy_train_step`` reads from one iterator and on the first tensor-parallel rank only: that is not enough
    where a rank has several model chunks, where it has none to read for, and where all tensor-parallel ranks read.

    Args:
        data_iterator: Megatron's.
    """
    machine = versions.require("megatron.core.rerun_state_machine", "get_rerun_state_machine")()
    count = versions.require(_BATCHES, "get_num_microbatches")()
    # The machine forgets the micro-batches that it has kept for a replay.
    while machine.should_run_forward_backward(data_iterator):
        for iterator in _iterators(data_iterator):
            for _ in range(count):
                next(iterator)


def samples_of_iteration() -> int:
    """Samples that all groups take in an iteration, where the batch size does not grow."""
    size: int = versions.require(_BATCHES, "get_current_running_global_batch_size")()
    return size


def _iterators(data_iterator: DataIterator) -> "list[RerunDataIterator]":
    """The iterators that this rank reads from."""
    given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    return [iterator for iterator in given if iterator is not None]


class _ReadAhead:
    """Replaces the iterable of a ``RerunDataIterator`` until it has handed out the batch that was read ahead."""

    def __init__(self, iterator: "RerunDataIterator") -> None:
        self._iterator = iterator
        self._iterable = iterator.iterable
        self.batch = next(self._iterable)
        self._is_handed_out = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_handed_out:
            return next(self._iterable)
        self._is_handed_out = True
        self._iterator.iterable = self._iterable
        return self.batch

    def __getattr__(self, name: str) -> Any:
        # Megatron saves the state of loaders that have one.
        return getattr(self._iterable, name)


def _peek(iterator: "RerunDataIterator") -> Any:
    """Reads ahead in one of Megatron's ``RerunDataIterator``."""
    iterator.iterable = _ReadAhead(iterator)
    return iterator.iterable.batch


def fingerprint_of(batch: object) -> int | None:
    """A checksum of the tensors of a micro-batch, of 48 bits; None if there are none."""
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else [batch]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    # 32-bit checksums of thousands of groups would collide once in a few hundred starts.
    checksum = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        checksum.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(checksum.digest()) if tensors else None
