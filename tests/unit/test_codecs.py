"""What the wire does to numbers."""

import one_gpu
import pytest
import torch

from pier_megatron.exchange.codecs import BLOCK, CODECS

LOSSY = ["bf16", "int8", "int4"]
DEVICE = one_gpu.device()


def vector(blocks: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(blocks * BLOCK, generator=generator) * torch.logspace(-6, 2, blocks).repeat_interleave(BLOCK)
    return values.to(DEVICE)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_what_is_said(name: str) -> None:
    assert CODECS[name].encode(vector()).nbytes == CODECS[name].nbytes(9 * BLOCK)


@pytest.mark.parametrize(("name", "share"), [("bf16", 0.5), ("int8", 0.27), ("int4", 0.14)])
def test_share_of_the_bytes_of_fp32(name: str, share: float) -> None:
    assert CODECS[name].nbytes(BLOCK) <= share * CODECS["fp32"].nbytes(BLOCK)


def test_fp32_loses_nothing() -> None:
    assert torch.equal(CODECS["fp32"].decode(CODECS["fp32"].encode(vector())), vector())


@pytest.mark.parametrize(("name", "steps"), [("int8", 127), ("int4", 7)])
def test_integers_are_off_by_half_a_step_of_their_block_at_most(name: str, steps: int) -> None:
    codec, original = CODECS[name], vector()
    error = (codec.decode(codec.encode(original)) - original).abs().view(-1, BLOCK).amax(1)
    step = original.view(-1, BLOCK).abs().amax(1) / steps
    assert (error <= 0.5001 * step).all()
    assert error.any()


def test_bf16_keeps_eight_bits() -> None:
    codec, original = CODECS["bf16"], vector()
    assert ((codec.decode(codec.encode(original)) - original).abs() <= 2**-8 * original.abs()).all()


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name: str) -> None:
    zeros = torch.zeros(2 * BLOCK, device=DEVICE)
    assert torch.equal(CODECS[name].decode(CODECS[name].encode(zeros)), zeros)


@pytest.mark.parametrize("name", LOSSY)
def test_encoding_what_was_decoded_changes_nothing(name: str) -> None:
    codec = CODECS[name]
    once = codec.decode(codec.encode(vector()))
    torch.testing.assert_close(codec.decode(codec.encode(once)), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_payloads_can_start_anywhere(name: str) -> None:
    codec, original = CODECS[name], vector(1)
    payload = codec.encode(original)
    shifted = torch.cat([payload.new_zeros(3), payload])[3:]
    assert torch.equal(codec.decode(shifted), codec.decode(payload))
