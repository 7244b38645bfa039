"""The kernels, compiled for a GPU without one."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from pier_megatron.exchange.codecs import CODECS

LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    script = Path(__file__).with_name("compiled_kernels.py")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_every_kernel_is_compiled_at_the_start_and_none_later(compiled: dict[str, Any]) -> None:
    functions = sorted(name.split()[0] for name in compiled["at start"])
    expected = {"_decode": sum(CODECS[name].scaled for name in LOSSY), "_encode": 2 * len(LOSSY)}
    assert {name: len(list(some)) for name, some in itertools.groupby(functions)} == expected
    assert compiled["later"] == []
    assert compiled["launched"] > 100


def test_kernels_are_code_for_the_gpu_without_fused_products(compiled: dict[str, Any]) -> None:
    assert compiled["binaries"]
    assert compiled["other targets"] == []
    assert compiled["fused"] == []
