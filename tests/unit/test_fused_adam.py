"""What FusedAdam keeps as main parameters, and what is refused with it."""

import argparse
import itertools
from unittest import mock

import pytest
import te_stand_in
import torch

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.integration import refusals
from pier_megatron.integration.inner.precision_aware import FusedAdamMasters
from pier_megatron.integration.inner.requirements import keeps_main_parameters, scaled
from pier_megatron.outer.share import Share
from pier_megatron.outer.state import OuterState, Shards

_FP32 = torch.float32


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [{}, {"chunk_numel": 4}, {"chunk_numel": 4, "fragments": 2}])
def test_outer_state_over_scaled_main_parameters(layout: dict[str, int], parameters: torch.dtype) -> None:
    def adam() -> te_stand_in.FusedAdam:
        return te_stand_in.FusedAdam(model, master_weights=True, master_weight_dtype=torch.float16, store_param_remainders=True)

    sizes = (5, 8, 10)
    model = [torch.randn(size).to(parameters) for size in sizes]
    masters = FusedAdamMasters(adam(), takes_whole=True)
    state = OuterState([Shards(model, stored=masters)], **layout)
    whole = adam()

    def scaled_at_once(values: torch.Tensor) -> torch.Tensor:
        for tensor, part in zip(model, values.clone().split(sizes), strict=True):
            whole.set_scaled_state(tensor, "master_param", part)
        return torch.cat([whole.get_unscaled_state(tensor, "master_param") for tensor in model])

    small = 1e-6 * torch.randn(23)
    for values in (small, 1000 * small):
        state.set_parameters(values)
        assert torch.equal(state.copy_parameters_to(torch.empty(23)), scaled_at_once(values))
        assert torch.equal(torch.cat(model), values.to(parameters))
    fragments = layout.get("fragments", 1)
    ends = [13, 23] if fragments == 2 else [23]
    for fragment, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        before, moved = state.copy_parameters_to(torch.empty(23)), torch.randn(23)
        for chunk in (chunk for chunk in state.chunks if chunk.fragment == fragment):
            chunk.move_parameters(chunk.of(moved))
        after = state.copy_parameters_to(torch.empty(23))
        assert torch.equal(after[start:end], scaled_at_once(before + moved)[start:end])
        assert torch.equal(after[:start], before[:start])
        assert torch.equal(after[end:], before[end:])


@pytest.mark.parametrize("chunk_numel", [7, 10])
def test_scaled_main_parameter_that_was_written_in_part(chunk_numel: int) -> None:
    parameter = torch.nn.Parameter(torch.randn(20).bfloat16())
    adam = te_stand_in.FusedAdam([parameter], master_weights=True, master_weight_dtype=torch.float16)
    config = PierConfig(train_iters=100, groups=2)
    with mock.patch.object(PierConfig, "chunk_numel_on", return_value=chunk_numel):
        share = Share([[Shards([parameter], stored=FusedAdamMasters(adam, takes_whole=True))]], config, GroupExchange())
    parameter.grad = torch.randn_like(parameter)
    adam.step()
    [state] = share.states
    first, *_ = state.chunks
    values = state.parameters_on_host()
    first.set_parameters(first.of(torch.ones(20)))
    for written in (values, values + 1):
        state.set_parameters(written)
        assert torch.allclose(state.parameters_on_host(), written, rtol=2**-10, atol=1e-6)


def test_every_number_is_its_halves() -> None:
    # All upper halves, with lower halves around half-way, where FusedAdam rounds up.
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    bits = ((torch.arange(2**16).unsqueeze(1) << 16) | lower).flatten()
    values = torch.where(bits < 2**31, bits, bits - 2**32).int().view(torch.float32)
    model = torch.zeros(len(values), dtype=torch.bfloat16)
    adam = te_stand_in.FusedAdam([model], master_weights=True, store_param_remainders=True)
    masters = FusedAdamMasters(adam)
    masters.write(model, slice(None), values)
    assert torch.equal(masters.read(model, slice(None)).view(torch.int32), values.view(torch.int32))
    # Nearest, half-way away from zero. A NaN may become another number there, and is one only with its lower half.
    numbers = values.isfinite()
    rounded = (values.view(torch.int32) + 0x8000).bitwise_and(-0x10000).view(torch.float32)
    assert torch.equal(model.float()[numbers], rounded[numbers])
    # What the stand-in's step makes of the halves, it reads in its own way.
    model.grad = torch.zeros_like(model)
    adam.step()
    after = masters.read(model, slice(None))
    assert torch.equal(after[numbers], values[numbers])


@pytest.mark.slow
def test_derived_flag_is_that_of_megatron() -> None:
    from megatron.core.optimizer import OptimizerConfig

    recipes = (None, "delayed", "tensorwise", "blockwise", "mxfp8")
    with te_stand_in.in_place():
        for (aware, main), recipe in itertools.product(((False, _FP32), (True, _FP32), (True, torch.float16)), recipes):
            given = {"use_precision_aware_optimizer": aware, "fp8_recipe": recipe, "main_params_dtype": main}
            config = OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, **given)
            derived = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            assert keeps_main_parameters(argparse.Namespace(**given)) == derived


_BARE = {"bf16": True, "fp8": None, "fp8_recipe": "delayed", "use_precision_aware_optimizer": True}
_IN_FP16 = {"main_params_dtype": torch.float16}
_SCALED = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.uint8}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (_SCALED | {"fp8_recipe": "blockwise"}, "--fp8-recipe blockwise with --exp-avg-dtype fp16 and --exp-avg-sq-dtype fp8"),
        ({"dist_ckpt_optim_fully_reshardable": True}, "cannot read them back"),
        ({"dist_ckpt_optim_fully_reshardable": True, "bf16": False}, None),
        ({"fp4_param_gather": True}, "--fp4-param-gather with main parameters in FusedAdam"),
        (_IN_FP16 | {"fp8_param_gather": True, "fp8_recipe": "mxfp8"}, "--fp8-param-gather with main parameters in FusedAdam"),
        ({"fp8_param_gather": True, "fp8_recipe": "mxfp8"}, None),
        (_IN_FP16, None),
        (_IN_FP16 | _SCALED | {"fp8_recipe": "blockwise"}, None),
        (_IN_FP16 | {"dist_ckpt_optim_fully_reshardable": True}, None),
        (_SCALED, None),
        ({"exp_avg_dtype": "bf16", "fp8_recipe": "blockwise"}, None),
        ({"dist_ckpt_optim_fully_reshardable": True, "fp8_recipe": "blockwise"}, None),
        (_SCALED | {"use_precision_aware_optimizer": False, "main_params_dtype": "fp16", "fp8_recipe": "blockwise"}, None),
    ],
)
def test_refused_beside_it(given: dict[str, object], message: str | None) -> None:
    args = argparse.Namespace(**_BARE | given)
    if message is None:
        refusals.refuse_what_cannot_work(args)
        return
    with pytest.raises(PierConfigError, match=message):
        refusals.refuse_what_cannot_work(args)


def test_what_is_scaled_is_named() -> None:
    given = _BARE | _SCALED | {"main_params_dtype": torch.float32}
    assert scaled(argparse.Namespace(**given)) == ["--exp-avg-dtype fp16", "--exp-avg-sq-dtype fp8"]
    for typed in ("fp16", torch.float16):
        given = _BARE | {"main_params_dtype": typed}
        assert scaled(argparse.Namespace(**given)) == ["--main-params-dtype fp16"]
        assert scaled(argparse.Namespace(**given | {"use_precision_aware_optimizer": False})) == []
