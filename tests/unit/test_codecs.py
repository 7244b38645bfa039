"""What the wire does to numbers."""

import one_gpu
import pytest
import torch
from streams import is_view
from torch.utils._python_dispatch import TorchDispatchMode

from pier_megatron.exchange.codecs import BLOCK, CODECS
from pier_megatron.exchange.coding import decode, encode
from pier_megatron.exchange.encoded import saves_bytes

LOSSY = ["bf16", "int12", "int8", "int4", "int2", "int1"]
DEVICE = one_gpu.device()


def rows(blocks: int = 9, number: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(number, blocks * BLOCK, generator=generator) * torch.logspace(-6, 2, blocks).repeat_interleave(BLOCK)
    return values.to(DEVICE)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_what_is_said(name: str) -> None:
    assert encode(CODECS[name], rows()).shape == (3, CODECS[name].nbytes(9 * BLOCK))


@pytest.mark.parametrize(
    ("name", "share"), [("bf16", 0.5), ("int12", 0.383), ("int8", 0.27), ("int4", 0.14), ("int2", 0.067), ("int1", 0.036)]
)
def test_share_of_the_bytes_of_fp32(name: str, share: float) -> None:
    assert CODECS[name].nbytes(BLOCK) <= share * CODECS["fp32"].nbytes(BLOCK)


def test_fp32_loses_nothing() -> None:
    assert torch.equal(decode(CODECS["fp32"], encode(CODECS["fp32"], rows())), rows())


@pytest.mark.parametrize(("name", "steps"), [("int12", 2047), ("int8", 127), ("int4", 7), ("int2", 2), ("int1", 1)])
def test_integers_are_off_by_half_a_step_of_their_block_at_most(name: str, steps: int) -> None:
    codec, original = CODECS[name], rows()
    error = (decode(codec, encode(codec, original)) - original).abs().view(3, -1, BLOCK).amax(2)
    step = original.view(3, -1, BLOCK).abs().amax(2) / steps
    # The scale of one and two bits is rounded to bf16.
    assert (error <= 0.51 * step).all()
    assert error.any()


def test_bf16_keeps_eight_bits() -> None:
    codec, original = CODECS["bf16"], rows()
    assert ((decode(codec, encode(codec, original)) - original).abs() <= 2**-8 * original.abs()).all()


@pytest.mark.parametrize("name", CODECS)
def test_a_row_is_encoded_as_it_would_be_alone(name: str) -> None:
    codec, original = CODECS[name], rows()
    payloads = encode(codec, original)
    assert torch.equal(payloads, torch.cat([encode(codec, row[None]) for row in original]))
    assert torch.equal(decode(codec, payloads), torch.cat([decode(codec, payload[None]) for payload in payloads]))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_still_seen_and_stays_in_its_block(name: str, value: float) -> None:
    original = rows(blocks=3, number=1)
    original[0, BLOCK + 5] = value
    decoded = decode(CODECS[name], encode(CODECS[name], original))
    assert not decoded[0, BLOCK + 5].isfinite()
    assert decoded[0, :BLOCK].isfinite().all()
    assert decoded[0, 2 * BLOCK :].isfinite().all()


@pytest.mark.parametrize(
    ("numel", "dtype", "name", "parts", "saves"),
    [
        (1024, torch.float32, "int8", 1, True),
        (1024, torch.bfloat16, "int8", 1, True),
        (1024, torch.bfloat16, "int12", 1, True),
        (1024, torch.bfloat16, "bf16", 1, False),
        (1024, torch.float32, "fp32", 1, False),
        # Filled up to a block, it is no smaller.
        (8, torch.float32, "int8", 1, False),
        (256, torch.float32, "int8", 8, False),
        (1024, torch.int64, "int8", 1, False),
    ],
)
def test_what_is_worth_encoding(numel: int, dtype: torch.dtype, name: str, parts: int, saves: bool) -> None:
    assert saves_bytes(CODECS[name], torch.zeros(numel, dtype=dtype), parts) == saves


class _Operations(TorchDispatchMode):
    """Counts what would be kernels on a GPU: all operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not is_view(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CODECS)
def test_more_groups_take_no_more_kernels(name: str) -> None:
    numbers = []
    for groups in (1, 4, 64):
        original = rows(number=groups)
        with _Operations() as operations:
            decode(CODECS[name], encode(CODECS[name], original))
        numbers.append(operations.number)
    assert numbers[0] == numbers[1] == numbers[2] <= 30
