"""A launch of several groups whose other ranks are not there: its communicators are PyTorch's ``fake`` ones."""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any


def install(note: Callable[[], None] = lambda: None) -> None:
    """Lets this process divide its launch, and connect, without the others.

    Args:
        note: Called for each communicator between groups.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    worlds = importlib.import_module("pier_megatron.exchange.worlds")
    own_world = importlib.import_module("pier_megatron.integration.own_world")
    divide = own_world.divide

    def communicator(launch: Any, key: str, name: str, ranks: Sequence[int], *others: object) -> dist.ProcessGroup:
        note()
        place, kinds = (list(ranks).index(launch.rank), len(ranks)), dist.ProcessGroup.BackendType
        group, backend = dist.ProcessGroup(FakeStore(), *place), FakeProcessGroup._create_internal(*place)
        group._set_default_backend(kinds.CUSTOM)
        for device in ("cpu", "cuda"):
            group._register_backend(torch.device(device), kinds.CUSTOM, backend)
        worlds._make_known(group, key, name, [rank - launch.first_of_group for rank in ranks], FakeStore())
        return group

    worlds.Launch._communicator = communicator
    worlds.Launch.first_group_first = lambda launch, what: contextlib.nullcontext()
    worlds.Launch.store_of_group = property(lambda launch: None)
    own_world.divide = lambda *place: divide(*place[:-1], dist.HashStore())
