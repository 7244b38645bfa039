"""Hooks the plugin into how Megatron saves and loads checkpoints."""

from collections.abc import Callable
from typing import Any

from pier_megatron.integration import current, versions
from pier_megatron.outer.description import ENTRY

_CHECKPOINTING = "megatron.training.checkpointing"
_TRAINING = "megatron.training.training"


def install() -> None:
    """Hooks the plugin into saving and loading. A run without ``--optimizer pier`` passes through unchanged."""
    versions.wrap(_CHECKPOINTING, "_build_sharded_state_dict_metadata", _describing_the_run)
    versions.wrap(_TRAINING, "save_checkpoint", _saving)
    versions.wrap(_TRAINING, "load_checkpoint", _loading)


def _describing_the_run(build_metadata: Callable[..., Any]) -> Callable[..., Any]:
    def describing(*args: Any, **kwargs: Any) -> Any:
        metadata = build_metadata(*args, **kwargs)
        optimizer = current.pier_optimizer()
        if optimizer is not None and optimizer.checkpoint.description is not None:
            metadata[ENTRY] = optimizer.checkpoint.description.to_metadata()
        return metadata

    return describing


def _saving(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def save(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        pier = current.pier_optimizer()
        if pier is None:
            return save_checkpoint(iteration, model, optimizer, opt_param_scheduler, *args, **kwargs)
        with pier.checkpoint.saving(opt_param_scheduler):
            return save_checkpoint(iteration, model, optimizer, opt_param_scheduler, *args, **kwargs)

    return save


def _loading(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def load(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        pier = current.pier_optimizer()
        if pier is None:
            return load_checkpoint(ddp_model, optimizer, opt_param_scheduler, *args, **kwargs)
        try:
            result = load_checkpoint(ddp_model, optimizer, opt_param_scheduler, *args, **kwargs)
        except Exception as error:
            error.add_note(
                f"Pier: --load {versions.megatron_args().load} could not be read. Checkpoints of other iterations in that "
                "folder may be whole: choose one with --ckpt-step."
            )
            raise
        pier.checkpoint.finish_loading(result[0], opt_param_scheduler)
        return result

    return load
