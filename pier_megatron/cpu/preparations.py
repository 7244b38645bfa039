"""Prepares a machine without a GPU before PyTorch is imported: Megatron's flags, and silenced warnings."""

import logging
import warnings
from collections.abc import Sequence

# What the local (non-Transformer-Engine) path on gloo needs, each with the values it takes. A flag that the command line
# already names is left as the user wrote it.
_CPU_FLAGS: tuple[tuple[str, ...], ...] = (
    ("--distributed-backend", "gloo"),
    ("--transformer-impl", "local"),
    ("--attention-backend", "unfused"),
    ("--num-workers", "0"),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-gelu-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
    ("--no-persist-layer-norm",),
    ("--no-gradient-accumulation-fusion",),
)

LOCAL = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion"
)
"""Flags with which Megatron does without Transformer Engine and Apex, on GPUs too."""


def missing_cpu_flags(argv: Sequence[str]) -> list[str]:
    """Flags with their values that Megatron needs on the CPU and that a script's arguments do not name yet."""
    given = {argument.split("=", 1)[0] for argument in argv}
    return [word for flag in _CPU_FLAGS if flag[0] not in given for word in flag]


def silence_missing_extensions() -> None:
    """Keeps every module of every rank from warning that GPU extensions are missing: on a CPU they always are."""
    for message in (
        "Transformer Engine and Apex are not",
        "Apex is not installed",
        "Only transformer-engine",
        "invalid escape",
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in record.msg)
