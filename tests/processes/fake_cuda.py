"""A GPU that is not there: PyTorch's fake tensors on the device ``cuda``, its ``fake`` process group, and what waits for them.

Fake tensors have shapes and no numbers. What a program may not do to a GPU is an error at its line; what it does is counted.
Every number that comes back to the host is a one. Tensors in host memory are real, except for pinned ones.
"""

import collections
import contextlib
import inspect
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton
from streams import is_view
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pier_megatron.exchange import kernels
from pier_megatron.exchange.codecs import BLOCK

_ROOT = Path(__file__).resolve().parents[2]
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default}
_TO = torch.ops.aten._to_copy.default

# Operations that launch nothing.
_NO_KERNELS = ("empty", "new_empty", "lift_fresh")

# What the codecs' kernels store scales as, by bytes.
_SCALES = {2: torch.int16, 4: torch.float32}


class FaultError(AssertionError):
    """Something that fails, waits or reads garbage on a GPU, with its line."""


class FakeGpu(TorchDispatchMode):
    """Watches what runs on the device inside :meth:`watching`.

    Attributes:
        meant: Places where the host may wait for the device, ``file:function`` with their reasons; None for all.
        waits: How often it has waited for what the default stream computes, by place.
        waits_apart: How often it has waited for another stream alone, by place.
        stream: Stream that is the present one.
        launches: How often each operation was launched: of PyTorch by its name, of Triton, and of collectives.
        taken: Bytes of the device that are taken.
        peak: Most of them so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meant: Mapping[str, str] | None = None
        self.waits: collections.Counter[str] = collections.Counter()
        self.waits_apart: collections.Counter[str] = collections.Counter()
        self.stream = self._default = _Stream(self)
        self.launches: collections.Counter[str] = collections.Counter()
        self.taken = self.peak = 0
        self._live: dict[int, int] = {}
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @contextlib.contextmanager
    def watching(self) -> Iterator["FakeGpu"]:
        """Watches, with stand-ins for CUDA's streams and for the launches of Triton's kernels."""
        stand_ins = {
            "Stream": lambda device=None, priority=0: _Stream(self, priority),
            "Event": lambda enable_timing=False: _Event(self),
            "current_stream": lambda device=None: self.stream,
            "stream": self._switched,
            "get_device_capability": lambda device=None: (9, 0),
        }
        launchers = {name: _Kernel(self, getattr(kernels, name)) for name in ("_encode", "_decode")}
        with (
            mock.patch.multiple(torch.cuda, **stand_ins),
            mock.patch.multiple(kernels, **launchers),
            mock.patch.object(FakeWork, "is_completed", return_value=True),
            # One copy, as of a real tensor.
            mock.patch.object(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),
            FakeTensorMode(allow_non_fake_inputs=True),
            self,
        ):
            yield self

    @contextlib.contextmanager
    def _switched(self, stream: "_Stream") -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def wait(self, what: str, stream: "_Stream | None" = None) -> None:
        """Counts that the host waits for a stream, by default the present one; an error where that is not meant."""
        # The caller's place: that of a collective says nothing.
        place, line = _place(passing="pier_megatron/exchange/")
        if self.meant is not None and place not in self.meant:
            raise FaultError(f"{place}, line {line}: {what} waits for the device")
        if stream is None and self.stream is not self._default and self.stream.priority == 0:
            raise FaultError(f"{place}, line {line}: {what} waits on a stream that a communicator of NCCL's may work on")
        (self.waits if (stream or self.stream) is self._default else self.waits_apart)[place] += 1

    def forget(self) -> None:
        """Begins to count again."""
        for counter in (self.waits, self.waits_apart, self.launches):
            counter.clear()

    def fault(self, what: str) -> None:
        """Raises an error with the line that runs."""
        place, line = _place()
        raise FaultError(f"{place}, line {line}: {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "c10d":
            return self._communicate(func, given, args, kwargs)
        if func is torch.ops.aten._pin_memory.default:
            pinned = _for_real(torch.ops.aten.clone.default, args[:1], {})
            self._pinned.add(pinned.untyped_storage())
            return pinned
        makes_fake = kwargs.get("pin_memory") or torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if not makes_fake and not any(isinstance(tensor, FakeTensor) for tensor in given):
            return _for_real(func, args, kwargs)
        if func in _COPIES or (func is _TO and kwargs.get("device") is not None):
            return self._copy(func, args, kwargs)
        if {tensor.device.type for tensor in given if tensor.dim()} == {"cpu", "cuda"}:
            self.fault(f"{func} of tensors in host memory and on the device")
        try:
            return self._counted(func, given, kwargs, func(*args, **kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.wait(str(func))
            found = _for_real(func, tree_map_only(Tensor, _ones, args), kwargs)
            return tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cuda"), found)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy: one between host and device waits, unless told not to, which needs pinned memory."""
        makes_tensor, is_async = func is _TO, kwargs.get("non_blocking") or args[2:3] == (True,)
        sources = tree_leaves(args[0 if makes_tensor else 1])
        kinds = (
            [torch.device(kwargs["device"]).type] if makes_tensor else [tensor.device.type for tensor in tree_leaves(args[0])]
        )
        if crossing := sum(kind != source.device.type for kind, source in zip(kinds, sources, strict=True)):
            on_host = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor) and tensor.device.type == "cpu"]
            if is_async and not all(tensor.untyped_storage() in self._pinned for tensor in on_host):
                self.fault("a copy that is not waited for, to or from host memory that is not pinned")
            for _ in range(0 if is_async else crossing):
                self.wait("a copy between host and device")
        if makes_tensor and kinds == ["cpu"]:
            return _ones(sources[0])
        targets = [] if makes_tensor else tree_leaves(args[0])
        if targets and not any(isinstance(target, FakeTensor) for target in targets):
            _for_real(torch._foreach_copy_, (targets, [_ones(source) for source in sources]), {})
            return args[0]
        result = func(*args, **kwargs)
        # What is written to itself is not copied.
        return result if any(map(_is_same, targets, sources)) else self._counted(func, [*targets, *sources], kwargs, result)

    def _communicate(self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """A collective, which takes tensors of the device without gaps, and sends nothing."""
        for tensor in given:
            if tensor.device.type != "cuda" or not tensor.is_contiguous():
                self.fault(f"{func} of a tensor on {tensor.device} with strides {tensor.stride()}")
        self.launches[func.__name__] += 1
        nothing = _for_real(torch.empty, (0,), {})
        return _for_real(func, tree_map_only(Tensor, lambda tensor: nothing, args), kwargs)

    def _counted(self, func: Any, given: Sequence[Tensor], kwargs: Any, result: Any) -> Any:
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        is_kernel = func.namespace == "aten" and not is_view(func) and not func.__name__.startswith(_NO_KERNELS)
        if is_kernel and any(tensor.device.type == "cuda" for tensor in (*given, *made)):
            self.launches[func.__name__] += 1
        for storage in (tensor.untyped_storage() for tensor in made if tensor.device.type == "cuda"):
            if id(storage) not in self._live:
                self._live[id(storage)] = storage.nbytes()
                self.taken += storage.nbytes()
                self.peak = max(self.peak, self.taken)
                weakref.finalize(storage, self._free, id(storage))
        if kwargs.get("pin_memory"):
            self._pinned.update(tensor.untyped_storage() for tensor in made)
        return result

    def _free(self, storage: int) -> None:
        self.taken -= self._live.pop(storage)


class _Stream:
    """Stand-in of ``torch.cuda.Stream``."""

    def __init__(self, gpu: FakeGpu, priority: int = 0) -> None:
        self._gpu, self.priority = gpu, priority

    def wait_event(self, event: "_Event") -> None:
        assert isinstance(event, _Event)

    def wait_stream(self, stream: "_Stream") -> None:
        assert isinstance(stream, _Stream)

    def record_event(self) -> "_Event":
        event = _Event(self._gpu)
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._gpu.wait("a stream", self)


class _Event:
    """Stand-in of ``torch.cuda.Event``, which is over once somebody has asked."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self._is_over = gpu, False

    def record(self, stream: _Stream | None = None) -> None:
        self._stream = stream or self._gpu.stream

    def query(self) -> bool:
        self._is_over = True
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 0.0

    def synchronize(self) -> None:
        if not self._is_over:
            self._gpu.wait("an event", self._stream)


class _Kernel:
    """Stand-in of a codec's kernel, which checks what it is launched with."""

    def __init__(self, gpu: FakeGpu, kernel: Any) -> None:
        self._gpu, self._name, self._signature = gpu, kernel.fn.__name__, inspect.signature(kernel.fn)

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *args, enable_fp_fusion, **kwargs: self._launch(grid, self._signature.bind(*args, **kwargs).arguments)

    def _launch(self, grid: tuple[int], given: dict[str, Any]) -> None:
        bits, scale_bytes, numel = given["BITS"], given["SCALE_BYTES"], given["blocks"] * BLOCK
        nbytes = numel * bits // 8 + given["blocks"] * scale_bytes
        integers, kept = {16: torch.int16}.get(bits, torch.uint8), given.get("kept")
        wanted = {"rows": (torch.float32, numel), "integers": (integers, nbytes // integers.itemsize)}
        if scale_bytes:
            wanted["scales"] = (_SCALES[scale_bytes], nbytes // scale_bytes)
        if kept:
            wanted["dropped"] = (torch.float32, kept)
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        for name, (dtype, length) in wanted.items():
            tensor = tensors.pop(name)
            found = (tensor.device.type, tensor.is_contiguous(), tensor.dtype, tensor.numel())
            if found != ("cuda", True, dtype, length):
                self._gpu.fault(f"kernel {self._name}: {name} is {found}, must be {('cuda', True, dtype, length)}")
        whole_rows, programs = given["blocks"] % given["blocks_of_row"], triton.cdiv(given["blocks"], given["BLOCKS"])
        if tensors or whole_rows or grid != (programs,) or (kept or 0) > numel:
            self._gpu.fault(f"kernel {self._name}: {grid} programs, {given}")
        self._gpu.launches[f"triton.{self._name}"] += 1


def _for_real(func: Any, args: Any, kwargs: Any) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _ones(tensor: Tensor) -> Tensor:
    """What is read of a tensor without numbers."""
    return _for_real(torch.ones, (tensor.shape,), {"dtype": tensor.dtype})


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage() is other.untyped_storage() and one.storage_offset() == other.storage_offset()


def _place(passing: str = "tests/processes/fake_cuda.py") -> tuple[str, int]:
    """Innermost function of this repository or of Megatron that runs, as ``file:function``, and its line."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        _, installed, file = frame.f_code.co_filename.rpartition("site-packages/")
        if file.startswith("megatron/" if installed else f"{_ROOT}/"):
            place = f"{file.removeprefix(f'{_ROOT}/')}:{frame.f_code.co_qualname}"
            if not place.startswith((passing, "tests/processes/fake_cuda.py")):
                return place, line
    raise AssertionError("no function of this repository runs")


@contextlib.contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of ``size`` ranks; nothing comes from the others."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
