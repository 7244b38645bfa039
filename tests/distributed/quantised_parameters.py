"""Transformer Engine's quantised parameters on a CPU: a stand-in for its tensors, and a look at what each forward pass sees.

The stand-in follows the interface that ``megatron.core.fp8_utils`` and ``fp4_utils`` ask for. Both are executed once more with
it instead of Transformer Engine, so that Megatron's own code quantises and gathers parameters and gives them storage. Formats
are simpler than Transformer Engine's: what has to be there after which call is the same, values are not.
"""

import contextlib
import functools
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import fp4_utils, fp8_utils
from megatron.core import utils as megatron_utils
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.distributed import distributed_c10d

from pier_megatron.integration import current
from pier_megatron.integration.inner.choice import commit_main_parameters, owners
from pier_megatron.integration.own_world import own_data_parallel_ranks

_FP8 = torch.float8_e4m3fn
_aten = torch.ops.aten


class QuantizedTensor(torch.Tensor):
    """Codes of a byte or half of one, and a scale for each block of numbers; elsewhere it computes as a BF16 tensor.

    Attributes:
        DATA: Name of the codes, uint8: of the shape of the tensor, or half as long if they are packed.
        SCALES: Name of the scales by which codes are multiplied, float32, one for each block.
        BLOCK: Consecutive numbers that share a scale; 0 if all do.
        columnwise: Codes and scales for the backward pass, made from the others once they are gathered; empty before.
    """

    DATA, SCALES, BLOCK = "_data", "_scale_inv", 0
    columnwise: list[Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, data: Tensor, scales: Tensor, shape: Sequence[int]) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=data.device)
        setattr(made, cls.DATA, data)
        setattr(made, cls.SCALES, scales)
        made.columnwise = []
        return made

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """Quantises whole values."""
        blocks = -(-values.numel() // (cls.BLOCK or values.numel()))
        made = cls(cls.pack(torch.zeros(values.shape, dtype=torch.uint8)), torch.zeros(blocks), values.shape)
        made.copy_(values)
        return made

    def quantise(self, part: Tensor | None, start: int, group: dist.ProcessGroup | None) -> None:
        """Writes the codes of a part of the values, which begins at ``start``, and all scales; called by the whole group."""
        scales = getattr(self, self.SCALES)
        largest = torch.zeros_like(scales)
        if part is not None:
            values = part.detach().reshape(-1).bfloat16().float()
            of_block = (torch.arange(start, start + values.numel()) // (self.BLOCK or self.numel())).clamp(max=len(scales) - 1)
            largest.scatter_reduce_(0, of_block, values.abs().nan_to_num(math.inf), "amax")
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scales.copy_(self.scale(largest))
        if part is not None:
            codes = self.unpack(getattr(self, self.DATA).reshape(-1).clone())
            codes[start : start + values.numel()] = self.encode(values / scales[of_block])
            getattr(self, self.DATA).reshape(-1).copy_(self.pack(codes))

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values that codes and scales stand for."""
        codes, scales = self.unpack(getattr(self, self.DATA).reshape(-1)), getattr(self, self.SCALES)
        of_block = torch.arange(codes.numel()) // (self.BLOCK or codes.numel())
        return (self.decode(codes) * scales[of_block]).reshape(self.shape).to(dtype or torch.bfloat16)

    def stored(self) -> list[Tensor]:
        """All that the forward and the backward pass read."""
        return [getattr(self, self.DATA).reshape(-1), getattr(self, self.SCALES), *self.columnwise]

    @staticmethod
    def scale(largest: Tensor) -> Tensor:
        return largest.clamp(min=1e-12) / torch.finfo(_FP8).max

    @staticmethod
    def encode(values: Tensor) -> Tensor:
        return values.to(_FP8).view(torch.uint8)

    @staticmethod
    def decode(codes: Tensor) -> Tensor:
        return codes.view(_FP8).float()

    @staticmethod
    def pack(codes: Tensor) -> Tensor:
        return codes

    @staticmethod
    def unpack(packed: Tensor) -> Tensor:
        return packed

    def _alias(self, shape: Sequence[int]) -> Any:
        made = type(self)(getattr(self, self.DATA), getattr(self, self.SCALES), shape)
        made.columnwise = self.columnwise
        return made

    # Another tensor over the same codes, like Transformer Engine's.
    data = property(lambda self: self._alias(self.shape))  # type: ignore[assignment]

    def untyped_storage(self) -> Any:
        """None of its own: what writes a checkpoint then takes a copy, which is not quantised, as from a device."""
        return torch.empty(0).untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _aten.detach.default or function is _aten.alias.default:
            return args[0]._alias(args[0].shape)
        if function is _aten.view.default and math.prod(args[1]) == args[0].numel() and len(args[1]) > 1:
            return args[0]._alias(args[1])
        if function is _aten.copy_.default and isinstance(args[0], QuantizedTensor):
            args[0].quantise(args[1], 0, None)
            post_all_gather_processing([args[0]])
            return args[0]
        plain = torch.utils._pytree.tree_map_only(QuantizedTensor, lambda tensor: tensor.dequantize(), (args, kwargs or {}))
        return function(*plain[0], **plain[1])


class Float8Tensor(QuantizedTensor):
    """One scale for a tensor."""


class Float8BlockwiseQTensor(QuantizedTensor):
    """A scale for a block."""

    DATA, SCALES, BLOCK = "_rowwise_data", "_rowwise_scale_inv", 96


class MXFP8Tensor(QuantizedTensor):
    """A power of two for each 32 numbers, and storage that cannot be replaced."""

    DATA, SCALES, BLOCK = "_rowwise_data", "_rowwise_scale_inv", 32

    @staticmethod
    def scale(largest: Tensor) -> Tensor:
        return torch.exp2(torch.ceil(torch.log2(QuantizedTensor.scale(largest))))


class NVFP4Tensor(QuantizedTensor):
    """Two numbers in a byte, whole numbers from -7 to 7, and a scale for each 16 of them."""

    DATA, SCALES, BLOCK = "_rowwise_data", "_rowwise_scale_inv", 16

    @staticmethod
    def scale(largest: Tensor) -> Tensor:
        return largest.clamp(min=1e-12) / 7

    @staticmethod
    def encode(values: Tensor) -> Tensor:
        return (values.nan_to_num(8).round() + 8).clamp(0, 15).to(torch.uint8)

    @staticmethod
    def decode(codes: Tensor) -> Tensor:
        return codes.float() - 8

    @staticmethod
    def pack(codes: Tensor) -> Tensor:
        return codes[..., ::2] | codes[..., 1::2] << 4

    @staticmethod
    def unpack(packed: Tensor) -> Tensor:
        return torch.stack([packed & 15, packed >> 4], dim=-1).flatten()


RECIPES = {"tensorwise": Float8Tensor, "blockwise": Float8BlockwiseQTensor, "mxfp8": MXFP8Tensor, "nvfp4": NVFP4Tensor}


def cast(
    parameters: Sequence[QuantizedTensor],
    mains: Sequence[Tensor | None],
    starts: Sequence[int | None],
    group: dist.ProcessGroup,
    manual_post_all_gather_processing: bool,
) -> None:
    """Quantises the parts of main parameters that this rank has, each with the scales of the whole."""
    assert manual_post_all_gather_processing
    for parameter, main, start in zip(parameters, mains, starts, strict=True):
        assert not isinstance(parameter, MXFP8Tensor), "not in Transformer Engine either"
        parameter.quantise(main, start or 0, group)
        # Until all codes are there.
        parameter.columnwise.clear()


def replace_raw_data(parameter: QuantizedTensor, storage: Tensor) -> None:
    """Moves the codes to another place."""
    if isinstance(parameter, MXFP8Tensor):
        raise NotImplementedError("not in Transformer Engine either")
    storage.copy_(getattr(parameter, parameter.DATA))
    setattr(parameter, parameter.DATA, storage)


def post_all_gather_processing(parameters: Sequence[QuantizedTensor]) -> None:
    """Makes what the backward pass reads."""
    for parameter in parameters:
        parameter.columnwise[:] = [tensor.clone() for tensor in parameter.stored()[:2]]


@contextlib.contextmanager
def autocast(enabled: bool, fp8_recipe: str, fp8_group: dist.ProcessGroup) -> Iterator[None]:
    """Reduces the largest values, here of 500 tensors, from which a delayed recipe takes its next scales."""
    yield
    if enabled and fp8_recipe == "delayed" and torch.is_grad_enabled():
        dist.all_reduce(torch.ones(500), dist.ReduceOp.MAX, group=fp8_group)


def _modules() -> dict[str, types.ModuleType]:
    """The modules of Transformer Engine that Megatron imports for quantised parameters."""
    tensor = {"QuantizedTensor": QuantizedTensor}
    utils = {
        "cast_master_weights_to_fp8": cast,
        "post_all_gather_processing": post_all_gather_processing,
        "quantize_master_weights": cast,
        "replace_raw_data": replace_raw_data,
    }
    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": "2.9.0"},
        ".pytorch": {"fp8_autocast": autocast, "fp8_model_init": lambda enabled: contextlib.nullcontext()},
        ".pytorch.fp8": {"FP8GlobalStateManager": None},
        ".pytorch.tensor": tensor,
        ".pytorch.tensor.utils": utils,
        ".pytorch.tensor.mxfp8_tensor": {"MXFP8Tensor": MXFP8Tensor},
        ".pytorch.tensor.nvfp4_tensor": {"NVFP4Tensor": NVFP4Tensor},
    }
    modules = {f"transformer_engine{name}": types.ModuleType(f"transformer_engine{name}") for name in contents}
    for module, content in zip(modules.values(), contents.values(), strict=True):
        module.__path__ = []
        vars(module).update(content)
    modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]  # type: ignore[attr-defined]
    return modules


def stand_in(recipe: str) -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """Runs a training whose linear layers have quantised parameters, and compares all parameters after each forward pass."""

    @contextlib.contextmanager
    def standing_in(directory: Path) -> Iterator[None]:
        wrap = Float16Module.__init__

        @functools.wraps(wrap)
        def quantising(module: Any, *args: Any, **kwargs: Any) -> None:
            wrap(module, *args, **kwargs)
            _quantise(module, RECIPES[recipe])
            module.register_forward_hook(lambda *_: _compare_with_mains(module.training))

        modules = _modules()
        try:
            # Nothing that is imported meanwhile may go with them.
            sys.modules.update(modules)
            with (
                contextlib.ExitStack() as stack,
                mock.patch.object(megatron_utils, "_te_version", None),
                mock.patch.object(Float16Module, "__init__", quantising),
                mock.patch.object(param_and_grad_buffer, "dist_all_gather_func", _gather),
            ):
                _execute_again()
                stack.enter_context(mock.patch.object(fp8_utils, "get_fp8_recipe", lambda config: config.fp8_recipe))
                stack.enter_context(mock.patch.object(transformer_block, "get_fp8_context", fp8_utils.get_fp8_context))
                yield
        finally:
            for name in modules:
                del sys.modules[name]
            _execute_again()

    return standing_in


def _execute_again() -> None:
    """Lets Megatron look for Transformer Engine again; functions that others have imported look names up in the same place."""
    for module in (fp8_utils, fp4_utils):
        importlib.reload(module)


def _gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
    """Gathers at once: codes and BF16 parameters that are gathered together gloo takes for numbers of one type."""
    together = distributed_c10d._world.pg_coalesce_state
    others = together.pop(group)
    dist.all_gather_into_tensor(whole, part, group=group)
    together[group] = others


def _quantise(model: torch.nn.Module, kind: type[QuantizedTensor]) -> None:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        # Not the last layer, as with Transformer Engine.
        is_output = module is getattr(model.module, "output_layer", None)
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear) or weight is None or is_output:
            continue
        quantised = torch.nn.Parameter(kind.of(weight.detach()))
        vars(quantised).update({name: value for name, value in vars(weight).items() if name not in vars(quantised)})
        initial = weight.detach().clone()
        vars(quantised)["get_high_precision_init_val"] = lambda initial=initial: initial
        vars(quantised)["clear_high_precision_init_val"] = lambda: None
        del module.weight
        module.register_parameter("weight", quantised)


def _compare_with_mains(is_training: bool) -> None:
    """Records how many parameters are not what the group's main parameters say, in codes and scales, forward and backward."""
    pier, recorder = current.pier_optimizer(), importlib.import_module("recorder").recorder
    if pier is None:
        return
    parameters = [parameter for chunk in pier.model_chunks for parameter in chunk.parameters()]
    whole = [torch.zeros(parameter.numel()) for parameter in parameters]
    places = {id(parameter): main for parameter, main in zip(parameters, whole, strict=True)}
    for owner in owners(pier):
        for parameter, main in owner.parameters():
            owned = owner.optimizer._get_model_param_range_map(parameter)["param"]
            places[id(parameter)][owned.start : owned.end] = main.detach()
    # Bits, because a sum of numbers loses the sign of a zero.
    bits = torch.cat(whole).view(torch.int32)
    # Not Megatron's present data-parallel group: in the lazy start and in evaluation that is the one of all groups.
    dist.all_reduce(bits, group=owners(pier)[0].optimizer.data_parallel_group)
    mains = bits.view(torch.float32).split([parameter.numel() for parameter in parameters])
    stale = sum(not _is_of(*pair) for pair in zip(parameters, mains, strict=True))
    recorder.record.setdefault("stale forwards", []).append((recorder.iteration, is_training, stale))


def _is_of(parameter: Tensor, main: Tensor) -> bool:
    """Whether a parameter of the model is what the whole main parameter says."""
    if not isinstance(parameter, QuantizedTensor):
        return _same_bits(parameter.detach().reshape(-1), main.bfloat16())
    stored, expected = parameter.stored(), type(parameter).of(main.reshape(parameter.shape)).stored()
    return len(stored) == len(expected) and all(map(_same_bits, stored, expected))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def a_scale_drifts(directory: Path) -> Any:
    """One data-parallel rank of each group has other scales to the same codes."""

    def commit(members: Any, model_chunks: Any) -> None:
        commit_main_parameters(members, model_chunks)
        if own_data_parallel_ranks().rank() == 1:
            for parameter in model_chunks[0].parameters():
                if isinstance(parameter, QuantizedTensor):
                    getattr(parameter, parameter.SCALES).mul_(2)

    return mock.patch("pier_megatron.integration.training.commit_main_parameters", commit)
