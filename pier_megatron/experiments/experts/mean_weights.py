"""The mean of models of one shape, as a checkpoint that Megatron loads."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from pier_megatron.errors import PierConfigError
from pier_megatron.integration.checkpoint.stored_model import StoredModel
from pier_megatron.megatron_api.tracker import tracker_of

# Objects that Megatron asks a model's checkpoint for: what was run, and the empty extra states of layers. What was run is in a
# file of its own in older releases.
_OBJECTS = ("common_state/", "_extra_state")


def write_mean(checkpoints: Sequence[Path], output: Path) -> None:
    """Writes the mean of models' weights, without optimizer state.

    Args:
        checkpoints: ``--save`` folders of the runs; the last checkpoint of each is averaged.
        output: ``--load`` folder to write; existing files are overwritten.

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
    state_dict_saver.save(
        mean | _objects(stored[0].folder),
        storage_writer=FileSystemWriter(folder),
        # Objects that are dicts stay whole.
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    for file in stored[0].folder.iterdir():
        if file.name != ".metadata" and file.suffix != ".distcp":
            shutil.copyfile(file, folder / file.name)
    tracker_of(output).write_text(str(stored[0].iteration))


def _objects(folder: Path) -> dict[str, object]:
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata.items()
    names = [key for key, entry in entries if isinstance(entry, BytesStorageMetadata) and any(part in key for part in _OBJECTS)]
    found: dict[str, object] = dict.fromkeys(names)
    state_dict_loader.load(found, storage_reader=reader, no_dist=True)
    return found
