"""The mean of models of one shape, as a checkpoint that Megatron loads."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from pier_megatron.errors import PierConfigError
from pier_megatron.integration.checkpoint.stored_model import StoredModel

# Files beside the tensors, which say what was run and how the tensors are stored.
_DESCRIBING = ("common.pt", "metadata.json")


def write_mean(checkpoints: Sequence[Path], output: Path) -> None:
    """Writes the mean of models' weights, without optimizer state.

    Args:
        checkpoints: ``--save`` folders of the runs, of which the last checkpoints count.
        output: ``--load`` folder to write; what is there is overwritten.

    Raises:
        PierConfigError: If a checkpoint cannot be read, or their models differ in shape.
    """
    stored = [StoredModel.find(path) for path in checkpoints]
    first = stored[0].weights()
    total = {key: tensor.float() for key, tensor in first.items()}
    for model in stored[1:]:
        weights = model.weights()
        if {key: tensor.shape for key, tensor in weights.items()} != {key: tensor.shape for key, tensor in first.items()}:
            raise PierConfigError(f"{model.folder} and {stored[0].folder} hold models of different shapes: no mean of them.")
        for key, tensor in weights.items():
            total[key] += tensor
    mean = {key: (tensor / len(stored)).to(first[key].dtype) for key, tensor in total.items()}
    folder = output / f"iter_{stored[0].iteration:07d}"
    shutil.rmtree(output, ignore_errors=True)
    folder.mkdir(parents=True)
    state_dict_saver.save(mean | _objects(stored[0].folder), storage_writer=FileSystemWriter(folder), no_dist=True)
    for name in _DESCRIBING:
        shutil.copyfile(stored[0].folder / name, folder / name)
    (output / "latest_checkpointed_iteration.txt").write_text(str(stored[0].iteration))


def _objects(folder: Path) -> dict[str, object]:
    """What a model stores beside its weights, such as the empty extra states of its layers, which Megatron asks for."""
    reader = FileSystemReader(folder)
    keys = [key for key, entry in reader.read_metadata().state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    # Placeholders: with them the objects are read whole.
    found: dict[str, object] = dict.fromkeys((key for key in keys if "_extra_state" in key), torch.zeros(0).tolist())
    state_dict_loader.load(found, storage_reader=reader, no_dist=True)
    return found
