"""How copies of quantised parameters are compared: by codes and scales, alone and in a group of experts."""

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import fp8_utils
from quantised_parameters import RECIPES, QuantizedTensor

from pier_megatron.integration.copies import bits_of


class Group(torch.Tensor):
    """Several quantised tensors, as one parameter holds them."""

    rowwise_data: torch.Tensor
    quantized_tensors: list[QuantizedTensor]


def grouped(members: list[QuantizedTensor]) -> Any:
    group = torch.zeros(len(members), 8, 96).as_subclass(Group)
    group.rowwise_data, group.quantized_tensors = torch.zeros(1, dtype=torch.uint8), members
    return group


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_codes_and_scales_are_compared(recipe: str, is_grouped: bool) -> None:
    values = torch.linspace(-1, 2, 8 * 96).reshape(8, 96)

    def made(place: str | None = None) -> Any:
        quantised = RECIPES[recipe].of(values)
        if place is not None:
            getattr(quantised, place).view(-1)[-1] += 1
        return grouped([RECIPES[recipe].of(values), quantised]) if is_grouped else quantised

    with mock.patch.multiple(
        fp8_utils,
        HAVE_TE_FP8_TENSOR_CLASS=True,
        FP8_TENSOR_CLASS=QuantizedTensor,
        HAVE_TE_GROUPED_TENSOR_CLASS=True,
        GroupedTensor=Group,
    ):
        kind = RECIPES[recipe]
        sums = [int(bits_of(made(place))) for place in (None, None, kind.DATA, kind.SCALES)]
    assert sums[0] == sums[1]
    assert len({*sums}) == 3
