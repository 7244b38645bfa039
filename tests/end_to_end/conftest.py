"""Where the tests of this folder run."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="package", autouse=True)
def without_gpu() -> Iterator[None]:
    """Hides a GPU from the processes that are started here: they all run on the CPU."""
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        yield
