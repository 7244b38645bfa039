"""Where the training loop logs: its last rank's output, TensorBoard, Weights & Biases."""

from typing import Any

from pier_megatron.megatron_api import run, versions


def print_last(text: str) -> None:
    """Prints on the rank that logs."""
    loop = run.loop()
    if loop is None:
        versions.require("megatron.training.utils", "print_rank_last")(text)
    else:
        loop.print_last(text)


def tensorboard() -> Any:
    """The writer of TensorBoard, or None on ranks without one."""
    loop = run.loop()
    return versions.require("megatron.training.global_vars", "get_tensorboard_writer")() if loop is None else loop.tensorboard()


def wandb() -> Any:
    """The writer of Weights & Biases, or None."""
    loop = run.loop()
    return versions.require("megatron.training.global_vars", "get_wandb_writer")() if loop is None else loop.wandb()
