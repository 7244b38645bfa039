"""Errors of codecs on what travels, and what is proposed for it: ``--pier-log-codec-errors``."""

import argparse
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, CODECS
from pier_megatron.features.compression import activations, parameters, quantization_error
from pier_megatron.megatron_api import run

_TRIED = [CODECS[name] for name in ("bf16", "int12", "int8", "int4")]


@pytest.fixture(autouse=True)
def training() -> None:
    run.begin()


def block(*numbers: float) -> Tensor:
    return torch.nn.functional.pad(torch.tensor([numbers]), (0, BLOCK - len(numbers)))


def error(codec: str, rows: Tensor) -> float:
    total, count = quantization_error.error(CODECS[codec], rows).tolist()
    return total / count


def test_an_error_is_a_share_of_its_number() -> None:
    # The largest number makes the step 1; zeros have no size to compare with.
    assert quantization_error.error(CODECS["int8"], block(127, 0.4, -1.6, 0)).tolist() == pytest.approx([1 + 0.25, 3])


def test_a_number_that_is_not_finite_takes_its_block_out_of_the_mean() -> None:
    rows = torch.cat([block(127, 1.6), block(float("inf"), 1.6), block(float("nan"), 1.6)], dim=1)
    assert quantization_error.error(CODECS["int8"], rows).tolist() == pytest.approx([0.25, 2])


def test_an_outlier_shows_though_root_mean_squares_hide_it() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 64 * BLOCK)
    plain = error("int4", rows)
    rows[:, ::BLOCK] = 1000
    decoded = quantization_error.decode(CODECS["int4"], quantization_error.encode(CODECS["int4"], rows))
    assert (decoded - rows).norm() / rows.norm() < 0.02
    assert error("int4", rows) > 0.9 > 2 * plain


def logged(iteration: int, interval: int = 2) -> list[str]:
    """The lines after an iteration of one rank."""
    modules: dict[str, Any] = {
        "print_rank_last": (lines := []).append,
        "get_tensorboard_writer": lambda: None,
        "get_model_parallel_group": lambda: None,
    }

    def training_log(losses: Any, iteration: int) -> None: ...

    with (
        mock.patch.object(quantization_error.versions, "megatron_args", return_value=argparse.Namespace(log_interval=interval)),
        mock.patch.object(quantization_error.versions, "require", lambda module, name: modules[name]),
        mock.patch.object(quantization_error.dist, "all_reduce"),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    ):
        quantization_error.log(training_log, {}, iteration)
    return lines


def send(*tensors: Tensor) -> None:
    names = ("tensor_send_next", "tensor_recv_next", "tensor_send_prev")
    activations.transfer(lambda **given: {}, **dict(zip(names, (tensors[0], torch.full((4,), 9.0), tensors[1]), strict=True)))


def test_what_is_logged_is_of_one_iteration_and_of_all_that_was_sent() -> None:
    quantization_error.try_codecs({"pp": _TRIED})
    send(torch.full((3,), 5.0), torch.full((3,), 5.0))
    assert logged(1) == []
    send(torch.tensor([127, 1.6]), torch.tensor([127, 0.8, 0, 1.25]))
    [line, proposed] = logged(2)
    # Errors of int8: 0, 0.25; 0, 0.25, 0.2.
    assert "in pp (activations and their gradients between pipeline stages)" in line
    assert f"int8 {0.7 / 5:.2%}" in line
    assert proposed == " fewest bits within 10%: --pier-compress pp=int12"
    assert not quantization_error.is_due("pp")
    assert logged(3) == []
    assert quantization_error.is_due("pp")
    assert not quantization_error.is_due("dp")
    assert logged(4) == []


def test_what_is_proposed() -> None:
    means = {
        "dp": {"bf16": 0.001, "int12": 0.005, "int8": 0.045, "int4": 0.4},
        "pp": {"int12": 0.05, "int8": 0.2, "int4": 0.5},
        "gather": {"int12": 0.2, "int8": 0.3, "int4": 0.5},
        "tp": {"bf16": 0.001, "int12": 0.01, "int8": 0.02, "int4": 0.1},
    }
    assert quantization_error.table(means)[-1].endswith("--pier-compress dp=int8,pp=int12,tp=int4")
    assert len(quantization_error.table({"pp": {"int4": 0.5}})) == 1
    assert quantization_error.table({}) == []


def test_many_numbers_are_looked_at_in_parts() -> None:
    quantization_error.try_codecs({"dp": _TRIED})
    torch.manual_seed(0)
    rows = torch.randn(1, 8 * BLOCK)
    quantization_error.measure("dp", [rows])
    whole = logged(2)
    with mock.patch.object(quantization_error, "_AT_ONCE", 3 * BLOCK):
        logged(1)
        quantization_error.measure("dp", [rows[:, : 2 * BLOCK], rows[:, 2 * BLOCK :]])
    assert len(whole) == 2
    assert logged(2) == whole


def test_a_rank_measures_its_own_part_of_the_parameters() -> None:
    quantization_error.try_codecs({"gather": _TRIED})
    # Of two parameters in two parts the second rank has the end of the first, and the second: each begins a block.
    own = torch.tensor([127, 1.6, 0.016, 127e-2])
    bucket = mock.Mock(param_data=torch.cat([torch.full((4,), 0.3), own]), grad_data=None)
    first, second = mock.Mock(), mock.Mock()
    bucket.param_to_index = {first: (0, 6), second: (6, 8)}
    group = mock.Mock(**{"rank.return_value": 1, "size.return_value": 2})
    bucket_group = mock.Mock(buckets=[bucket], intra_distributed_optimizer_instance_group=group)
    parameters.start(lambda _: None, bucket_group)
    # Errors of int8: 0, 0.25; 0.25, 0.
    assert f"int8 {0.5 / 4:.2%}" in logged(2)[0]
