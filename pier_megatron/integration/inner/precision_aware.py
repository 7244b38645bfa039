"""Main parameters and moments that Transformer Engine's FusedAdam keeps in its state (``--use-precision-aware-optimizer``).

Of an FP32 main parameter of a bf16 model it keeps the lower half, an int16: the upper half is the model's parameter, rounded up
where the lower half is negative. Together they are that FP32 number, bit for bit (``transformer_engine/common/multi_tensor/
adam.cu``). Of FP16 models, and before Transformer Engine 2.1, it keeps the FP32 number.

With ``--main-params-dtype fp16`` it keeps an FP16 number of every main parameter, and a scale for each tensor by its largest.
"""

import types
from typing import Any, Self

import torch
from torch import Tensor

MASTER = "master_param"
"""Name of a main parameter among the tensors of FusedAdam."""

_HALF = 16


class FusedAdamMasters:
    """Main parameters in the state of a FusedAdam, known by the parts of the model's parameters that it steps.

    It makes its state in the first step, from the model's parameters, which are the main parameters until then. So weights may
    still be loaded into the model.
    """

    def __init__(self, fused_adam: Any, takes_whole: bool = False) -> None:
        """Wraps one; ``takes_whole`` if it scales main parameters, see :class:`pier_megatron.outer.chunks.Stored`."""
        self._adam, self.takes_whole = fused_adam, takes_whole
        # What has been written of main parameters that cannot be scaled yet, and the number of elements that are missing.
        self._incomplete: dict[Tensor, tuple[Tensor, int]] = {}

    @classmethod
    def unstepped(cls) -> Self:
        """Those of a job that has not been started."""
        return cls(types.SimpleNamespace(state={}))

    def read(self, parameter: Tensor, at: slice) -> Tensor:
        """Returns a stretch of a main parameter; see :class:`pier_megatron.outer.chunks.Stored`."""
        part = parameter.detach().view(-1)[at]
        # FP32 parameters it steps in place, whatever its state says of them.
        if MASTER not in self._adam.state.get(parameter, {}) or parameter.dtype == torch.float32:
            return part.float()
        kept: Tensor = self._adam.get_unscaled_state(parameter, MASTER).view(-1)[at]
        if kept.dtype != torch.int16:
            return kept.float()
        bits = part.view(torch.int16).int()
        # An upper half that was rounded up is one too large, and a negative lower half takes that back.
        return bits.bitwise_left_shift_(_HALF).add_(kept).view(torch.float32)

    def write(self, parameter: Tensor, at: slice, values: Tensor) -> None:
        """Writes a stretch of a main parameter, and of the model's; see :class:`pier_megatron.outer.chunks.Stored`."""
        part, values = parameter.detach().view(-1)[at], values.to(parameter.device)
        if parameter.dtype == torch.float32:
            part.copy_(values)
            return
        if MASTER not in self._adam.state.get(parameter, {}):
            self._make_state(parameter)
        kept = self._adam.state[parameter][MASTER].view(-1)[at]
        if kept.dtype == torch.int16:
            bits = values.contiguous().view(torch.int32)
            kept.copy_(bits)
            part.view(torch.int16).copy_(bits.sub(kept).bitwise_right_shift_(_HALF))
            return
        part.copy_(values)
        if self.takes_whole:
            self._collect(parameter, at, values)
        else:
            kept.copy_(values)

    def _collect(self, parameter: Tensor, at: slice, values: Tensor) -> None:
        """Writes a stretch of a scaled main parameter once all of it is there: the scale is by the largest element."""
        if not at.start:
            # Restarts, whatever an error has left of it.
            self._incomplete[parameter] = (
                torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device),
                parameter.numel(),
            )
        whole, missing = self._incomplete.pop(parameter)
        whole.view(-1)[at].copy_(values)
        missing -= values.numel()
        if missing:
            self._incomplete[parameter] = whole, missing
        else:
            self._adam.set_scaled_state(parameter, MASTER, whole)

    def _make_state(self, parameter: Tensor) -> None:
        """Makes the state of a parameter that has not been stepped, as FusedAdam would in the first step."""
        # From 2.1 on, whether a parameter has a lower half is an argument.
        has_halves = getattr(self._adam, "store_param_remainders", None)
        is_half = () if has_halves is None else (has_halves and parameter.dtype == torch.bfloat16,)
        self._adam.initialize_state(parameter, *is_half)
