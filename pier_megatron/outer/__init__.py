"""The outer optimizer on flat FP32 buffers: its state, how pseudo-gradients cross the groups, and the update.

Nothing in here knows Megatron.
"""

from pier_megatron.outer.exchange import GroupExchange
from pier_megatron.outer.state import OuterState
from pier_megatron.outer.step import momentum_warmup, nesterov_step

__all__ = ["GroupExchange", "OuterState", "momentum_warmup", "nesterov_step"]
