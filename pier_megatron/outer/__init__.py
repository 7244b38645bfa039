"""The outer optimizer on flat FP32 buffers: its state, how pseudo-gradients cross the groups, and the update.

Nothing in here knows Megatron.
"""

from pier_megatron.outer.codecs import CODECS
from pier_megatron.outer.exchange import Gathered, GroupExchange
from pier_megatron.outer.outliers import OutlierDetector
from pier_megatron.outer.staging import Staging
from pier_megatron.outer.state import OuterState, Part
from pier_megatron.outer.step import GOOD, NOT_FINITE, OUTLIER, PIPELINE_DEPTH, OuterRound, momentum_warmup, squared_norm

__all__ = [
    "CODECS",
    "GOOD",
    "NOT_FINITE",
    "OUTLIER",
    "PIPELINE_DEPTH",
    "Gathered",
    "GroupExchange",
    "OuterRound",
    "OuterState",
    "OutlierDetector",
    "Part",
    "Staging",
    "momentum_warmup",
    "squared_norm",
]
