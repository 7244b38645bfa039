"""Ranks that all tests of the outer loop share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ranks as processes


@pytest.fixture(scope="session")
def ranks() -> Iterator[processes.Ranks]:
    with processes.running() as started:
        yield started
