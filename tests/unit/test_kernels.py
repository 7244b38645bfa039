"""The kernels against plain PyTorch: in Triton's interpreter on a CPU, as they are on a GPU; and compiled without one."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import one_gpu
import pytest
import torch

pytest.importorskip("triton")

from pier_megatron.exchange import coding
from pier_megatron.exchange import kernels as codec_kernels
from pier_megatron.exchange.codecs import BLOCK, CODECS, Codec

pytestmark = pytest.mark.slow

DEVICE = one_gpu.device()
LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]


def rows(number: int, blocks: int, value: float | None = None) -> torch.Tensor:
    """Rows of blocks of very different sizes, one of zeros; perhaps with an unusual number in the last row."""
    generator = torch.Generator().manual_seed(number * blocks)
    found = torch.randn(number, blocks * BLOCK, generator=generator)
    found *= torch.logspace(-6, 2, blocks).repeat_interleave(BLOCK)
    # Halves of steps, which are rounded to even numbers: of integers and, in all places or in the scale, of BF16.
    found[0, :BLOCK] = torch.arange(BLOCK) - 63.5
    found[0, BLOCK : 2 * BLOCK] = 1 + 2**-8
    found[0, 2 * BLOCK : 3 * BLOCK] = 1 + 3 * 2**-8
    found[-1, (blocks - 1) * BLOCK :] = 0
    if value is not None:
        found[number // 2, (blocks // 2) * BLOCK + 5] = value
    return found


def bits(payloads: torch.Tensor, name: str) -> torch.Tensor:
    """Payloads to compare: which nan a scale becomes differs between devices, and in BF16 by where a number is in a vector."""
    integers = 0 if name == "bf16" else payloads.shape[1] // CODECS[name].nbytes(BLOCK) * BLOCK * CODECS[name].bits // 8
    numbers = payloads[:, integers:].clone().view(torch.float32 if CODECS[name].scale_bytes == 4 else torch.bfloat16)
    one_nan = torch.where(numbers.isnan(), torch.full_like(numbers, torch.nan), numbers)
    return torch.cat([payloads[:, : payloads.shape[1] - one_nan.nbytes // len(one_nan)], one_nan.view(torch.uint8)], 1)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("shape", [(1, 1), (3, 9)])
@pytest.mark.parametrize("value", [None, float("nan"), 3e38])
def test_payloads_are_the_same_bits(name: str, shape: tuple[int, int], value: float | None) -> None:
    codec, original = CODECS[name], rows(*shape, value)
    expected, found = coding.encode_plainly(codec, original), codec_kernels.encode(codec, original.to(DEVICE)).cpu()
    assert torch.equal(bits(found, name), bits(expected, name))
    if codec.scaled:
        decoded = codec_kernels.decode(codec, found.to(DEVICE)).cpu()
        torch.testing.assert_close(decoded, coding.decode_plainly(codec, expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("shape", [(1, 1), (3, 9)])
@pytest.mark.parametrize("padding", [0, BLOCK - 1])
def test_error_feedback_is_the_same_bits(name: str, shape: tuple[int, int], padding: int) -> None:
    codec, numel = CODECS[name], shape[0] * shape[1] * BLOCK
    expected_dropped, around = torch.zeros(numel - padding), torch.full((numel + 1,), 1e3, device=DEVICE)
    found_dropped = around[: numel - padding].zero_()
    for seed in range(3):
        original = rows(*shape) + torch.randn(shape[0], shape[1] * BLOCK, generator=torch.Generator().manual_seed(seed))
        original.view(-1)[numel - padding :] = 0
        expected = coding.encode_plainly(codec, original.clone(), expected_dropped)
        found = codec_kernels.encode(codec, original.to(DEVICE), found_dropped).cpu()
        assert torch.equal(found, expected)
        assert torch.equal(found_dropped.cpu(), expected_dropped)
        assert (around[numel - padding :] == 1e3).all()
        assert expected_dropped.any() or len(expected_dropped) == 1


@pytest.mark.parametrize("name", LOSSY)
def test_columns_of_rows_are_encoded_as_if_they_were_all(name: str) -> None:
    columns = rows(3, 9).to(DEVICE)[:, 2 * BLOCK : 5 * BLOCK]
    assert torch.equal(codec_kernels.encode(CODECS[name], columns), codec_kernels.encode(CODECS[name], columns.contiguous()))


def test_a_codec_without_kernels_is_encoded_in_pytorch() -> None:
    original, other = rows(2, 3).to(DEVICE), Codec("other", bits=16)
    with (
        mock.patch.object(coding, "runs_kernels", return_value=True),
        mock.patch.object(codec_kernels, "encode", side_effect=AssertionError),
    ):
        assert torch.equal(coding.encode(other, original), coding.encode_plainly(other, original))
        with pytest.raises(AssertionError):
            coding.encode(CODECS["bf16"], original)


class _Traffic:
    """Counts the bytes that kernels load and store in the interpreter, each place once for each operation."""

    def __init__(self) -> None:
        self.loaded = self.stored = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator["_Traffic"]:
        from triton.runtime.interpreter import InterpreterBuilder, _get_np_dtype

        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def counted_load(builder: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
            self.loaded += len(np.unique(ptrs.data[mask.data])) * np.dtype(_get_np_dtype(ptrs.get_element_ty())).itemsize
            return load(builder, ptrs, mask, *args)

        def counted_store(builder: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
            self.stored += len(np.unique(ptrs.data[mask.data])) * value.data.dtype.itemsize
            return store(builder, ptrs, value, mask, *args)

        with (
            mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
            mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
        ):
            yield self


@pytest.mark.skipif(DEVICE.type != "cpu", reason="Triton's interpreter runs on a CPU")
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("feedback", [False, True])
def test_codecs_read_and_write_everything_once(name: str, feedback: bool) -> None:
    codec, original = CODECS[name], rows(3, 9)
    dropped = torch.zeros(original.numel()) if feedback else None
    fed_back = original.nbytes if feedback else 0
    with _Traffic().counted() as encoding:
        payloads = codec_kernels.encode(codec, original, dropped)
    assert (encoding.loaded, encoding.stored) == (original.nbytes + fed_back, payloads.nbytes + fed_back)
    if codec.scaled:
        with _Traffic().counted() as decoding:
            codec_kernels.decode(codec, payloads)
        assert (decoding.loaded, decoding.stored) == (payloads.nbytes, original.nbytes)


def test_an_error_of_triton_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_kernels, "encode", mock.Mock(side_effect=RuntimeError("Failed to find C compiler")))
    monkeypatch.setattr(coding, "runs_kernels", lambda device: True)
    with pytest.raises(RuntimeError, match="Failed to find C compiler") as raised:
        coding.compile_for(CODECS["int8"], DEVICE)
    assert "Python.h" in raised.value.__notes__[0]
