"""Real text without a download: the sources of Python's standard library, as bytes in Megatron's indexed format."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
"""Token after each file; tokens 0 to 255 are its bytes."""

VOCABULARY = 257

# One file in this many is held out for validation. The choice hangs on the file's name, not on its place in a listing, so
# that it survives a Python that adds a module.
_VALIDATION_SHARE = 20


def write(directory: Path) -> tuple[Path, Path]:
    """Writes the corpus unless it is there already.

    Args:
        directory: Where to.

    Returns:
        The path prefixes of the train and of the validation dataset, as ``--train-data-path`` takes them.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    prefixes = directory / "train", directory / "validation"
    if all(Path(get_idx_path(str(prefix))).exists() for prefix in prefixes):
        return prefixes
    directory.mkdir(parents=True, exist_ok=True)
    builders = [IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.uint16) for prefix in prefixes]
    for path in _sources():
        text = path.read_bytes()
        if not text:
            continue
        is_validation = hashlib.sha256(path.name.encode()).digest()[0] % _VALIDATION_SHARE == 0
        tokens = np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), END_OF_DOCUMENT)
        builders[is_validation].add_document(tokens, [len(tokens)])
    for builder, prefix in zip(builders, prefixes, strict=True):
        # The index is written last and marks the dataset as complete.
        builder.finalize(get_idx_path(str(prefix)))
    return prefixes


def _sources() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings"}
    return sorted(path for path in library.rglob("*.py") if not skipped & set(path.relative_to(library).parts))
