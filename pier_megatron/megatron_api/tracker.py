"""The file by which Megatron knows the last checkpoint of a run."""

from pathlib import Path


def tracker_of(folder: Path) -> Path:
    """The file in a run's ``--save`` folder that names its last checkpoint; written last, so nothing is saved without it."""
    return folder / "latest_checkpointed_iteration.txt"


def stored_checkpoint(folder: Path, iteration: int | None = None) -> Path | None:
    """The checkpoint in the ``--save`` folder of a run, of one iteration or the last; None if nothing was saved there."""
    tracker = tracker_of(folder)
    if not tracker.exists():
        return None
    saved = str(iteration) if iteration else tracker.read_text(errors="replace").strip()
    return folder / (f"iter_{int(saved):07d}" if saved.isdigit() else saved)
