"""Inventory: the device, its driver, the libraries, and what is missing."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import one_gpu
import torch
from table import Row, Rows, checked

_NEEDED_BY_MEGATRON = ("numpy", "einops", "psutil", "pybind11", "packaging")
_OPTIONAL = ("triton", "transformer_engine", "apex", "pytest", "hypothesis", "megatron.core")


def is_found(module: str) -> bool:
    """Whether a module is there, imported or not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def version(module: str) -> str | None:
    """Version of an installed module, None if it is missing."""
    if not is_found(module):
        return None
    try:
        return str(getattr(importlib.import_module(module), "__version__", "there"))
    except Exception as error:
        # The library is installed but was built for another PyTorch.
        return f"cannot be imported: {error}"


def has(module: str) -> bool:
    """Whether a module can be imported."""
    found = version(module)
    return found is not None and not found.startswith("cannot")


def device_name(kind: str) -> str:
    """Name of the device of a kind, ``cuda`` or ``cpu``."""
    return torch.cuda.get_device_name(0) if kind == "cuda" else f"CPU ({platform.machine()})"


def about(command: str) -> dict[str, str]:
    """What stands above a table."""
    known = {"device": device_name(one_gpu.device().type), "PyTorch": torch.__version__}
    if one_gpu.device().type == "cuda":
        known["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return known | {"ranks over": one_gpu.backend(), "command": command}


def look() -> Rows:
    """Lists everything."""
    yield Row("device", device_name(one_gpu.device().type))
    if one_gpu.device().type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        yield Row("device memory", f"{properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} SMs")
        yield Row("compute capability", f"{properties.major}.{properties.minor}")
        yield Row("driver", nvidia_smi("driver_version"))
    yield Row("Python", platform.python_version())
    yield Row("PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))), None)
    yield checked("C compiler, which Triton needs", compiler is not None, compiler or "", "missing")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    yield checked("Python's headers, which Triton needs", headers.is_file(), str(headers), "missing")
    yield Row("several ranks on the device talk over", one_gpu.backend())
    for module in _NEEDED_BY_MEGATRON:
        found, what = version(module), f"{module}, which Megatron or the plugin needs"
        yield Row(what, found, "ok") if found else Row(what, "", "skipped", "missing, and trainings with it")
    for module in _OPTIONAL:
        yield Row(module, version(module) or "not there")
    if has("megatron.core"):
        adam = importlib.import_module("megatron.core.optimizer").Adam
        yield Row("inner AdamW that Megatron picks", f"{adam.__module__}.{adam.__qualname__}")


def nvidia_smi(fields: str) -> str:
    """Values that the driver's tool prints for the GPU, separated by commas as the fields' names are."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"
