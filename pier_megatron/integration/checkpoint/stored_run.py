"""Which folder an elastic island saves to and resumes from."""

from pathlib import Path

import torch.distributed as dist

from pier_megatron.integration.checkpoint.description import ENTRY, Metadata
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.tracker import stored_checkpoint, tracker_of

_ISLANDS = "islands"


def folder_of_island(folder: Path, index: int) -> Path:
    """The folder of an island: that of the run for the first island, a folder in it for any other."""
    return folder / _ISLANDS / str(index) if index else folder


def find(root: Path, island: int, step: int | None, accepts_changes: bool, takes_whole: bool = False) -> Path:
    """Finds the folder that an island loads from; called by all its ranks.

    Args:
        root: ``--load`` folder, which islands may share.
        island: Number of the island.
        step: Iteration that the user has asked for; None for the last one.
        accepts_changes: Whether the user allows the run to continue with other settings.
        takes_whole: Whether an older checkpoint will do if the last one is damaged.

    Returns:
        The island's own folder, or the shared one where groups of one launch have saved. If another island has saved there, the
        user has to ask for an iteration or to accept changes: otherwise the island starts without a checkpoint.
    """
    chosen = [root]
    if dist.get_rank() == 0:
        own, shared = folder_of_island(root, island), _island_of(root, step)
        if _island_of(own, step) == island or (takes_whole and tracker_of(own).exists()):
            chosen = [own]
        elif shared is not None and step is None and not accepts_changes:
            print(
                f" Pier: --load {root} has no checkpoint of island {island}, which starts at iteration 0 and joins the others, "
                f"if they are there, in their next outer step. To start from the inner state of island {shared}, add "
                "--pier-override-checkpoint.",
                flush=True,
            )
            chosen = [own]
    # Others may not see the folder.
    dist.broadcast_object_list(chosen)
    return chosen[0]


def _island_of(folder: Path, step: int | None) -> int | None:
    """The island whose checkpoint is in a folder; None if it holds a launch's checkpoint, or none that can be read."""
    load = versions.require("megatron.core.dist_checkpointing", "load_content_metadata")
    try:
        found: Metadata = (load(str(stored_checkpoint(folder, step) or folder)) or {}).get(ENTRY, {})
    except Exception:
        # All ranks say so when they load it.
        return None
    return found.get("island")
