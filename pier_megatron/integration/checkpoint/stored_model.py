"""The model in one of Megatron's checkpoints, read on the CPU without processes and without building it."""

import argparse
import dataclasses
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pier_megatron.errors import PierConfigError
from pier_megatron.integration.checkpoint.description import ENTRY, Description
from pier_megatron.integration.checkpoint.files import damage
from pier_megatron.megatron_api import versions
from pier_megatron.megatron_api.tracker import stored_checkpoint

# Keys of a GPT's weights; all other keys belong to the optimizer and the run.
_PARTS = ("embedding.", "decoder.", "output_layer.")


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """The model of a ``torch_dist`` checkpoint, which is stored as whole tensors whatever the parallel layout was.

    Attributes:
        folder: Folder of the checkpoint, with its ``.metadata``.
        arguments: Megatron's, of the run that wrote it.
        iteration: Iterations completed.
        description: What a Pier run says of it, or None if it is a stock one.
    """

    folder: Path
    arguments: argparse.Namespace
    iteration: int
    description: Description | None

    @classmethod
    def find(cls, path: Path) -> "StoredModel":
        """Looks at a checkpoint without its tensors.

        Args:
            path: Its folder, or the ``--save`` folder of a run, for the last one in it.

        Raises:
            PierConfigError: If there is none, it is damaged, or it is of a kind that cannot be read.
        """
        folder = stored_checkpoint(path) or path
        if not (folder / ".metadata").exists():
            raise PierConfigError(
                f"--checkpoint {path}: no torch_dist checkpoint there ({folder / '.metadata'} does not exist). Give the --save "
                "folder of a run or one of its iter_ folders; another format becomes torch_dist with Megatron's "
                "--ckpt-convert-format torch_dist --ckpt-convert-save DIR."
            )
        found = damage(folder)
        if found:
            raise PierConfigError(f"--checkpoint {folder} is damaged: {found}. Choose another iteration's folder.")
        common = versions.require("megatron.core.dist_checkpointing", "load_common_state_dict")(str(folder))
        if "args" not in common:
            raise PierConfigError(
                f"--checkpoint {folder}: it has no arguments of Megatron's, so it was not written by Megatron's training loop, "
                "and what model it holds is not known."
            )
        content = common.get("content_metadata") or {}
        description = Description.from_metadata(content[ENTRY]) if ENTRY in content else None
        return cls(folder, common["args"], int(common["iteration"]), description)

    def weights(self) -> dict[str, Tensor]:
        """Reads the weights: whole tensors, in the type they are stored in, by their names in the checkpoint."""
        reader = FileSystemReader(self.folder)
        weights = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and key.startswith(_PARTS)
        }
        state_dict_loader.load(weights, storage_reader=reader, no_dist=True)
        return weights
