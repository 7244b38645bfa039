"""Ranks that all tests of the outer loop share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ranks as processes
from archipelago import Archipelago, archipelago


@pytest.fixture(scope="session")
def ranks() -> Iterator[processes.Ranks]:
    with processes.running() as started:
        yield started


@pytest.fixture
def sea(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Archipelago]:
    """A lighthouse that wants two islands, or as many as a test says."""
    with archipelago(tmp_path, getattr(request, "param", 2)) as started:
        yield started
