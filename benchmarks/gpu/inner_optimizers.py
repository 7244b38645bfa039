"""Inner optimizers alone: what state they keep for FP32 main parameters, and whether a stored state continues exactly."""

import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import inventory
import one_gpu
import torch
from table import Row, Rows, checked
from torch import Tensor

_NEEDED = {"exp_avg", "exp_avg_sq"}
_STEPS, _STOP = 6, 3
_SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def _fused_adam(module: str) -> Make:
    return lambda parameters: importlib.import_module(module).FusedAdam(parameters, **_SETTINGS)


# By name: the module that must be there, whether it needs a GPU, and how it is made.
_OPTIMIZERS: dict[str, tuple[str, bool, Make]] = {
    "torch.optim.AdamW": ("torch", False, lambda parameters: torch.optim.AdamW(parameters, **_SETTINGS)),
    "torch.optim.AdamW, fused": ("torch", False, lambda parameters: torch.optim.AdamW(parameters, fused=True, **_SETTINGS)),
    "Transformer Engine's FusedAdam": ("transformer_engine", True, _fused_adam("transformer_engine.pytorch.optimizers")),
    "Apex's FusedAdam": ("apex", True, _fused_adam("apex.optimizers")),
}


def compare() -> Rows:
    """A row for each of them."""
    for name, (module, needs_gpu, make) in _OPTIMIZERS.items():
        if needs_gpu and one_gpu.device().type != "cuda":
            yield Row(name, "", "skipped", "needs a GPU")
        elif not inventory.has(module):
            yield Row(name, "", "skipped", f"{module}: {inventory.version(module) or 'not there'}")
        else:
            try:
                yield _row(name, make)
            except Exception as error:
                yield Row(name, "", "failed", f"{type(error).__name__}: {error}")


def _row(name: str, make: Make) -> Row:
    parameters = _initial()
    optimizer = make(parameters)
    for step in range(_STOP):
        _step(parameters, optimizer, step)
    kept = io.BytesIO()
    torch.save({"parameters": parameters, "optimizer": optimizer.state_dict()}, kept)
    keys = {key: _kind(value) for key, value in optimizer.state[parameters[0]].items()}
    in_groups = "step" in optimizer.param_groups[0]
    for step in range(_STOP, _STEPS):
        _step(parameters, optimizer, step)

    kept.seek(0)
    found = torch.load(kept, weights_only=False)
    resumed = _initial()
    with torch.no_grad():
        for parameter, stored in zip(resumed, found["parameters"], strict=True):
            parameter.copy_(stored)
    again = make(resumed)
    again.load_state_dict(found["optimizer"])
    for step in range(_STOP, _STEPS):
        _step(resumed, again, step)

    is_same = all(map(torch.equal, parameters, resumed))
    fits = keys.keys() >= _NEEDED and all(keys[key] == "float32" for key in _NEEDED)
    said = ", ".join(f"{key} {kind}" for key, kind in keys.items()) + (", step in the parameter group" if in_groups else "")
    why = "; ".join(
        [*(["a resumed run differs"] if not is_same else []), *(["state that Pier does not know"] if not fits else [])]
    )
    return checked(name, is_same and fits, f"{said}; resumed bit for bit: {'yes' if is_same else 'no'}", why)


def _initial() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(one_gpu.device()))
        for size in ((33, 17), (129,), (2, 3, 5))
    ]


def _step(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
    optimizer.step()


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    shape = "" if value.dim() else " scalar"
    place = "" if value.device.type == one_gpu.device().type else f" on the {value.device.type}"
    return f"{value.dtype}".removeprefix("torch.") + shape + place
