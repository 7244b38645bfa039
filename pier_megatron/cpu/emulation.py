"""Lets an unmodified Megatron-LM run on a machine without a GPU: CPU tensors, gloo collectives.

Megatron-LM names the device ``cuda`` in hundreds of places. :func:`install` makes those places mean the CPU, so that the
demo and the tests run Megatron's own code, not a mock of it. It is meant for correctness, never for speed, and it is
never installed unless ``--device cpu`` asks for it.

Assumptions and limits:

* One emulated device per process, index 0. Streams and events are empty: everything happens in program order.
* The emulated CUDA generator *is* the CPU's default generator, which is what CPU kernels draw from.
* What needs Transformer Engine (context parallelism, sequence parallelism, FP8) stays out of reach.
* Host memory is emulated device memory, too: what another process gets is a copy, as from a device, and never shared.
"""

import atexit
import contextlib
import functools
import gc
import logging
import os
import types
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils import _device

from pier_megatron.cpu import communicators, products
from pier_megatron.cpu.preparations import silence_missing_extensions

_CPU = torch.device("cpu")

# What makes tensors and takes a device, as functions of torch or methods of its tensors.
_CONSTRUCTORS = frozenset(
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace new_empty "
    "new_empty_strided new_full new_ones new_tensor new_zeros ones ones_like rand rand_like randint randint_like randn "
    "randn_like randperm scalar_tensor tensor tril_indices triu_indices zeros zeros_like".split()
)


def _send_tensors_to_cpu() -> None:
    """Sends every tensor that asks for a CUDA device to the CPU.

    By patches, because a ``TorchFunctionMode`` would slow down every operation of the whole training.
    """
    # What ``with torch.device(...)`` applies to is collected at its first use, and would then be the patches. From here on it
    # applies to what they call, which they cannot reach: the device itself has to be another.
    with _CPU:
        torch.empty(0)
    context = _device.DeviceContext
    made = context.__init__
    context.__init__ = lambda self, device: made(self, _on_cpu(device))  # type: ignore[method-assign]
    for owner in (torch, torch.Tensor):
        for name in _CONSTRUCTORS.intersection(dir(owner)):
            setattr(owner, name, _with_device_on_cpu(getattr(owner, name)))
    to: Callable[..., torch.Tensor] = torch.Tensor.to
    type_of: Callable[..., str | torch.Tensor] = torch.Tensor.type

    @functools.wraps(to)
    def to_cpu(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return to(tensor, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    @functools.wraps(type_of)
    def cuda_type(tensor: torch.Tensor, *args: object, **kwargs: object) -> str | torch.Tensor:
        result = type_of(tensor, *args, **kwargs)
        # Megatron tells dtypes apart by strings such as "torch.cuda.HalfTensor".
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.to = to_cpu  # type: ignore[method-assign,assignment]
    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]
    all_to_all = torch.distributed.all_to_all_single

    @functools.wraps(all_to_all)
    def all_to_all_on_cpu(output: torch.Tensor, input: torch.Tensor, *args: object, **kwargs: object) -> object:
        # Sizes that Megatron takes from a device are numbers by then; here they are still tensors.
        sizes = (size.tolist() if isinstance(size, torch.Tensor) else size for size in args[:2])
        named = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
        return all_to_all(output, input, *sizes, *args[2:], **named)  # type: ignore[arg-type]

    torch.distributed.all_to_all_single = all_to_all_on_cpu
    for name in ("cuda", "pin_memory"):
        setattr(torch.Tensor, name, lambda tensor, *args, **kwargs: tensor)


def _with_device_on_cpu[R](function: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(function)
    def on_cpu(*args: object, **kwargs: object) -> R:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return on_cpu


def _copy_to_other_processes() -> None:
    """Gives other processes copies of tensors, as those that write checkpoints take from a device before training continues."""
    ForkingPickler.register(torch.Tensor, lambda tensor: reductions.reduce_tensor(tensor.detach().clone()))


def _on_cpu(device: object) -> object:
    """Returns the CPU for anything that denotes a CUDA device, and everything else unchanged."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_cuda_name = isinstance(device, str) and device.startswith("cuda")
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    return _CPU if is_index or is_cuda_name or is_cuda else device


class _Stream(torch.cpu.Stream, torch.cpu.Event):
    """A stream or an event of the emulated device, PyTorch's own stand-ins for both: there is nothing to wait for."""

    priority_range = staticmethod(lambda: (0, 0))

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = _CPU

    def wait_event(self, event: "_Stream") -> None: ...

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":  # type: ignore[override]
        return event or _Stream()

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, end: "_Stream") -> float:
        return 0.0


def _as_it_is[F](function: F | None = None, **options: object) -> F | Callable[[F], F]:
    """Stands in for ``torch.compile``, as a function or as a decorator with options."""
    return function if function is not None else lambda decorated: decorated


@functools.cache
def install() -> None:
    """Makes ``torch.cuda`` denote the CPU in this process, once. Call it before Megatron is imported.

    The change is global and permanent for the process, hence for programs that own theirs (the launcher, the tests).
    """
    # Dynamo would trace through the patches below and compile for a device that is not there; Megatron's decorators would
    # import it for that.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.compile = _as_it_is  # type: ignore[assignment]

    stream = _Stream()
    properties = types.SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=0, multi_processor_count=1, warp_size=32, gcnArchName="", uuid=""
    )
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_generators": (torch.default_generator,),
        "_lazy_call": lambda callback, **kwargs: callback(),
        "_lazy_init": lambda: None,
        "memory_stats": lambda device=None: {},
        # Megatron compares parameter types with these and asks isinstance() of them.
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        stand_ins[name] = lambda device=None: 0
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, stand_ins[name])
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args: None)
    torch.accelerator.current_stream = stand_ins["current_stream"]
    torch.accelerator.current_device_index = stand_ins["current_device"]

    silence_missing_extensions()
    # Megatron warns at every draw that the CPU's generator moved along with the GPU's; here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(lambda record: "RNG state" not in record.msg)
    # On a GPU this draws from another generator than dropout does.
    data_loader_iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    data_loader_iterator.__init__ = _keeping_random_state(data_loader_iterator.__init__)  # type: ignore[method-assign]
    # Megatron leaves its process groups to the interpreter's exit, which may tear gloo's threads down while they run.
    atexit.register(_destroy_process_groups)
    # Python would look for garbage among all objects that importing Megatron made, again and again: a second for every rank.
    atexit.register(gc.freeze)
    _send_tensors_to_cpu()
    _copy_to_other_processes()
    products.install()
    communicators.install()


def is_installed() -> bool:
    """Whether ``torch.cuda`` denotes the CPU in this process."""
    return install.cache_info().currsize > 0


def _keeping_random_state[**P](function: Callable[P, None]) -> Callable[P, None]:
    """Undoes what a function does to the random state: a data loader draws a seed for its workers when it starts."""

    @functools.wraps(function)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> None:
        state = torch.get_rng_state()
        function(*args, **kwargs)
        torch.set_rng_state(state)

    return keeping


def _destroy_process_groups() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
