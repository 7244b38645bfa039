"""Pier for Megatron-LM: drop-in ``--optimizer pier``, the network between nodes out of the training step.

Reference: Fan & Zhang, "Pier: Efficient Large Language Model pretraining with Relaxed Global Communication", arXiv 2511.17849.
"""

from typing import TYPE_CHECKING

from pier_megatron import experiments, features
from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.version import __version__

if TYPE_CHECKING:
    from pier_megatron.exchange.worlds import Launch
    from pier_megatron.integration.optimizer import PierOptimizer

__all__ = ["PierConfig", "PierConfigError", "PierOptimizer", "__version__", "launch", "register"]


# Assigned, not added: a package that is executed again, as by importlib.reload, has its features once.
features.FEATURES[:] = experiments.modules("feature").values()


def register() -> None:
    """Adds Pier to Megatron's training loop: :func:`pier_megatron.integration.seams.register`."""
    # It imports PyTorch, which takes a command line that only asks for help seconds.
    from pier_megatron.integration import seams

    seams.register()


def launch() -> "Launch":
    """Place of this process in its launch, once Megatron has initialized ``torch.distributed``: its rank, size and group."""
    from pier_megatron.integration import own_world

    return own_world.launch()


def __getattr__(name: str) -> "type[PierOptimizer]":
    # PierOptimizer extends a class of Megatron, whose import must not happen before the launcher has prepared it.
    if name == "PierOptimizer":
        from pier_megatron.integration.optimizer import PierOptimizer

        return PierOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
