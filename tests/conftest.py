"""Fixtures shared by all tests."""

import sys
from pathlib import Path

import pytest
import torch

# The cores belong to the processes that tests start; threads of this one that wait for each other are in their way.
torch.set_num_threads(1)

sys.path[:0] = [str(Path(__file__).parent / "distributed"), str(Path(__file__).parents[1] / "tools")]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text that is the same on every machine, in Megatron's indexed format: train and validation dataset."""
    from pier_megatron.commands.demo.corpus import write_documents

    folder, text = tmp_path_factory.mktemp("corpus"), Path(__file__).parents[1] / "LICENSE"
    return write_documents(folder / "train", [text]), write_documents(folder / "validation", [text])
