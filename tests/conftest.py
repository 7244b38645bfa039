"""Fixtures shared by all tests."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent / "distributed"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The corpus of the demo, in Megatron's indexed format: prefixes of its train and validation datasets."""
    from pier_megatron.demo import corpus

    return corpus.write(tmp_path_factory.mktemp("corpus"))
