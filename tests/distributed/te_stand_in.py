"""Transformer Engine's FusedAdam on a CPU: the same interface and state, the arithmetic of its kernels in PyTorch.

Megatron takes it for Transformer Engine's where :func:`in_place` is entered; everything else of Transformer Engine is missing
still. Signatures are those of Transformer Engine's releases. What is kept in FP8 is a tensor of bytes here, and a
``Float8Tensor`` there.
"""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from packaging.version import Version
from torch import Tensor

_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_NAMES = ("exp_avg", "exp_avg_sq", "master_param")
_LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}


def _numbers(kept: Tensor) -> Tensor:
    return kept.view(torch.float8_e4m3fn) if kept.dtype == torch.uint8 else kept


class FusedAdam(torch.optim.Optimizer):
    """FusedAdam of Transformer Engine 2.13 and newer."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        assert bias_correction
        assert adam_w_mode
        assert not capturable
        assert not amsgrad
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True})
        self.name_to_dtype_map = dict(zip(_NAMES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True))
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self._scales: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            setattr(parameter, "decoupled_grad" if self.use_decoupled_grad else "grad", None)

    def _begin(self, param: Tensor) -> None:
        self.initialize_state(param, self._has_halves(param))

    def _has_halves(self, param: Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        kept = self.state[param][state_name]
        halves = state_name == "master_param" and self._has_halves(param)
        assert kept.dtype == (torch.int16 if halves else self.name_to_dtype_map[state_name])
        if kept.dtype in _LARGEST:
            return _numbers(kept).float() * self._scales[param][state_name]
        return kept.float() if kept.dtype == torch.bfloat16 and not skip_unscale else kept

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        halves = state_name == "master_param" and self._has_halves(param)
        assert unscaled_state.dtype == (torch.int16 if halves else torch.float32)
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, False, halves)
        kept = self.state[param][state_name]
        if kept.dtype in _LARGEST:
            scale = self._scales[param][state_name]
            scale.copy_(unscaled_state.abs().max() / _LARGEST[kept.dtype])
            # In place, as Transformer Engine does: the caller's tensor is overwritten.
            unscaled_state.mul_(torch.where(scale > 0, scale.reciprocal(), 0))
        _numbers(kept).copy_(unscaled_state)

    def _initialize_state(
        self, param: Tensor, state_name: str, zero_buffer: bool, store_param_remainders: bool = False
    ) -> None:
        dtype = self.name_to_dtype_map[state_name]
        if store_param_remainders:
            self.state[param][state_name] = torch.zeros_like(param, dtype=torch.int16)
        else:
            # What is not zero is garbage until it is set.
            self.state[param][state_name] = kept = torch.empty_like(param, dtype=dtype)
            _numbers(kept).copy_(torch.tensor(0.0 if zero_buffer else float("nan")))
        if dtype != torch.float32:
            self._scales.setdefault(param, {})[state_name] = torch.ones(1)

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in _NAMES[:2]:
            self._initialize_state(param, name, zero_buffer=True)
        if self.master_weights:
            self._initialize_state(param, "master_param", False, store_param_remainders)
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", param.detach().float().clone())

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        of_number = dict(enumerate(parameter for group in self.param_groups for parameter in group["params"]))
        unscaled = {
            number: {name: self.get_unscaled_state(of_number[number], name) for name in tensors}
            for number, tensors in state["state"].items()
        }
        return {**state, "state": unscaled}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, tensors in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {}
            for name, tensor in tensors.items():
                halves = name == "master_param" and self._has_halves(parameter)
                self.set_scaled_state(parameter, name, tensor.clone() if halves else tensor.float().clone())

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self._begin(parameter)
                gradient = getattr(parameter, "decoupled_grad" if self.use_decoupled_grad else "grad", None)
                if gradient is not None:
                    self._step(parameter, gradient.float(), group)

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        # The kernel computes in FP32 whatever is kept.
        (beta1, beta2), t = group["betas"], group["step"]
        mean, square = (self.get_unscaled_state(parameter, name).clone() for name in _NAMES[:2])
        mean.mul_(beta1).add_(gradient * (1 - beta1))
        square.mul_(beta2).add_(gradient * gradient * (1 - beta2))
        for name, moment in zip(_NAMES[:2], (mean, square), strict=True):
            self.set_scaled_state(parameter, name, moment.clone())
        update = (mean / (1 - beta1**t)) / ((square / (1 - beta2**t)).sqrt() + group["eps"])
        is_master = self.master_weights and parameter.dtype != torch.float32
        if not is_master:
            parameter.sub_(group["lr"] * (update + group["weight_decay"] * parameter))
            return
        kept = self.state[parameter]["master_param"]
        if kept.dtype != torch.int16:
            master = self.get_unscaled_state(parameter, "master_param").clone()
            master.sub_(group["lr"] * (update + group["weight_decay"] * master))
            parameter.copy_(master)
            self.set_scaled_state(parameter, "master_param", master)
            return
        # As the kernel does, half by half, in another way than the plugin's.
        high = parameter.view(torch.int16) - (kept < 0).short()
        master = torch.stack([kept, high], dim=-1).view(torch.float32).squeeze(-1)
        master.sub_(group["lr"] * (update + group["weight_decay"] * master))
        low, high = master.unsqueeze(-1).view(torch.int16).unbind(-1)
        kept.copy_(low)
        parameter.view(torch.int16).copy_(high + (low < 0).short())


class FusedAdamOf20(FusedAdam):
    """FusedAdam of Transformer Engine 1.13 to 2.0: without halves, and without BF16 moments."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            use_decoupled_grad=use_decoupled_grad,
        )
        assert torch.bfloat16 not in self.name_to_dtype_map.values()
        del self.store_param_remainders

    def _begin(self, param: Tensor) -> None:
        self.initialize_state(param)

    def _has_halves(self, param: Tensor) -> bool:
        return False

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        return super().get_unscaled_state(param, state_name)

    def _initialize_state(self, param: Tensor, state_name: str, zero_buffer: bool, _: bool = False) -> None:
        super()._initialize_state(param, state_name, zero_buffer)

    def initialize_state(self, param: Tensor) -> None:
        super().initialize_state(param, False)


