"""Products of matrices in low precision, on CPUs that have no units for them.

Such a CPU takes tens of times as long for a product of bf16 or fp16 matrices as for one of FP32. There, products and their
gradients are computed in FP32 and rounded, as the units do; only the order of the sums differs.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_PRODUCTS = ("matmul", "mm", "bmm", "baddbmm", "addmm")


def install() -> None:
    """Replaces PyTorch's products where this CPU is slow at them; elsewhere nothing changes."""
    slow = slow_dtypes()
    if not slow:
        return
    for owner in (torch, torch.Tensor):
        for name in _PRODUCTS:
            setattr(owner, name, in_fp32(getattr(owner, name), slow))
    torch.Tensor.__matmul__ = torch.Tensor.matmul  # type: ignore[method-assign,assignment]
    torch.nn.functional.linear = in_fp32(torch.nn.functional.linear, slow)


def slow_dtypes() -> frozenset[torch.dtype]:
    """The types of low precision for which PyTorch finds no kernel of oneDNN on this CPU, and takes its slow loops.

    It is a property of the CPU, asked as PyTorch asks, and not measured: of two ranks on one node, or a job and its resume, one
    might then compute in FP32 and the other not, and bits would depend on what else the machine does.
    """
    asked = torch.ops.mkldnn
    has_kernel = {
        torch.bfloat16: torch.backends.mkldnn.is_available() and asked._is_mkldnn_bf16_supported(),
        torch.float16: torch.backends.mkldnn.is_available() and asked._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, found in has_kernel.items() if not found)


def in_fp32(product: Callable[..., Tensor], dtypes: Iterable[torch.dtype]) -> Callable[..., Tensor]:
    """Returns a function that computes a product of tensors of one of ``dtypes`` in FP32 and rounds it to their type."""
    slow = frozenset(dtypes)

    @functools.wraps(product)
    def wide(*args: object, out: Tensor | None = None, **kwargs: object) -> Tensor:
        found = {value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
        if len(found) != 1 or not found <= slow:
            return product(*args, **kwargs) if out is None else product(*args, out=out, **kwargs)
        [dtype] = found
        rounded = product(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()}).to(dtype)
        return rounded if out is None else out.copy_(rounded)

    return wide


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) else value
