"""Communicators of a process that trains on the CPU."""

import subprocess
import sys

import pytest

# Gathers as of overlapped parameters, many at a time. With PyTorch's own communicator this ends with a corrupt heap.
_GATHERS = """
import datetime, torch, torch.distributed as dist
from pier_megatron.cpu.communicators import OnOneDevice
# A newer PyTorch passes further options by name.
group = OnOneDevice(dist.HashStore(), 0, 1, datetime.timedelta(seconds=60), group_name="one")
assert group.options.group_name == "one"
one, other = torch.ones(1), torch.ones(1)
for _ in range(2000):
    for work in [group.allgather_coalesced([[one]], [other]) for _ in range(64)]:
        work.wait()
"""


@pytest.mark.slow
def test_many_collectives_at_a_time() -> None:
    done = subprocess.run([sys.executable, "-c", _GATHERS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
