"""Gloo's communicators of a process that trains on the CPU, all on one device.

Megatron has some sixty. PyTorch gives each of them a device of gloo's, which is a thread and a listening socket. The thread
takes up to 10 ms to end: a process would outlive its training by most of a second.
"""

import datetime
from typing import ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d


class OnOneDevice(dist.ProcessGroupGloo):
    """A communicator on the device of the first one.

    Attributes:
        devices: Devices of the first one, as ``GLOO_SOCKET_IFNAME`` names them; empty before it.
    """

    devices: ClassVar[list[object]] = []

    def __init__(self, store: distributed_c10d.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        """Connects with the others, as PyTorch asks for it."""
        if self.devices:
            options = self._Options()  # type: ignore[attr-defined]
            options._timeout, options._devices = timeout, self.devices
            if size == 1:
                # Most of them are; of the others each has two.
                options._threads = 1
            super().__init__(store, rank, size, options)
        else:
            super().__init__(store, rank, size, timeout)
            self.devices.extend(self.options._devices)  # type: ignore[attr-defined]


def install() -> None:
    """Lets this process form its communicators on one device."""
    distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]