@contextlib.contextmanager
def in_place(version: str = "2.13") -> Iterator[None]:
    """Inside, Megatron finds the FusedAdam of a release of Transformer Engine, and nothing else of it."""
    adam = FusedAdamOf20 if Version(version) < Version("2.1") else FusedAdam
    modules = {name: types.ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    modules["transformer_engine.pytorch.optimizers"] = module = types.ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = adam  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        stack.enter_context(mock.patch("megatron.core.utils._te_version", Version(version)))
        stack.enter_context(mock.patch.multiple("megatron.core.optimizer", Adam=adam, USING_PYTORCH_OPTIMIZER=False))
        flags = {"HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True, "Adam": adam}
        stack.enter_context(mock.patch.multiple(_DISTRIBUTED, **flags))
        yield


@contextlib.contextmanager
def halves_rounded_up() -> Iterator[None]:
    """Inside, Megatron rounds FP32 main parameters to BF16 as Transformer Engine does where it keeps the lower half.

    A number half-way between two goes away from zero there, and to the even one in PyTorch.
    """
    distributed = importlib.import_module(_DISTRIBUTED).DistributedOptimizer
    copy = distributed._copy_main_params_to_model_params

    def rounding(optimizer: Any) -> None:
        copy(optimizer)
        models, mains = optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups
        for model, main in (pair for groups in zip(models, mains, strict=True) for pair in zip(*groups, strict=True)):
            if main is not None:
                at = optimizer._get_model_param_range_map(model)["param"]
                bits = main.detach().view(torch.int32)
                model.detach().view(-1)[at.start : at.end].view(torch.int16).copy_((bits + 0x8000) >> 16)

    with mock.patch.object(distributed, "_copy_main_params_to_model_params", rounding):
        yield
