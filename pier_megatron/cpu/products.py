"""Products of matrices in low precision, on CPUs that have no units for them.

Such a CPU takes tens of times as long for a product of bf16 or fp16 matrices as for one of FP32. There, products and their
gradients are computed in FP32 and rounded, as the units do; only the order of the sums differs.
"""

import functools
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# Times as long as in FP32, above which there can be no unit; with one, a product takes at most twice as long.
_NO_UNIT = 6.0

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
    """The types of low precision in which this CPU multiplies without units for them; measured in some milliseconds."""
    of_fp32 = _seconds(torch.float32)
    return frozenset(dtype for dtype in (torch.bfloat16, torch.float16) if _seconds(dtype) > _NO_UNIT * of_fp32)


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


def _seconds(dtype: torch.dtype) -> float:
    """The least time of a product of two matrices, large enough to tell and small enough not to be noticed."""
    left, right = torch.ones(128, 128, dtype=dtype), torch.ones(128, 128, dtype=dtype)
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - begin)
    return min(times)
