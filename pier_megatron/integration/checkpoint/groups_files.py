"""One checkpoint folder of several groups, which save as separate worlds.

The first group writes what Megatron writes: the weights, its inner optimizer's state, and Pier's outer state. Each other one
writes what it alone has into a folder there, ``group_N``. The first then lists all files in its own metadata, so that the
folder is one checkpoint to whatever reads it, and Megatron names it in the tracker file after that.
"""

import dataclasses
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from pier_megatron.integration import current, own_world
from pier_megatron.integration.checkpoint.description import ENTRY
from pier_megatron.integration.checkpoint.files import without_reruns
from pier_megatron.megatron_api import run, versions

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict

    from pier_megatron.integration.optimizer import PierOptimizer

_METADATA = ".metadata"
# Key of what Megatron stores of a whole run, which is the same in all groups.
_COMMON = "common_state"
# Megatron's argument for what looks at this before it is stored.
_LOOKS_AT_COMMON = "preprocess_common_before_consistancy_check"
_DONE = "done"


@dataclasses.dataclass
class _Saves:
    """Saves of this training.

    Attributes:
        begun: Their number.
        pending: Numbers of those that have not ended in this group.
    """

    begun: int = 0
    pending: list[int] = dataclasses.field(default_factory=list)


class _Request(Protocol):
    """A save behind training, as Megatron schedules it."""

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Adds what is called once all ranks of the world have written."""


def folder_of_group(checkpoint: Path, group: int) -> Path:
    """Where a group other than the first saves: Megatron makes a folder of the iteration in it."""
    return checkpoint / f"group_{group}"


@current.in_pier_runs
def save_in_one_folder(
    save: "Callable[..., _Request | None]",
    optimizer: "PierOptimizer",
    /,
    state: "ShardedStateDict",
    checkpoint_dir: str,
    *args: object,
    **kwargs: object,
) -> "_Request | None":
    """Saves this group's part; the first group then waits for the others', and lists it."""
    saves, launch = run.part(_Saves), own_world.launch()
    if launch.groups == 1 or "optimizer" not in state or ENTRY not in state["optimizer"]:
        # Where weights alone are saved, hooks.save has left the other groups out.
        return save(state, checkpoint_dir, *args, **kwargs)
    state = without_reruns(state)
    saves.begun += 1
    number = saves.begun
    given = versions.given(save, (state, checkpoint_dir, *args), kwargs)
    # Hashes of files that are yet to change.
    verifies = given.get("verify_integrity", False)
    changed: dict[str, object] = {"verify_integrity": False} if verifies else {}
    if launch.group:
        launch.store.wait([_key(number, 0)], own_world.time_out())
        if (said := launch.store.get(_key(number, 0)).decode()) != _DONE:
            raise RuntimeError(f"{checkpoint_dir}: group 0 could not save its part: {said}")
        state = {"optimizer": {ENTRY: state["optimizer"][ENTRY]}}
        changed[_LOOKS_AT_COMMON] = None
    else:
        changed[_LOOKS_AT_COMMON] = _announcing(number, given.get(_LOOKS_AT_COMMON))
    try:
        request = versions.called_with(save, (state, checkpoint_dir, *args), kwargs, changed)
    except BaseException as error:
        _tell(number, f"{type(error).__name__}: {error}")
        raise

    def end() -> None:
        if number in saves.pending:
            saves.pending.remove(number)
        _tell(number, _DONE)
        if launch.rank == 0:
            _list_files(Path(str(checkpoint_dir)), number)
            if verifies:
                versions.require("megatron.core.dist_checkpointing.serialization", "save_integrity_manifest")(checkpoint_dir)

    if request is None:
        end()
    else:
        saves.pending.append(number)
        request.add_finalize_fn(end)
    return request


@current.in_pier_runs
def finalize_when_all_have_saved[**P](
    finalize: Callable[P, None], optimizer: "PierOptimizer", /, *args: P.args, **kwargs: P.kwargs
) -> None:
    """Lets the first group end a save behind training once the others have ended theirs, and wait for them at the end alone."""
    launch, pending = own_world.launch(), run.part(_Saves).pending
    if launch.groups > 1 and not launch.group and pending and not versions.given(finalize, args, kwargs).get("blocking", False):
        keys = [_key(number, group) for number in pending for group in range(1, launch.groups)]
        # By one rank: others may ask a moment later.
        are_there = torch.tensor(
            [launch.rank == 0 and launch.store.check(keys)], dtype=torch.int32, device=optimizer.loop.device
        )
        dist.broadcast(are_there, 0)
        if not are_there:
            return
    try:
        finalize(*args, **kwargs)
    except BaseException as error:
        for number in pending:
            _tell(number, f"{type(error).__name__}: {error}")
        raise


def _announcing(number: int, preprocess: Callable[[object], object] | None) -> Callable[[object], object]:
    """What Megatron calls once it has looked whether the folder is empty: other groups may write into it from then on."""

    def announcing(state: object) -> object:
        _tell(number, _DONE)
        return state if preprocess is None else preprocess(state)

    return announcing


def _key(number: int, group: int) -> str:
    return f"pier/save_{number}/{group}"


def _tell(number: int, what: str) -> None:
    launch = own_world.launch()
    if launch.rank_in_group == 0:
        launch.store.set(_key(number, launch.group), what)


def _list_files(checkpoint: Path, number: int) -> None:
    """Waits for the other groups, and enters their files in the metadata of the first."""
    launch = own_world.launch()
    keys = [_key(number, group) for group in range(1, launch.groups)]
    launch.store.wait(keys, own_world.time_out())
    said = {group: launch.store.get(key).decode() for group, key in enumerate(keys, 1)}
    if failed := {group: what for group, what in said.items() if what != _DONE}:
        raise RuntimeError(f"{checkpoint}: groups could not save their parts: {failed}")
    merged = FileSystemReader(checkpoint).read_metadata()
    for group in said:
        _enter(merged, checkpoint, folder_of_group(checkpoint, group) / checkpoint.name)
    unfinished = checkpoint / f"{_METADATA}.tmp"
    with unfinished.open("wb") as file:
        pickle.dump(merged, file)
        os.fsync(file.fileno())
    unfinished.rename(checkpoint / _METADATA)


def _enter(merged: Metadata, checkpoint: Path, folder: Path) -> None:
    found = FileSystemReader(folder).read_metadata()
    where = folder.relative_to(checkpoint)
    own = {key for key in found.state_dict_metadata if not key.startswith(_COMMON)}
    merged.state_dict_metadata |= {key: found.state_dict_metadata[key] for key in own}
    merged.storage_data |= {
        index: dataclasses.replace(place, relative_path=str(where / place.relative_path))
        for index, place in found.storage_data.items()
        if index.fqn in own
    }
    if found.planner_data is not None:
        merged.planner_data |= {key: path for key, path in found.planner_data.items() if key in own}
