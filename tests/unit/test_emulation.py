"""What ``--device cpu`` stands in for, and what it leaves as it is."""

import itertools
import random
import time

import pytest
import torch

from pier_megatron.cpu.products import in_fp32, slow_dtypes

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


def test_types_without_a_kernel_are_those_of_the_cpu_under_any_load(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"_is_mkldnn_bf16_supported": torch.bfloat16, "_is_mkldnn_fp16_supported": torch.float16}
    first = slow_dtypes()
    assert first == {dtype for question, dtype in answers.items() if not getattr(torch.ops.mkldnn, question)()}
    # A machine on which anything may take any time.
    clock = itertools.accumulate(random.Random(1).expovariate(1.0) for _ in itertools.count())
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert {slow_dtypes() for _ in range(20)} == {first}
    # A CPU that has all kernels, and one that has none.
    for question in answers:
        monkeypatch.setattr(torch.ops.mkldnn, question, lambda: True)
    assert slow_dtypes() == frozenset()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert slow_dtypes() == frozenset(_DTYPES)
