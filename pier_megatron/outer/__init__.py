"""The outer optimizer on flat FP32 buffers: its state, how pseudo-gradients cross the groups, and the update.

Nothing in here knows Megatron.
"""

from pier_megatron.exchange.codecs import CODECS
from pier_megatron.exchange.collectives import Gathered, GroupExchange
from pier_megatron.outer.outliers import OutlierDetector
from pier_megatron.outer.rounds import GOOD, NOT_FINITE, OUTLIER, PIPELINE_DEPTH, OuterRound, momentum_warmup, squared_norm
from pier_megatron.outer.staging import Staging
from pier_megatron.outer.state import OuterState, Part

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
