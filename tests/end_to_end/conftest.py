"""Where the tests of this folder run."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
from launch import environment, installed


@pytest.fixture(scope="package", autouse=True)
def without_gpu() -> Iterator[None]:
    """Hides a GPU from the processes that are started here: they all run on the CPU."""
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        yield


@pytest.fixture(scope="package", autouse=True)
def warm_processes(without_gpu: None) -> Iterator[None]:
    """Lets what is started here be forks of processes that have imported PyTorch and Megatron."""
    variables = {"PIER_TEST_WARM": str(installed().folder), "PYTHONPATH": environment()["PYTHONPATH"]}
    with mock.patch.dict(os.environ, variables):
        yield
