"""Damaged files of a checkpoint are reported, whatever reading them raises."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pier_megatron.integration.checkpoint.files import damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"weight": torch.arange(12.0), "bias": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_files_that_are_missing_or_short(folder: Path) -> None:
    (data,) = folder.glob("*.distcp")
    size = data.stat().st_size
    assert damage(folder) is None
    with data.open("r+b") as file:
        file.truncate(size // 2)
    assert f"{data.name} has {size // 2:,} of" in str(damage(folder))
    data.unlink()
    assert damage(folder) == f"{data.name} is missing"


# Each raises something else, none of it UnpicklingError.
_OTHER_CONTENTS = {
    "no storage data": pickle.dumps({"weight": 1}),
    "a missing module": b"cno_such_module\nMetadata\n.",
    "a missing class": b"ctorch.distributed.checkpoint.metadata\nNoSuchMetadata\n.",
    "a class called wrongly": b"ctorch.distributed.checkpoint.metadata\nMetadata\n(I1\nI2\nI3\nI4\nI5\nI6\nI7\nI8\nI9\ntR.",
    "nothing on the stack": b"\x80\x04.",
    "a string that is not UTF-8": b"\x80\x04\x8c\x02\xff\xff.",
}


@pytest.mark.parametrize("name", _OTHER_CONTENTS)
def test_metadata_with_other_contents(folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(_OTHER_CONTENTS[name])
    assert str(damage(folder)).startswith(".metadata cannot be read")


@pytest.mark.parametrize("filler", [b"", b"\x00", b"\xff"])
def test_metadata_whose_end_was_never_written(folder: Path, filler: bytes) -> None:
    path = folder / ".metadata"
    content = path.read_bytes()
    for place in range(0, len(content) - 1, 5):
        path.write_bytes(content[:place] + filler * (len(content) - place))
        assert str(damage(folder)).startswith(".metadata cannot be read")


@pytest.mark.slow
def test_flipped_bits_never_stop_the_look(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The one in C spends a minute on some of them, filling memory with an empty table before it fails.
    monkeypatch.setattr(pickle, "load", pickle._load)  # type: ignore[attr-defined]
    path = folder / ".metadata"
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        # It need not be seen: the bit may be of a number that is checked elsewhere.
        assert isinstance(damage(folder), str | None)
