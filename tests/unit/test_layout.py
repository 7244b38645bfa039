"""Blocks that end with their parameters: what a codec makes of a parameter depends on that parameter alone."""

from unittest import mock

import pytest
import torch

from pier_megatron.exchange.codecs import BLOCK, CODECS
from pier_megatron.exchange.coding import decode, encode
from pier_megatron.experiments.compression import layout
from pier_megatron.experiments.compression.layout import pieces


def through(codec: str, buffer: torch.Tensor, parts: int, parameters: list[tuple[int, int]]) -> torch.Tensor:
    """What arrives of a buffer that is cut into parts; where nothing is sent it stays zero."""
    arrived = torch.zeros_like(buffer)
    for piece in pieces(len(buffer), parts, parameters):
        rows = piece.read(buffer.view(parts, -1))
        assert rows.shape == (parts, piece.numel)
        assert piece.numel % BLOCK == 0
        piece.write(decode(CODECS[codec], encode(CODECS[codec], rows)), arrived.view(parts, -1))
    return arrived


# Several parameters, some cut by the end of a part, with room between them and behind them.
_PARAMETERS = [(0, 96), (96, 500), (512, 1024), (1024, 1025), (1088, 1500)]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("blocks_at_once", [1, 2, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_has_one_place(parts: int, blocks_at_once: int, dtype: torch.dtype) -> None:
    buffer = torch.zeros(1536, dtype=dtype)
    for low, high in _PARAMETERS:
        buffer[low:high] = torch.randn(high - low)
    with mock.patch.object(layout, "_PIECE", blocks_at_once * parts * BLOCK):
        assert torch.equal(through("fp32", buffer, parts, _PARAMETERS), buffer)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_neighbours_do_not_matter(codec: str, parts: int) -> None:
    own = torch.randn(1536) * 1e-6
    low, high = _PARAMETERS[1]
    arrived = [torch.zeros(1536)] * 2
    for rank in range(2):
        buffer = torch.randn(1536, generator=torch.Generator().manual_seed(rank)) * 10**rank
        buffer[low:high] = own[low:high]
        arrived[rank] = through(codec, buffer, parts, _PARAMETERS)[low:high]
    assert torch.equal(*arrived)
    # However much larger the neighbours are.
    assert torch.linalg.vector_norm(arrived[0] - own[low:high]) < 0.2 * torch.linalg.vector_norm(own[low:high])


def test_whole_blocks_are_not_copied() -> None:
    buffer = torch.randn(4 * BLOCK)
    [piece] = pieces(4 * BLOCK, 2, [(0, BLOCK), (BLOCK, 4 * BLOCK)])
    assert piece.read(buffer.view(2, -1)).data_ptr() == buffer.data_ptr()
