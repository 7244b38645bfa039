"""Where the checkpoint of a run is that another one loads: in one folder, or in one for each of its islands."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from pier_megatron.integration import worlds
from pier_megatron.integration.checkpoint.content import RunPosition
from pier_megatron.integration.worlds import ISLANDS, folder_of_island
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.tracker import stored_checkpoint, tracker_of
from pier_megatron.outer.description import ENTRY, Description, Metadata


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """What is stored of one iteration of a run.

    Attributes:
        root: ``--load`` folder of the job.
        iteration: Iteration that is loaded; None if Megatron finds it.
        islands: Islands whose folders hold it; empty if all groups are in one folder.
    """

    root: Path
    iteration: int | None = None
    islands: tuple[int, ...] = ()

    def folder(self, island: int) -> Path:
        """The folder of the checkpoint of an island, or of all groups."""
        found = stored_checkpoint(folder_of_island(self.root, island), self.iteration)
        assert found is not None
        return found

    def key_of(self, group: int) -> int:
        """The number of the folder that has what a group has of its own."""
        return group if self.islands else 0

    def number_in_folder(self, group: int) -> int:
        """The number of a group in its folder, where an island is alone."""
        return 0 if self.islands else group

    def description(self, key: int) -> Description:
        """What the checkpoint in a folder says of itself."""
        return Description.from_metadata(_entry(self.folder(key)))

    def arguments(self, key: int) -> dict[str, str | int]:
        """Megatron's arguments with which it loads from a folder."""
        arguments: dict[str, str | int] = {"load": str(folder_of_island(self.root, key) if self.islands else self.root)}
        return arguments if self.iteration is None else arguments | {"ckpt_step": self.iteration}


def find(place: RunPosition, root: Path, step: int | None, accepts_changes: bool) -> StoredRun | None:
    """Finds the checkpoint that all ranks of the launch load; called by all of them.

    Islands of one launch load the last iteration that all islands of the run which stored it have: a failure may have come
    while they were saving, and the folders of islands that it did not have are of another run.

    Args:
        place: Position of this rank in the run that loads.
        root: ``--load`` folder of the job.
        step: Iteration that the user has asked for.
        accepts_changes: Whether the user has said that the run may go on differently.

    Returns:
        The checkpoint; None if an elastic island finds none and starts without one.
    """
    index, count = place.in_world.start - place.in_launch.start, place.config.worlds // place.config.launches
    found = _iterations_in(root, index, count) if dist.get_rank() == 0 else {}
    with worlds.own().in_the_launch():
        everyone: list[dict[int, set[int]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        iterations: dict[int, set[int]] = {}
        for of_rank in everyone:
            iterations |= of_rank
        chosen: list[StoredRun | None] = [None]
        if dist.get_rank() == 0:
            if place.config.lighthouse is not None:
                chosen = [_for_an_elastic_island(root, place.group, iterations, step, accepts_changes)]
            else:
                chosen = [_common(root, iterations, step)]
        dist.broadcast_object_list(chosen)
    return chosen[0]


def _iterations_in(root: Path, index: int = 0, count: int = 1) -> dict[int, set[int]]:
    """The iterations in each folder that a world, one of ``count``, looks at for the launch: others may not see its own."""
    found = {0: root} | {int(path.name): path for path in (root / ISLANDS).glob("*") if path.name.isdigit()}
    return {
        number: {int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*") if (path / ".metadata").exists()}
        for number, folder in found.items()
        if number % count == index
    }


def _common(root: Path, iterations: Mapping[int, set[int]], step: int | None) -> StoredRun:
    last = step or _last(root)
    candidates = sorted(
        (t for t in iterations.get(0, ()) if last is not None and t <= last and step in (None, t)), reverse=True
    )
    found = [_at(root, iterations, t) for t in candidates]
    whole = next((stored for stored, is_whole in found if is_whole), None)
    chosen = whole or next((stored for stored, _ in found), StoredRun(root))
    # The last one in the folder is Megatron's to find, and to say what is wrong with it.
    return chosen if chosen.islands or chosen.iteration not in candidates[:1] else StoredRun(root)


def _at(root: Path, iterations: Mapping[int, set[int]], iteration: int) -> tuple[StoredRun, bool]:
    """What is stored of an iteration, and whether all of its run is there."""
    if not _is_of(root, iteration, 0):
        return StoredRun(root, iteration), True
    count = _entry(stored_checkpoint(root, iteration) or root)["settings"]["groups"]
    there = tuple(island for island in range(count) if iteration in iterations.get(island, ()))
    return StoredRun(root, iteration, there), len(there) == count


def _for_an_elastic_island(
    root: Path, index: int, iterations: Mapping[int, set[int]], step: int | None, accepts_changes: bool
) -> StoredRun | None:
    own = step or _last(folder_of_island(root, index))
    if own is not None and own in iterations.get(index, ()) and _is_of(folder_of_island(root, index), own, index):
        return StoredRun(root, own, tuple(sorted(island for island, found in iterations.items() if own in found)))
    stored = _common(root, iterations, step)
    # It has lost the checkpoint that it was told to load, or joins a run for the first time.
    is_of_another = bool(stored.islands)
    return None if is_of_another and step is None and not accepts_changes else stored


def _is_of(folder: Path, iteration: int, island: int) -> bool:
    """Whether a folder holds the checkpoint of an island."""
    return _entry(stored_checkpoint(folder, iteration) or folder).get("island") == island


def _last(folder: Path) -> int | None:
    tracker = tracker_of(folder)
    saved = tracker.read_text().strip() if tracker.exists() else ""
    return int(saved) if saved.isdigit() else None


def _entry(folder: Path) -> Metadata:
    """What a checkpoint says of Pier; nothing if it cannot be read, which is said by all ranks when they load it."""
    load = versions.require("megatron.core.dist_checkpointing", "load_content_metadata")
    try:
        found: Metadata = (load(str(folder)) or {}).get(ENTRY, {})
    except Exception:
        return {}
    return found
