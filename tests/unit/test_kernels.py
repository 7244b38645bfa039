"""The kernels against plain PyTorch: in Triton's interpreter on a CPU, as they are on a GPU; and compiled without one."""

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import one_gpu
import pytest
import torch

pytest.importorskip("triton")

from pier_megatron import PierConfig
from pier_megatron.exchange import coding
from pier_megatron.exchange import kernels as codec_kernels
from pier_megatron.exchange.codecs import BLOCK, CODECS, Codec
from pier_megatron.exchange.collectives import GroupExchange, Residual, Sum
from pier_megatron.outer import OuterLoop, Shards, arithmetic
from pier_megatron.outer import kernels as step_kernels
from pier_megatron.outer.participants import DrawnParticipants, Participants
from pier_megatron.outer.rules import Nesterov
from pier_megatron.outer.staging import Part
from pier_megatron.outer.state import Chunk

DEVICE = one_gpu.device()
LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]

in_interpreter = pytest.mark.skipif(DEVICE.type != "cpu", reason="Triton's interpreter runs on a CPU")


def rows(number: int, blocks: int, value: float | None = None) -> torch.Tensor:
    """Rows of blocks of very different sizes, one of zeros; perhaps with an unusual number in the last row."""
    generator = torch.Generator().manual_seed(number * blocks)
    found = torch.randn(number, blocks * BLOCK, generator=generator)
    found *= torch.logspace(-6, 2, blocks).repeat_interleave(BLOCK)
    # Halves of steps, which are rounded to even numbers: of integers and, in all places or in the scale, of BF16.
    found[0, :BLOCK] = torch.arange(BLOCK) - 63.5
    found[0, BLOCK : 2 * BLOCK] = 1 + 2**-8
    found[-1, (blocks - 1) * BLOCK :] = 0
    if value is not None:
        found[number // 2, (blocks // 2) * BLOCK + 5] = value
    return found


def bits(payloads: torch.Tensor, name: str) -> torch.Tensor:
    """Payloads to compare: PyTorch has several nans of BF16, by where a number is in a vector."""
    if CODECS[name].scale_bytes == 4:
        return payloads
    numbers = payloads.view(torch.bfloat16) if name == "bf16" else scales(payloads, name)
    return torch.where(numbers.isnan(), torch.full_like(numbers, 7), numbers).view(torch.int16)


def scales(payloads: torch.Tensor, name: str) -> torch.Tensor:
    found = payloads.clone()
    integers = payloads.shape[1] // CODECS[name].nbytes(BLOCK) * BLOCK * CODECS[name].bits // 8
    return found[:, integers:].view(torch.bfloat16)


SHAPES = [(1, 1), (3, 9), (2, 17)]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [None, float("nan"), -float("inf"), 3e38])
def test_payloads_are_the_same_bits(name: str, shape: tuple[int, int], value: float | None) -> None:
    codec, original = CODECS[name], rows(*shape, value)
    expected, found = coding.encode_plainly(codec, original), codec_kernels.encode(codec, original.to(DEVICE)).cpu()
    assert torch.equal(bits(found, name), bits(expected, name))
    if codec.scaled:
        whole = shape[1] * BLOCK * codec.bits // 8
        assert torch.equal(found[:, :whole], expected[:, :whole])
        decoded = codec_kernels.decode(codec, found.to(DEVICE)).cpu()
        torch.testing.assert_close(decoded, coding.decode_plainly(codec, expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("shape", SHAPES)
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


SIZES = (3, 1500, 0, 1, 1024, 700)
STEPS = [(0.5, 0.75), (0.5, 0.0), (0.0, 1.0)]


def part(numbers: str) -> Part:
    """A chunk over pieces of odd sizes: of integers, on which a step of halves and quarters is exact, or of any numbers."""
    generator = torch.Generator().manual_seed(1)

    def new(numel: int) -> torch.Tensor:
        if numbers == "integers":
            return torch.randint(-64, 64, (numel,), generator=generator).float()
        return torch.randn(numel, generator=generator)

    pieces = [new(size) for size in SIZES]
    tensors = {name: new(sum(SIZES)) for name in ("anchor", "momentum", "own", "shared")}
    return Part(Chunk(0, 0, Shards(pieces), pieces), tensors)


def on_device(original: Part) -> Part:
    pieces = [piece.clone().to(DEVICE) for piece in original.chunk.pieces]
    tensors = {name: tensor.clone().to(DEVICE) for name, tensor in original.tensors.items()}
    return Part(Chunk(0, 0, Shards(pieces), pieces), tensors)


@contextlib.contextmanager
def kernels_running() -> Iterator[None]:
    with mock.patch.object(arithmetic, "runs_kernels", return_value=True):
        yield


@pytest.mark.parametrize("numbers", ["integers", "any"])
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_what_is_sent_is_the_same_bits(numbers: str, counts: bool, weight: float) -> None:
    plain = part(numbers)
    if not counts:
        plain.chunk.pieces[1][7] = float("nan")
    fused, rule = on_device(plain), Nesterov(0.5, 0.75)
    arithmetic.subtract(plain, counts, rule, weight)
    with kernels_running():
        arithmetic.subtract(fused, counts, rule, weight)
        assert torch.equal(fused.shared.cpu(), plain.shared)
        arithmetic.subtract(fused, counts)
    assert torch.equal(fused.own.cpu(), plain.own)


@pytest.mark.parametrize("numbers", ["integers", "any"])
@pytest.mark.parametrize(("mu", "eta"), STEPS)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("keeps_progress", [False, True])
@pytest.mark.parametrize("counts", [True, False])
def test_step_is_the_same(numbers: str, mu: float, eta: float, size: int, keeps_progress: bool, counts: bool) -> None:
    plain, rule, counted = part(numbers), Nesterov(mu, eta), max(1, size // 2)
    arithmetic.subtract(plain, counts)
    fused = on_device(plain)
    expected = arithmetic.descend(plain, rule, size, counts, counted, keeps_progress)
    with kernels_running():
        found = arithmetic.descend(fused, rule, size, counts, counted, keeps_progress)
    # Sums are in another order; the last bits of the others differ where PyTorch fuses a product and a sum.
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-3)
    tolerance = {"rtol": 0, "atol": 0} if numbers == "integers" else {"rtol": 1e-6, "atol": 1e-6}
    pairs = [(fused.anchor, plain.anchor), (fused.momentum, plain.momentum)]
    for ours, theirs in pairs + list(zip(fused.chunk.pieces, plain.chunk.pieces, strict=True)):
        torch.testing.assert_close(ours.cpu(), theirs, **tolerance)
    assert torch.equal(torch.cat(fused.chunk.pieces), fused.anchor) or keeps_progress


def test_alone_without_momentum_the_parameters_stay_as_they_are() -> None:
    fused = on_device(part("any"))
    before = torch.cat(fused.chunk.pieces)
    with kernels_running():
        arithmetic.subtract(fused, True, Nesterov(0.0, 1.0))
        arithmetic.descend(fused, Nesterov(0.0, 1.0), 1, True, 1, keeps_progress=False)
    assert torch.equal(torch.cat(fused.chunk.pieces), before)
    assert torch.equal(fused.anchor, before)


class _HeavyBall(Nesterov):
    def update(self, staged: Part, is_alone: bool) -> None:
        staged.momentum.mul_(self.mu).add_(staged.shared)
        staged.anchor.sub_(staged.momentum, alpha=self.eta)


def test_a_rule_without_kernels_takes_its_own_steps() -> None:
    plain, rule = part("integers"), _HeavyBall(0.5, 0.75)
    fused = on_device(plain)
    arithmetic.subtract(plain, True, rule)
    arithmetic.descend(plain, rule, 2, True, 2, keeps_progress=False)
    with kernels_running():
        arithmetic.subtract(fused, True, rule)
        arithmetic.descend(fused, rule, 2, True, 2, keeps_progress=False)
    for name, tensor in plain.tensors.items():
        assert torch.equal(fused.tensors[name].cpu(), tensor)


def test_a_codec_without_kernels_is_encoded_in_pytorch() -> None:
    original, other = rows(2, 3).to(DEVICE), Codec("other", bits=16)
    with (
        mock.patch.object(coding, "runs_kernels", return_value=True),
        mock.patch.object(codec_kernels, "encode", side_effect=AssertionError),
    ):
        assert torch.equal(coding.encode(other, original), coding.encode_plainly(other, original))
        with pytest.raises(AssertionError):
            coding.encode(CODECS["bf16"], original)


class _Twins(GroupExchange):
    """Two groups that always say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.groups = 2, (0, 1)

    def sum(self, vectors: Sequence[torch.Tensor], residuals: Sequence[Residual | None] = (), exactly: bool = False) -> Sum:
        for vector in vectors:
            vector.mul_(2.0)
        return Sum()


def trained(**settings: Any) -> list[torch.Tensor]:
    """Parameters, outer state and the report's numbers after some outer steps."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.randn(size, generator=generator).to(DEVICE) for size in (5, 1, 17, 600)]
    common = {"groups": 2, "sync_interval": 2, "lazy_start_iters": 2, "preset": "pier-rising"}
    config = PierConfig(train_iters=8, **(common | settings))
    reports = []
    with (
        mock.patch.object(PierConfig, "chunk_numel_on", return_value=400),
        mock.patch.object(DrawnParticipants, "at", Participants.at),
    ):
        loop = OuterLoop([[Shards(parameters)]], config, _Twins(), report=reports.append)
        for iteration in range(1, config.train_iters + 1):
            loop.begin_iteration(iteration)
            for parameter in parameters:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(DEVICE), alpha=0.1)
            loop.end_iteration()
    numbers = [[report.pseudo_gradient_norm, report.cosine_mean, report.momentum_norm or 0.0] for report in reports]
    assert numbers
    states = [flat for state in loop.states for flat in state.flats.values()]
    return [tensor.cpu() for tensor in (*parameters, *states, torch.tensor(numbers))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"offload": True},
        {"overlap": 1, "fragments": 2},
        {"overlap": 1, "offload": True},
        {"preset": "noloco"},
    ],
    ids=str,
)
def test_runs_are_the_same_with_kernels(settings: dict[str, Any]) -> None:
    with mock.patch.object(arithmetic, "runs_kernels", return_value=False):
        expected = trained(**settings)
    with kernels_running():
        found = trained(**settings)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


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


