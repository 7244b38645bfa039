"""What a recipe of Megatron-Bridge will be, before it is queued."""

import importlib
import importlib.util
import os
import re
import sys
from typing import Any

import torch

from pier_megatron.commands.doctor.job import describe_groups, look_at_checkpoint
from pier_megatron.commands.findings import Findings
from pier_megatron.cpu import bridge, emulation
from pier_megatron.errors import PierConfigError

_UNKNOWN = (
    "Megatron-Bridge refuses the recipe without Transformer Engine: {}. Whether it starts with it is not known here; check it "
    "on a machine that has Transformer Engine"
)


def examine(name: str, nodes: int, ranks_per_node: int, findings: Findings) -> None:
    """Looks at the recipe ``MODULE:FUNCTION`` without starting it; needs no GPU.

    Raises:
        PierConfigError: If there is no such recipe, or it will not start.
    """
    _prepare(nodes * ranks_per_node, ranks_per_node)
    config = _recipe(name, findings)
    if config is None:
        return
    if _lacks_transformer_engine():
        bridge.use_cpu(config)
        findings.notes.append("Transformer Engine is absent here: the recipe is checked with local layers, on gloo")
    from pier_megatron.bridge import PierOptimizerConfig
    from pier_megatron.integration.arguments import config_from_args
    from pier_megatron.megatron_api import run, versions

    if not isinstance(config.optimizer, PierOptimizerConfig):
        findings.warnings.append(f"--recipe {name}: it does not use Pier. Call pier_megatron.bridge.with_pier(config)")
        return
    try:
        versions.require("megatron.bridge.training.config", "runtime_config_update")(config)
    except PierConfigError:
        raise
    except (AssertionError, ValueError, RuntimeError, ImportError, ArithmeticError, TypeError) as error:
        said = str(error) or type(error).__name__
        if _is_of_transformer_engine(said):
            findings.notes.append(_UNKNOWN.format(said))
            return
        raise PierConfigError(f"--recipe {name}: {said}") from error
    loop: Any = run.loop()
    arguments = loop.arguments()
    own = Findings()
    with own.collecting():
        pier = config_from_args(arguments)
        look_at_checkpoint(arguments, pier, describe_groups(arguments, pier, ranks_per_node, own), own)
    for told, found in ((findings.notes, own.notes), (findings.warnings, own.warnings), (findings.errors, own.errors)):
        told += [loop.in_own_words(line) for line in found]


def _prepare(ranks: int, ranks_per_node: int) -> None:
    """Sets up this process as the launcher would, and for Megatron-Bridge on a machine that may have no GPU."""
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks_per_node), "RANK": "0", "LOCAL_RANK": "0"}
    if not torch.cuda.is_available():
        emulation.install()
    if _lacks_transformer_engine():
        bridge.install()


def _lacks_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is None


def _is_of_transformer_engine(error: str) -> bool:
    """Whether a recipe is refused because Transformer Engine is absent on this machine."""
    return _lacks_transformer_engine() and re.search(r"(?i:transformer.?engine)|\bTE\b", error) is not None


def _recipe(name: str, findings: Findings) -> Any:
    module, _, function = name.partition(":")
    if importlib.util.find_spec("megatron.bridge") is None:
        raise PierConfigError("--recipe needs megatron-bridge, which is not installed.")
    sys.path.insert(0, os.getcwd())
    try:
        recipe = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PierConfigError(f"--recipe {name}, seen from {os.getcwd()}: {error}") from error
    try:
        return recipe()
    except Exception as error:
        # A recipe is the user's code, and may reach for a model hub.
        if not (isinstance(error, ImportError) and _is_of_transformer_engine(str(error))):
            raise PierConfigError(f"--recipe {name}: {type(error).__name__}: {error}") from error
        findings.notes.append(_UNKNOWN.format(error))
        return None
