"""The files of a checkpoint, before anything is read from them."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pier_megatron.errors import PierConfigError
from pier_megatron.integration import current, own_world
from pier_megatron.integration.checkpoint.description import ENTRY, group_prefix
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.tracker import stored_checkpoint, tracker_of
from pier_megatron.settings import flag_of

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict

    from pier_megatron.integration.optimizer import PierOptimizer


@current.in_pier_runs
def load_whole_files[R](
    load: Callable[..., R],
    _: "PierOptimizer",
    /,
    sharded_state_dict: "ShardedStateDict",
    checkpoint_dir: str,
    *args: object,
    **kwargs: object,
) -> R:
    """Looks at a checkpoint's files first: a rank that misses one stops, and the others would wait for it."""
    folder = Path(str(checkpoint_dir))
    if folder.is_dir():
        finding: list[str | None] = [refusal(folder) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(finding)
        if finding[0]:
            raise PierConfigError(finding[0])
    if own_world.launch().groups > 1:
        sharded_state_dict = without_reruns(sharded_state_dict)
    return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def without_reruns(state: "ShardedStateDict") -> "ShardedStateDict":
    """A state without what Megatron's search for a faulty device knows.

    The ranks of a world number it. A run in another number of groups, and stock Megatron, look for other numbers.
    """
    return {name: part for name, part in state.items() if name != "rerun_state_machine"}


def refusal(folder: Path) -> str | None:
    """What start-up and doctor say of a checkpoint that is damaged or was never saved; None if it is whole."""
    found = damage(folder)
    if found is None:
        return None
    what = f"{folder} is damaged: {found}" if folder.is_dir() else f"{folder.parent}: there is no {folder.name}"
    return f"--load {what}. Choose another iteration with --ckpt-step; {_whole(folder.parent)}"


def names_nothing(root: Path) -> str | None:
    """What is wrong with the file in a ``--load`` folder that names the last checkpoint; None if Megatron can read it.

    Megatron would end there with exit status 0, also with ``--ckpt-step``.
    """
    tracker = tracker_of(root)
    name = tracker.read_text(errors="replace").strip() if tracker.exists() else "release"
    if name == "release" or name.isdigit():
        return None
    what = f"holds {name!r}, which is no iteration" if name else "is empty"
    return f"--load {root}: {tracker.name} {what}. Write one into it; {_whole(root)}"


def _whole(root: Path) -> str:
    whole = [str(number) for number, path in sorted(_stored(root).items()) if not damage(path)]
    newest = f" {flag_of('load_newest_whole')}, without --ckpt-step, takes the newest of them." if whole else ""
    return f"whole ones there: {', '.join(whole) or 'none'}.{newest}"


def _stored(root: Path) -> dict[int, Path]:
    """Folders of checkpoints by their iterations."""
    found = {path.name.removeprefix("iter_"): path for path in root.glob("iter_*")}
    return {int(number): path for number, path in found.items() if number.isdigit()}


def newest_whole(root: Path) -> tuple[int, str] | None:
    """The checkpoint to load from a ``--load`` folder instead of the last one, and what to log of it.

    Returns:
        None if the last one is whole, or nothing was saved.

    Raises:
        PierConfigError: If none is whole.
    """
    last, stored, given = stored_checkpoint(root), _stored(root), flag_of("load_newest_whole")
    if last is None:
        return None
    found = damage(last) if last in stored.values() or last.name == "release" else "there is no such checkpoint"
    if found is None:
        return None
    wrong = f"{tracker_of(root).name} " + ("is empty" if last == root else f"names {last.name}: {found}")
    for number in sorted(stored, reverse=True):
        if not damage(stored[number]):
            return number, f"Pier: --load {root}: {wrong}. {given} takes iteration {number}, the newest that is whole."
    raise PierConfigError(
        f"--load {root}: {wrong}, and none of the {len(stored)} checkpoints there is whole, as {given} needs. Restore one of "
        "them, or drop --load to begin again."
    )


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, as far as names and sizes tell."""
    sizes: dict[str, int] = {}
    try:
        metadata = FileSystemReader(folder).read_metadata()
        for place in metadata.storage_data.values():
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
        found = {name: (folder / name).stat().st_size if (folder / name).exists() else None for name in sizes}
        prefixes = {".".join(key.split(".")[:2]) for key in metadata.state_dict_metadata}
    except Exception as error:
        # A damaged pickle raises whatever the code that its bytes happen to name raises. Each of them in this rank alone would
        # leave the others waiting.
        return f".metadata cannot be read ({type(error).__name__}: {error})"
    for name, size in sizes.items():
        there = found[name]
        if there is None:
            return f"{name} is missing"
        if there < size:
            return f"{name} has {there:,} of {size:,} bytes"
    return _groups_missing(folder, prefixes)


def _groups_missing(folder: Path, there: Collection[str]) -> str | None:
    """Which groups the metadata does not list: the job has ended after the first one had saved, and before all had."""
    if group_prefix(0) not in there:
        return None
    try:
        saved = versions.require("megatron.core", "dist_checkpointing").load_content_metadata(str(folder))[ENTRY]
        groups = 1 if saved["island"] is not None else saved["settings"]["groups"]
    except Exception as error:
        return f"its description cannot be read ({type(error).__name__}: {error})"
    missing = [group for group in range(groups) if group_prefix(group) not in there]
    return f"its save has not ended: groups {missing} are not in .metadata" if missing else None
