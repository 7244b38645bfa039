"""Pier for Megatron-Bridge: an optimizer configuration does what ``--optimizer pier`` does for Megatron-LM.

A recipe of Megatron-Bridge trains with Pier once its ``config.optimizer`` is a :class:`PierOptimizerConfig`;
:func:`with_pier` sets it in one line. Importing this package makes Pier known to Megatron-Bridge.
"""

from pier_megatron.bridge import seams
from pier_megatron.bridge.config import PierOptimizerConfig, with_pier

__all__ = ["PierOptimizerConfig", "with_pier"]

seams.register()
