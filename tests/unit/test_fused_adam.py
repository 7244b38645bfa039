"""What FusedAdam keeps as main parameters, how copies are compared, and what inner optimizers need and refuse."""

import argparse
import itertools
from typing import Any
from unittest import mock

import pytest
import te_stand_in
import torch
from megatron.core import fp8_utils
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.training.models import dist_utils
from quantised_parameters import RECIPES, QuantizedTensor

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.integration import refusals
from pier_megatron.integration.copies import bits_of
from pier_megatron.integration.inner import layer_wise
from pier_megatron.integration.inner.precision_aware import FusedAdamMasters
from pier_megatron.integration.inner.requirements import keeps_main_parameters, scaled
from pier_megatron.integration.inner.whole import WholeOptimizer
from pier_megatron.megatron_api import versions
from pier_megatron.outer.chunks import Shards
from pier_megatron.outer.share import Share
from pier_megatron.outer.state import OuterState

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


@pytest.mark.parametrize("parameters", [torch.float32, torch.float16])
def test_main_parameters_that_are_no_halves(parameters: torch.dtype) -> None:
    model, values = torch.randn(23).to(parameters), torch.randn(23)
    masters = FusedAdamMasters(te_stand_in.FusedAdam([model], master_weights=True, use_decoupled_grad=True))
    masters.write(model, slice(None), values)
    assert torch.equal(masters.read(model, slice(None)), values)
    assert torch.allclose(model.float(), values, rtol=2**-8, atol=0)


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


def given(**changes: object) -> argparse.Namespace:
    settings = {
        "pier_inner_optimizer": "muon",
        "fp16": False,
        "bf16": True,
        "use_distributed_optimizer": False,
        "use_layer_wise_param_layout": True,
        "expert_model_parallel_size": 1,
    }
    return argparse.Namespace(**settings | changes)


def test_what_is_there_is_enough() -> None:
    for settings in ({}, {"use_distributed_optimizer": True}, {"pier_inner_optimizer": None, "fp16": True}):
        refusals.refuse_for_inner_optimizer(given(**settings))


def test_buffers_of_a_model_builder_are_laid_out_for_the_layer_wise_optimizer() -> None:
    matrix, bias = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    stock = DistributedDataParallelConfig(use_distributed_optimizer=False)

    def wrap(model: object, random_init: bool, ddp_config: DistributedDataParallelConfig) -> tuple[object, bool]:
        return dist_utils.DistributedOptimizer, ddp_config.use_distributed_optimizer

    found = layer_wise.lay_out(wrap, [mock.Mock(parameters=lambda: [matrix, bias])], False, ddp_config=stock)
    assert found == (LayerWiseDistributedOptimizer, True)
    assert [parameter.is_managed_by_layer_wise_optimizer for parameter in (matrix, bias)] == [True, False]
    assert (dist_utils.DistributedOptimizer, stock.use_distributed_optimizer) == (DistributedOptimizer, False)


def test_layer_wise_optimizer_without_a_layout_is_refused() -> None:
    built = LayerWiseDistributedOptimizer.__new__(LayerWiseDistributedOptimizer)
    built.chained_optimizers = []
    for is_laid_out, ranks in ((True, 2), (False, 1)):
        built.use_buffer_param_sync, built.dp_cp = is_laid_out, mock.Mock(size=lambda ranks=ranks: ranks)
        layer_wise.check_laid_out(built)
    built.dp_cp = mock.Mock(size=lambda: 2)
    with pytest.raises(PierConfigError, match=r"the 2 data-parallel ranks .* unequal length.*or drop --use-distributed-opt"):
        layer_wise.check_laid_out(mock.Mock(chained_optimizers=[built]))


def test_package_that_is_missing_is_named() -> None:
    with (
        mock.patch.object(refusals.importlib.util, "find_spec", return_value=None),
        pytest.raises(
            PierConfigError, match=r"--pier-inner-optimizer muon needs the package emerging-optimizers.*pip"
        ) as refused,
    ):
        refusals.refuse_for_inner_optimizer(given(fp16=True, use_distributed_optimizer=True, bf16=False))
    # All at once.
    assert len(refused.value.args) == 3


@pytest.mark.parametrize("name", ["fp8_param_gather", "fp4_param_gather"])
def test_quantised_gather_is_refused_of_whole_matrices_and_where_it_is_not_finished(name: str) -> None:
    refusals.refuse_for_inner_optimizer(given(pier_inner_optimizer="adam", **{name: True}))
    with pytest.raises(PierConfigError, match=rf"--{name.replace('_', '-')} cannot be used with --pier-inner-optimizer muon: "):
        refusals.refuse_for_inner_optimizer(given(**{name: True}))
    args = argparse.Namespace(fp8=None, fp8_recipe=None, **{name: True})
    with (
        mock.patch.object(versions, "megatron_version", return_value="0.18.2"),
        pytest.raises(PierConfigError, match=rf"--{name.replace('_', '-')} cannot be used with --optimizer pier: before 0\.19"),
    ):
        refusals.refuse_what_cannot_work(args)
    with mock.patch.object(versions, "megatron_version", return_value="0.20.0"):
        refusals.refuse_what_cannot_work(args)


def test_release_without_a_layout_is_named() -> None:
    with (
        mock.patch.object(versions, "megatron_version", return_value="0.17.1"),
        pytest.raises(PierConfigError, match=r"before 0\.18.* Use Megatron 0\.18 or newer"),
    ):
        refusals.refuse_for_inner_optimizer(given(use_distributed_optimizer=True))
    with mock.patch.object(versions, "megatron_version", return_value="0.18.2"):
        refusals.refuse_for_inner_optimizer(given(use_distributed_optimizer=True))


def test_other_learning_rates_are_refused_wherever_the_save_fell() -> None:
    """Megatron 0.19 finds groups of parameters by their rates."""
    own = {"params": [], "max_lr": 2e-4, "min_lr": 0.0, "step": 3}
    stock = mock.Mock(float16_groups=[], fp32_from_float16_groups=[], fp32_from_fp32_groups=[])
    stock.optimizer = mock.Mock(param_groups=[own], state={})
    optimizer = WholeOptimizer(stock, is_shared_out=True)
    saved = optimizer.settings()
    optimizer.take_settings(saved)
    if "max_lr" not in param_group_identifier_keys:
        return
    saved["optimizer"]["param_groups"][0]["max_lr"] = 2e-3
    with pytest.raises(PierConfigError, match=r"--lr: parameters had max_lr 0\.002 .* have 0\.0002 now"):
        optimizer.take_settings(saved)


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
