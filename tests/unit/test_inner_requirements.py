"""What an inner optimizer needs that is not there, and what it does not take over."""

import argparse
from unittest import mock

import pytest
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from pier_megatron.errors import PierConfigError
from pier_megatron.integration import refusals
from pier_megatron.integration.inner.whole import WholeOptimizer
from pier_megatron.megatron_api import versions


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
