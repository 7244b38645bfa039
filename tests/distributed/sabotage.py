"""Planted bugs: what each test guards against, so that the test can be seen to fail."""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Runs with the bug of that name, or with none."""
    with contextlib.nullcontext() if name is None else _BUGS[name]():
        yield


def _no_commit() -> contextlib.AbstractContextManager[object]:
    """The published code's: the forward after an outer step still uses the old weights."""
    return mock.patch("pier_megatron.optimizer.commit_main_parameters", lambda members: None)


def _no_rescaling() -> contextlib.AbstractContextManager[object]:
    """The published code's: gradients summed over one group are divided by the size of all."""
    from pier_megatron.integration.gradients import GradientAveraging

    return mock.patch.object(
        GradientAveraging, "over_own_group", lambda averaging: averaging._set(instances=1, scale=1)
    )


_BUGS = {"no commit": _no_commit, "no rescaling": _no_rescaling}
