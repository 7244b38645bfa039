"""Megatron-Bridge on a machine without a GPU: stand-ins for Transformer Engine, and settings that need none.

A few modules of Megatron-Bridge import Transformer Engine without asking whether it is there, for layers that a CPU never
makes. They alone see the stand-in: megatron-core must find Transformer Engine missing.
"""

import builtins
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

from pier_megatron.megatron_api import versions

_NEED_IT = (
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec",
    "megatron.bridge.peft.lora",  # Before 0.6.
    "megatron.bridge.peft.lora_layers",
)
_LAYERS = ("Linear", "LayerNormLinear", "TransformerLayer")
_FUSIONS = (
    "apply_rope_fusion bias_activation_fusion bias_dropout_fusion cross_entropy_loss_fusion gradient_accumulation_fusion "
    "masked_softmax_fusion persist_layer_norm"
).split()


def install() -> None:
    """Stands in for Transformer Engine; call it after ``emulation.install`` and before Megatron-Bridge is imported."""
    sys.meta_path.insert(0, _Finder())


def use_cpu(config: Any) -> None:
    """Changes the recipe of a GPT as ``--device cpu`` changes a command line: gloo, local layers, no fused kernels."""
    config.dist.distributed_backend = "gloo"
    config.dataset.num_workers = 0
    config.dataset.persistent_workers = False
    model = config.model
    for name in _FUSIONS:
        setattr(model, name, False)
    model.attention_backend = versions.require("megatron.core.transformer.enums", "AttnBackend").unfused
    model.transformer_layer_spec = versions.require("megatron.bridge.models.gpt_provider", "local_layer_spec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that need Transformer Engine, and gives them the stand-in."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _NEED_IT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_with_stand_in(module: types.ModuleType) -> None:
            vars(module)["__builtins__"] = vars(builtins) | {"__import__": _import}
            execute(module)

        spec.loader.exec_module = execute_with_stand_in  # type: ignore[method-assign]
        return spec


def _transformer_engine() -> types.ModuleType:
    package, module = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    vars(package)["pytorch"] = module
    vars(module).update({name: type(name, (torch.nn.Module,), {}) for name in _LAYERS})
    # Named in annotations.
    vars(module)["ops"] = types.SimpleNamespace(Sequential=torch.nn.Sequential)
    return package


_STAND_IN = _transformer_engine()


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if level == 0 and name.split(".")[0] == "transformer_engine":
        return _STAND_IN.pytorch if fromlist else _STAND_IN
    return builtins.__import__(name, globals, locals, fromlist, level)
