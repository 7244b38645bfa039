"""Random number generators of a rank: Megatron stores those of one group, and each group draws its own dropout."""

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from pier_megatron.megatron_api import versions

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import StateDict


def random_states() -> "StateDict":
    """The states of all generators of this rank, under the names by which Megatron stores them."""
    tensor_parallel = versions.require("megatron.core", "tensor_parallel")
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_random_states(states: "StateDict") -> None:
    """Restores what :func:`random_states` returned."""
    tensor_parallel = versions.require("megatron.core", "tensor_parallel")
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    tracker.set_states(
        {
            name: tensor_parallel.convert_cuda_rng_state(state, to_graphable=graphable)
            for name, state in states["rng_tracker_states"].items()
        }
    )
