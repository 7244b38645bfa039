"""How a group judges its own pseudo-gradient, alike on all ranks that share its parameters."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.config import PierConfig
from pier_megatron.exchange.collectives import GroupExchange
from pier_megatron.outer.outliers import OutlierDetector
from pier_megatron.outer.rounds import squared_norms
from pier_megatron.outer.staging import Staging
from pier_megatron.outer.verdicts import GOOD, NOT_FINITE, OUTLIER, Verdicts

OverGroup = Callable[[Tensor, "dist.ReduceOp.RedOpType"], None]
"""Reduces a tensor in place over the ranks that share the parameters of this group."""


class Judge:
    """Finds parameters that are not finite and, if the user wants that, pseudo-gradients that are too long.

    Attributes:
        outliers: The history of this group's norms, or None.
    """

    def __init__(
        self,
        config: PierConfig,
        stagings: Sequence[Staging],
        exchange: GroupExchange,
        over_group: OverGroup,
        device: torch.device,
    ) -> None:
        """Judges the pseudo-gradients of ``stagings``; with ``device`` for its collectives."""
        self.outliers = OutlierDetector(config.outlier_zscore) if config.outlier_zscore is not None else None
        self._stagings, self._exchange, self._over_group, self._device = stagings, exchange, over_group, device

    def verdicts(self, fragments: Sequence[int]) -> Verdicts:
        """Judges the pseudo-gradient of some fragments, and begins to collect the verdicts of the other groups."""
        own, norms = self._judge(fragments)
        verdicts = Verdicts(self._exchange, own, self._device)
        if self.outliers is not None and norms and verdicts.own_counts():
            for fragment, norm in zip(fragments, norms, strict=True):
                self.outliers.add(norm, fragment)
        return verdicts

    def _judge(self, fragments: Sequence[int]) -> tuple[int, list[float]]:
        """The own verdict, and the norms by fragment if they were looked at."""
        finite = torch.ones((), dtype=torch.int32, device=self._device)
        for staging in self._stagings:
            finite *= staging.state.parameters_are_finite()
        self._over_group(finite, dist.ReduceOp.MIN)
        if not finite.item():
            return NOT_FINITE, []
        if self.outliers is None:
            return GOOD, []
        squares = squared_norms(self._stagings, fragments, self._device)
        self._over_group(squares, dist.ReduceOp.SUM)
        norms: list[float] = squares.sqrt().tolist()
        # Each fragment by its own history, also after the last iteration, when all are due at once.
        found = any(self.outliers.is_outlier(norm, fragment) for norm, fragment in zip(norms, fragments, strict=True))
        return (OUTLIER if found else GOOD), norms
