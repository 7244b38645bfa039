"""The file by which Megatron knows the last checkpoint of a run."""

from pathlib import Path


def tracker_of(folder: Path) -> Path:
    """The file in a run's ``--save`` folder that names its last checkpoint; written last, so nothing is saved without it."""
    return folder / "latest_checkpointed_iteration.txt"