@in_interpreter
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


@in_interpreter
@pytest.mark.parametrize(("overlaps", "loads", "stores"), [(False, 6, 4), (True, 7, 4)])
def test_steps_read_and_write_everything_once(overlaps: bool, loads: int, stores: int) -> None:
    """Blocking: two loads and a store to send, four and three to apply; overlapped, the pseudo-gradient is kept and loaded."""
    fused, rule, numel = on_device(part("any")), Nesterov(0.5, 0.75), sum(SIZES)
    with _Traffic().counted() as traffic, kernels_running():
        arithmetic.subtract(fused, True, None if overlaps else rule)
        arithmetic.descend(fused, rule, 2, True, 2, keeps_progress=overlaps)
    programs = sum(-(-size // 1024) for size in SIZES)
    assert traffic.loaded == 4 * numel * loads
    assert traffic.stored == 4 * numel * stores + 4 * arithmetic.PRODUCTS * programs


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    script = Path(__file__).with_name("compiled_kernels.py")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_every_kernel_is_compiled_at_the_start_and_none_later(compiled: dict[str, Any]) -> None:
    functions = sorted(name.split()[0] for name in compiled["at start"])
    expected = {"_decode": sum(CODECS[name].scaled for name in LOSSY), "_descend": 2, "_encode": 2 * len(LOSSY), "_subtract": 1}
    assert {name: len(list(some)) for name, some in itertools.groupby(functions)} == expected
    assert compiled["later"] == []
    assert compiled["launched"] > 100


def test_kernels_are_code_for_the_gpu_without_fused_products(compiled: dict[str, Any]) -> None:
    assert compiled["binaries"]
    assert compiled["other targets"] == []
    assert compiled["fused"] == []


@pytest.mark.parametrize(
    ("module", "compile_for"),
    [
        (codec_kernels, lambda: coding.compile_for(CODECS["int8"], DEVICE)),
        (step_kernels, lambda: arithmetic.compile_for(DEVICE)),
    ],
)
def test_an_error_of_triton_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, compile_for: Callable[[], None]
) -> None:
    fails = mock.Mock(side_effect=RuntimeError("Failed to find C compiler"))
    for name in ("encode", "subtract"):
        monkeypatch.setattr(module, name, fails, raising=False)
    for user in (coding, arithmetic):
        monkeypatch.setattr(user, "runs_kernels", lambda device: True)
    with pytest.raises(RuntimeError, match="Failed to find C compiler") as raised:
        compile_for()
    assert "Python.h" in raised.value.__notes__[0]


def test_the_number_of_products_is_that_of_the_reference() -> None:
    assert step_kernels._PRODUCTS.value == arithmetic.PRODUCTS
