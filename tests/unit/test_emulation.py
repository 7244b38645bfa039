"""What ``--device cpu`` leaves as it is."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_UNDER_ANOTHER_DEVICE = """
import torch
from pier_megatron.cpu import emulation
emulation.install()
with torch.device("meta"):
    made = [torch.empty(2), torch.tensor([1.0]), torch.arange(3), torch.full((2,), 1.0), torch.nn.Linear(2, 2).weight]
assert all(tensor.is_meta for tensor in made), [tensor.device for tensor in made]
cpu = torch.device("cpu")
for cuda in ("cuda", "cuda:0"):
    with torch.device(cuda):
        assert torch.zeros(1).device == torch.tensor([1.0]).device == cpu
    torch.set_default_device(cuda)
    assert torch.zeros(1).device == cpu
    torch.set_default_device(None)
with torch.device(0):
    assert torch.zeros(1).device == cpu
assert torch.empty(2, device="cuda").device == torch.zeros(1).device == cpu
"""


def test_tensors_are_made_where_a_device_is_the_default() -> None:
    """transformers loads models this way; on failure their rotary embeddings hold uninitialised memory."""
    command = [sys.executable, "-c", _UNDER_ANOTHER_DEVICE]
    found = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
