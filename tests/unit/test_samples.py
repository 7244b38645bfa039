"""Looking at what the groups read leaves Megatron's data iterators as they were."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import RerunDataIterator

from pier_megatron.errors import PierConfigError
from pier_megatron.integration.samples import check_groups_read_different_samples


class Loader:
    """A loader that can save where it is, as Energon's can."""

    def __init__(self, first: int = 0) -> None:
        self.position = first

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        self.position += 1
        return {"tokens": torch.tensor([self.position - 1])}

    def save_state(self) -> int:
        return self.position


def look_at(iterator: Any, other_group: float = 0.5) -> None:
    """Two groups: the other one reads something with that checksum, or the same if negative."""

    def gather(own: torch.Tensor) -> SimpleNamespace:
        other = own if other_group < 0 else torch.full_like(own, other_group)
        return SimpleNamespace(result=lambda: torch.stack([own, other]))

    check_groups_read_different_samples(iterator, SimpleNamespace(gather=gather), torch.device("cpu"))  # type: ignore[arg-type]


def test_every_batch_is_handed_out_once_also_to_who_has_kept_the_iterable() -> None:
    iterator, other = RerunDataIterator(Loader()), RerunDataIterator(Loader())
    look_at(iterator)
    look_at(other)
    for reading in (iterator, iter(other.iterable)):
        assert [next(reading)["tokens"].item() for _ in range(3)] == [0, 1, 2]


def test_loader_is_back_once_the_batch_has_been_handed_out() -> None:
    stateless = RerunDataIterator(iter([{"tokens": torch.tensor([1])}]))
    look_at(stateless)
    assert not hasattr(stateless.iterable, "save_state")
    loader = Loader()
    iterator = RerunDataIterator(loader)
    look_at(iterator)
    # What Megatron asks for with --dataloader-save.
    assert hasattr(iterator.iterable, "save_state")
    next(iterator)
    assert iterator.iterable is loader
    assert iterator.iterable.save_state() == 1


def test_groups_that_read_the_same_are_refused() -> None:
    with pytest.raises(PierConfigError, match="Groups 0 and 1 read identical data"):
        look_at(RerunDataIterator(Loader()), other_group=-1)


def test_ranks_that_read_nothing_have_no_opinion() -> None:
    look_at(None, other_group=-1)
    look_at([None, RerunDataIterator(Loader())])
