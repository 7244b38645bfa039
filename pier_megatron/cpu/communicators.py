"""Gloo's communicators of a process that trains on the CPU, all on one device, with one thread for each.

Megatron has some sixty. PyTorch gives each of them a device of gloo's, which is a thread and a listening socket. The thread
takes up to 10 ms to end: a process would outlive its training by most of a second.

PyTorch also gives each two threads that run its collectives. Each notes the name of what it has completed in the same string,
without a lock. Two gathers of overlapped parameters that end at the same time free its memory twice (PyTorch 2.13).
"""

from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d


class OnOneDevice(dist.ProcessGroupGloo):
    """A communicator on the device of all, which runs one collective after the other.

    Attributes:
        devices: Devices of all, as ``GLOO_SOCKET_IFNAME`` names them; empty before the first.
    """

    devices: ClassVar[list[object]] = []

    def __init__(self, store: distributed_c10d.Store, rank: int, size: int, timeout: timedelta, **others: object) -> None:
        """Connects with the others, as PyTorch asks for it."""
        if not self.devices:
            # Those that PyTorch chooses, by the variables that it looks at.
            alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout)  # type: ignore[attr-defined]
            self.devices.extend(alone.options._devices)  # type: ignore[attr-defined]
        options = self._Options()  # type: ignore[attr-defined]
        # PyTorch 2.14 also passes enable_reconfigure.
        for name, value in {"_timeout": timeout, "_devices": self.devices, "_threads": 1, **others}.items():
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


def install() -> None:
    """Lets this process form its communicators on one device."""
    distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]
