"""The text that all studies read, and what every evaluation reads of it."""

from pathlib import Path

from pier_megatron.commands.demo import corpus

_SEQUENCE = 64
VALIDATION_SEQUENCES = 256


def data_arguments(folder: Path) -> str:
    """Writes the text that all studies read into a folder, once; the arguments that make Megatron read it."""
    train, validation = corpus.write(folder)
    return f"--train-data-path {train} --valid-data-path {_excerpt(validation)} --test-data-path {validation}"


def _excerpt(prefix: Path) -> Path:
    """The validation data that every evaluation reads in full, written once."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = prefix.with_name("excerpt")
    text = prefix.with_name("excerpt.txt")
    if not text.exists():
        tokens = IndexedDataset(str(prefix))
        document = max(tokens, key=len)[: VALIDATION_SEQUENCES * _SEQUENCE]
        text.write_bytes(bytes(byte for byte in document if byte != corpus.END_OF_DOCUMENT))
    return corpus.write_documents(found, [text])
