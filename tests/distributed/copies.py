"""Compares all copies of each parameter, bit for bit, and of what optimizers keep for it; at the end of every training."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pier_megatron.integration import own_world
from pier_megatron.outer.state import RESIDUAL

# Name of a set of copies, and the ranks that hold different parts.
_Copy = tuple[Any, ...]


def compare_copies(model: Any, owners: Iterable[Any], pier: Any) -> None:
    """Compares the copies of this rank's group over tensor-parallel, data-parallel and expert-parallel ranks and tied stages.

    Args:
        model: This rank's chunks.
        owners: Its inner optimizers.
        pier: The optimizer of a run with Pier; None without Pier.

    Raises:
        AssertionError: On all ranks, with the names of what differs.
    """
    names = {parameter: _copy(parameter, name, number) for number, name, parameter in _parameters(model)}
    own = {(*copy, "in the model"): _digest(parameter) for parameter, copy in names.items()}
    flats = _outer_state(pier)
    for owner in owners:
        for parameter, main in owner.parameters():
            # Data-parallel ranks may hold different parts of it; those that hold copies of the parameter cut them alike.
            where = (*names[parameter], *_part(owner, parameter, main))
            kept = {"main": main} | owner.state_of(main) | flats.get(main.data_ptr(), {})
            own |= {(*where, name): _digest(tensor) for name, tensor in kept.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found: dict[_Copy, set[str]] = {}
    for of_rank in everyone:
        for copy, digest in of_rank.items():
            found.setdefault(copy, set()).add(digest)
    differing = sorted(str(copy) for copy, digests in found.items() if len(digests) > 1)
    assert not differing, f"copies differ: {'; '.join(differing)}"


def _parameters(model: Any) -> Iterator[tuple[int, str, torch.Tensor]]:
    for number, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            yield number, name, parameter


def _copy(parameter: torch.Tensor, name: str, number: int) -> _Copy:
    is_expert = not getattr(parameter, "allreduce", True)
    tensor = parallel_state.get_expert_tensor_parallel_rank() if is_expert else parallel_state.get_tensor_model_parallel_rank()
    place: _Copy = (parallel_state.get_pipeline_model_parallel_rank(), number, name)
    if getattr(parameter, "shared_embedding", False):
        place = ("tied embedding",)
    return (
        *place,
        f"group {_group()}",
        f"TP {tensor}" if getattr(parameter, "tensor_model_parallel", False) else "all TP",
        f"EP {parallel_state.get_expert_model_parallel_rank()}" if is_expert else "all EP",
    )


def _group() -> int:
    between = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    return between.rank() if between is not None else own_world.launch().group


def _part(owner: Any, parameter: torch.Tensor, main: torch.Tensor) -> _Copy:
    if main.shape == parameter.shape or not hasattr(owner.optimizer, "_get_model_param_range_map"):
        return ()
    owned = owner.optimizer._get_model_param_range_map(parameter)["param"]
    return (owned.start, owned.end)


def _outer_state(pier: Any) -> dict[int, dict[str, torch.Tensor]]:
    """What the outer optimizer keeps for each main parameter, by its address."""
    if pier is None:
        return {}
    return {
        main.data_ptr(): {f"outer {name}": flat[where] for name, flat in _copied(state).items()}
        for state in pier.loop.states
        for main, where in state.slices()
        if main.numel()
    }


def _copied(state: Any) -> dict[str, torch.Tensor]:
    """The flat buffers that ranks hold copies of: where each sends a part, it alone keeps what the codec drops of that."""
    divides = any(chunk.shards.holders is not None for chunk in state.chunks)
    return {name: flat for name, flat in state.flats.items() if name != RESIDUAL or not divides}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
