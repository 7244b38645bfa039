"""The files of a checkpoint, before anything is read from them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pier_megatron.errors import PierConfigError
from pier_megatron.integration import current

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
    return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def refusal(folder: Path) -> str | None:
    """What start-up and doctor say of a checkpoint that is damaged or was never saved; None if it is whole."""
    found = damage(folder)
    if found is None:
        return None
    what = f"{folder} is damaged: {found}" if folder.is_dir() else f"{folder.parent}: there is no {folder.name}"
    whole = [path.name for path in sorted(folder.parent.glob("iter_*")) if not damage(path)]
    return (
        f"--load {what}. Choose another iteration with --ckpt-step; whole ones there: "
        f"{', '.join(str(int(name.removeprefix('iter_'))) for name in whole) or 'none'}."
    )


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, as far as names and sizes tell."""
    sizes: dict[str, int] = {}
    try:
        for place in FileSystemReader(folder).read_metadata().storage_data.values():
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
        found = {name: (folder / name).stat().st_size if (folder / name).exists() else None for name in sizes}
    except Exception as error:
        # A damaged pickle raises whatever the code that its bytes happen to name raises. Any of it in this rank alone would
        # leave the others waiting.
        return f".metadata cannot be read ({type(error).__name__}: {error})"
    for name, size in sizes.items():
        there = found[name]
        if there is None:
            return f"{name} is missing"
        if there < size:
            return f"{name} has {there:,} of {size:,} bytes"
    return None
