"""Megatron's own GPTModel on checkpoints: ``megatron_logits.py INPUT OUTPUT``.

The input is a saved dict: tokens ``[batch, sequence]``, and by name the folder of a checkpoint with arguments to change. The
output has the logits of each, ``[batch, sequence, vocabulary]``.
"""

import os
import sys
from unittest import mock

from pier_megatron.cpu import emulation

emulation.install()

import torch  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from pier_megatron.commands.demo import pretrain_bytes  # noqa: E402

_ALONE = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "world_size": 1}


def logits(folder: str, changes: dict[str, object], tokens: torch.Tensor) -> torch.Tensor:
    args = dist_checkpointing.load_common_state_dict(folder)["args"]
    vars(args).update(_ALONE | changes)
    with mock.patch.object(pretrain_bytes, "get_args", return_value=args):
        model = pretrain_bytes.build_model().eval()
    loaded = dist_checkpointing.load(model.sharded_state_dict(), folder, validate_access_integrity=False)
    model.load_state_dict(
        {name: loaded[name] for name in model.state_dict() if not name.endswith("_extra_state")}, strict=False
    )
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, None)


def main() -> None:
    asked = torch.load(sys.argv[1], weights_only=False)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    found = {name: logits(folder, changes, asked["tokens"]) for name, (folder, changes) in asked["models"].items()}
    torch.save(found, sys.argv[2])


if __name__ == "__main__":
    main()
