"""Real text without a download: the sources of Python's standard library, as bytes in Megatron's indexed format."""

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

END_OF_DOCUMENT = 256
"""Token after each file; tokens 0 to 255 are its bytes."""

VOCABULARY = 257

# One file in this many is held out for validation. The file's name decides, not its place in a listing: a release of Python
# that adds a module leaves the choice of the others as it was.
_VALIDATION_SHARE = 20


def write(directory: Path) -> tuple[Path, Path]:
    """Writes the corpus unless it is there already.

    Returns:
        The path prefixes of the train and of the validation dataset, as ``--train-data-path`` takes them.
    """
    sources = _sources()
    held_out = [path for path in sources if hashlib.sha256(path.name.encode()).digest()[0] % _VALIDATION_SHARE == 0]
    train = [path for path in sources if path not in set(held_out)]
    return write_documents(directory / "train", train), write_documents(directory / "validation", held_out)


def write_documents(prefix: Path, paths: Sequence[Path]) -> Path:
    """Writes files as one dataset, a document each, unless it is there already; returns its path without ``.bin``."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    index = get_idx_path(str(prefix))
    if Path(index).exists():
        return prefix
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.uint16)
    for path in paths:
        tokens = np.append(np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.uint16), END_OF_DOCUMENT)
        builder.add_document(tokens, [len(tokens)])
    # The index is written last and marks the dataset as complete.
    builder.finalize(index)
    return prefix


def _sources() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings"}
    return sorted(path for path in library.rglob("*.py") if not skipped & set(path.relative_to(library).parts))
