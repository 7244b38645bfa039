"""Errors of codecs on what travels, and what is proposed for it: ``--pier-log-codec-errors``."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pier_megatron.exchange.codecs import BLOCK, CODECS
from pier_megatron.experiments.compression import activations, gradients, quantization_error, tensor_parallel, traffic
from pier_megatron.megatron_api import run

_TRIED = [CODECS[name] for name in ("bf16", "int12", "int8", "int4")]


@pytest.fixture(autouse=True)
def training() -> Iterator[None]:
    run.begin()
    yield
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


def taken(iteration: int, step: Callable[[], None], interval: int = 2) -> tuple[list[str], dict[str, float]]:
    """What is logged of an iteration, the other rank of the replica having sent as much without any error."""
    scalars: dict[str, float] = {}
    modules: dict[str, Any] = {
        "print_rank_last": (lines := []).append,
        "get_tensorboard_writer": lambda: mock.Mock(add_scalar=lambda name, value, _: scalars.update({name: value})),
        "get_model_parallel_group": lambda: "replica",
    }

    def all_reduce(sums: Tensor, group: str) -> None:
        assert group == "replica"
        sums[:, 1] *= 2

    def train_step(iteration: int) -> None:
        step()

    def training_log(losses: Any, iteration: int) -> None: ...

    versions = quantization_error.versions
    with (
        mock.patch.object(versions, "megatron_args", return_value=argparse.Namespace(log_interval=interval, iteration=0)),
        mock.patch.object(versions, "require", lambda module, name: modules[name]),
        mock.patch.object(quantization_error.dist, "all_reduce", all_reduce),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    ):
        quantization_error.step(train_step, iteration=iteration - 1)
        traffic.log(training_log, {}, iteration)
    return lines, scalars


def send(*tensors: Tensor) -> None:
    """Sends like a stage between two others: received tensors, and lengths that vary, are not measured."""
    given = {"tensor_send_next": tensors[0], "tensor_send_prev": tensors[1], "tensor_recv_next": torch.full((4,), 9.0)}
    activations.transfer(lambda **given: {}, **given, length_send_next=torch.tensor([1, 300, 7]))


def test_what_is_logged_is_of_one_iteration_and_of_all_that_was_sent() -> None:
    quantization_error.try_codecs({"pp": _TRIED})
    assert taken(1, lambda: send(torch.full((3,), 5.0), torch.full((3,), 7.0))) == ([], {})
    # An evaluation.
    send(torch.full((3,), 5.0), torch.full((3,), 5.0))
    [line, proposed], scalars = taken(2, lambda: send(torch.tensor([127, 1.6]), torch.tensor([127, 0.8, 0, 1.25])))
    # Errors of int8: 0, 0.25; 0, 0.25, 0.2.
    assert "in pp (activations and their gradients between pipeline stages)" in line
    assert f"int8 {0.7 / 10:.2%}" in line
    assert proposed == " fewest bits within 10%: --pier-compress pp=int8"
    assert scalars["codecs/pp error of int8"] == pytest.approx(0.7 / 10)
    # Skipped, or at rest.
    assert taken(4, lambda: None) == ([], {})
    assert not quantization_error.is_due("pp")


def test_an_iteration_that_fails_measures_nothing_later() -> None:
    quantization_error.try_codecs({"pp": _TRIED})

    def fail() -> None:
        raise RuntimeError

    with contextlib.suppress(RuntimeError):
        taken(2, fail)
    assert not quantization_error.is_due("pp")


def test_what_is_proposed() -> None:
    means = {
        "dp": {"bf16": 0.001, "int12": 0.005, "int8": 0.045, "int4": 0.4},
        "pp": {"int12": 0.05, "int8": 0.2, "int4": 0.5},
        "gather": {"int12": 0.2, "int8": 0.3, "int4": 0.5},
        "tp": {"bf16": 0.001, "int12": 0.01, "int8": 0.02, "int4": 0.1},
    }
    proposed = "--pier-compress dp=int8,pp=int12,tp=int4"
    assert quantization_error.table(means, None)[-1].endswith(f"{proposed}; none for gather")
    # Pasted, it takes the place of a policy.
    assert quantization_error.table(means, CODECS["int4"])[-1].endswith(f"{proposed},outer=int4; none for gather")
    assert quantization_error.table({"pp": {"int4": 0.5}}, CODECS["int8"])[-1] == " fewest bits within 10%: none for pp"
    assert quantization_error.table({}, CODECS["int8"]) == []


def test_many_numbers_are_looked_at_in_parts() -> None:
    quantization_error.try_codecs({"dp": _TRIED})
    torch.manual_seed(0)
    rows = torch.randn(2, 8 * BLOCK)
    whole = taken(2, lambda: quantization_error.measure("dp", [rows]))
    with mock.patch.object(quantization_error, "_AT_ONCE", 6 * BLOCK):
        assert taken(2, lambda: quantization_error.measure("dp", [rows[:, : 2 * BLOCK], rows[:, 2 * BLOCK :]])) == whole
    assert len(whole[0]) == 2


class _Group:
    """A group of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize(("size", "is_sent"), [(1, False), (2, True)])
def test_what_a_rank_alone_sums_is_not_sent(size: int, is_sent: bool) -> None:
    quantization_error.try_codecs({"tp": _TRIED})
    group: Any = _Group(size)

    def sum_alone() -> None:
        tensor_parallel.sum_encoded(lambda tensor, group: tensor, torch.tensor([127, 1.6]), group)

    lines, _ = taken(2, sum_alone)
    assert bool(lines) == is_sent
    reduction = gradients._Reduction(torch.ones(4), group, torch.distributed.ReduceOp.SUM)
    with mock.patch.object(gradients, "pieces_of", return_value=["pieces"]):
        assert bool(gradients._laid_out(mock.Mock(), reduction)[1]) == is_sent
