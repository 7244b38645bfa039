"""What ``--device cpu`` stands in for, and what it leaves as it is."""

import os
import subprocess
import sys

import pytest
import torch

from pier_megatron.cpu.products import in_fp32

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


@pytest.mark.slow
def test_tensors_are_made_where_a_device_is_the_default() -> None:
    """transformers loads models this way; on failure their rotary embeddings hold uninitialised memory."""
    command = [sys.executable, "-c", _UNDER_ANOTHER_DEVICE]
    found = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


_DTYPES = (torch.bfloat16, torch.float16)


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((5, 300), (300, 7)))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_product_and_gradients_are_those_of_fp32_rounded_once(dtype: torch.dtype) -> None:
    left, right = matrices(dtype)
    product = in_fp32(torch.matmul, _DTYPES)(left, right)
    product.sum().backward()
    wide_left, wide_right = (matrix.detach().float().requires_grad_() for matrix in (left, right))
    (wide_left @ wide_right).sum().backward()
    assert product.dtype == left.grad.dtype == right.grad.dtype == dtype
    assert torch.equal(product, (wide_left @ wide_right).to(dtype))
    assert torch.equal(left.grad, wide_left.grad.to(dtype))
    assert torch.equal(right.grad, wide_right.grad.to(dtype))
    # What the processor's own product says, up to the order in which it sums.
    torch.testing.assert_close(product, torch.matmul(left, right))


def test_addend_and_scalars_pass_through() -> None:
    left, right = (matrix.detach()[None] for matrix in matrices(torch.bfloat16))
    addend = torch.full((1, 5, 7), float("nan"), dtype=torch.bfloat16)
    found = in_fp32(torch.baddbmm, _DTYPES)(addend, left, right, beta=0.0, alpha=0.5)
    torch.testing.assert_close(found, 0.5 * torch.bmm(left, right))


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
