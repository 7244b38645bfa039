"""Makes ``--optimizer pier`` known to the Megatron that this process imports."""

import os

_registered = False


def register() -> None:
    """Adds Pier to Megatron's training loop; call it after Megatron can be imported and before it parses arguments.

    A run without ``--optimizer pier`` and without a flag that works with every optimizer trains as before; with PyTorch's own
    Adam it can also load its checkpoints, see :mod:`pier_megatron.integration.inner.torch_adam`. Calling it again does nothing.

    Raises:
        UnsupportedMegatronError: If this Megatron is not one of the supported releases.
    """
    global _registered
    if _registered:
        return
    from pier_megatron.integration import (
        arguments,
        communication,
        evaluation,
        examination,
        islands,
        logged_means,
        scoring,
        training,
    )
    from pier_megatron.integration.checkpoint import files, helpers, hooks
    from pier_megatron.integration.compression import activations, choice, gradients, parameters, tensor_parallel, traffic
    from pier_megatron.integration.inner import torch_adam
    from pier_megatron.integration.pipeline import layered, skipping

    pipeline = (layered, skipping)
    checkpoints = (files, helpers, hooks)
    for seam in (arguments, islands, communication, torch_adam, *checkpoints, training, evaluation, logged_means, *pipeline):
        seam.install()
    for seam in (choice, gradients, parameters, activations, tensor_parallel, traffic):
        seam.install()
    if examination.VARIABLE in os.environ:
        examination.install()
    if scoring.VARIABLE in os.environ:
        scoring.install()
    _registered = True
