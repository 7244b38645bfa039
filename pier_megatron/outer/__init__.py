"""The outer optimizer on flat FP32 buffers: its state, how pseudo-gradients cross the groups, and the update.

Nothing in here knows Megatron.
"""

from pier_megatron.outer.codecs import CODECS
from pier_megatron.outer.exchange import Gathered, GroupExchange
from pier_megatron.outer.staging import Staging
from pier_megatron.outer.state import OuterState, Part
from pier_megatron.outer.step import PIPELINE_DEPTH, OuterRound, momentum_warmup

__all__ = [
    "CODECS",
    "PIPELINE_DEPTH",
    "Gathered",
    "GroupExchange",
    "OuterRound",
    "OuterState",
    "Part",
    "Staging",
    "momentum_warmup",
]
