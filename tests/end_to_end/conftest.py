"""Where the tests of this folder run."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
from launch import REPOSITORY, WARM, environment


@pytest.fixture(scope="package", autouse=True)
def without_gpu() -> Iterator[None]:
    """Hides a GPU from the processes that are started here: they all run on the CPU."""
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        yield


@pytest.fixture(scope="package", autouse=True)
def warm_processes(without_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets what is started here be forks of processes that have imported PyTorch and Megatron."""
    folder = tmp_path_factory.mktemp("warm") / str(os.getpid())
    folder.mkdir()
    variables = os.environ | environment()
    variables["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY / 'tests' / 'distributed'}"
    with contextlib.ExitStack() as stack:
        for name, module in {"torch": "torch.distributed.run", "megatron": "recorder"}.items():
            command = [sys.executable, str(WARM / "warm_process.py"), str(folder / name), module]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            process = stack.enter_context(subprocess.Popen(command, env=variables, stdout=pipe, stderr=null, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        path = os.pathsep.join(filter(None, [str(WARM), os.environ.get("PYTHONPATH")]))
        stack.enter_context(mock.patch.dict(os.environ, PIER_TEST_WARM=str(folder), PYTHONPATH=path))
        yield
