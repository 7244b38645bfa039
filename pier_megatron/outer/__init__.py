"""The outer loop in plain PyTorch: when groups meet, what they send, what becomes of it. Nothing in here knows Megatron."""

from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer.chunks import Shards
from pier_megatron.outer.loop import OuterLoop
from pier_megatron.outer.report import OuterStepReport
from pier_megatron.outer.rules import Nesterov, OuterRule
from pier_megatron.outer.snapshot import Snapshot
from pier_megatron.outer.verdicts import DivergedError

__all__ = ["DivergedError", "GroupExchange", "Nesterov", "OuterLoop", "OuterRule", "OuterStepReport", "Shards", "Snapshot"]
