"""What an operator sees of an outer step: one line in the log, scalars in TensorBoard and Weights & Biases."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Prefix of the scalars' names in TensorBoard and Weights & Biases.
SCALAR_PREFIX = "pier/"


@dataclasses.dataclass(frozen=True)
class OuterStepReport:
    """One outer step, the same on all ranks except for ``seconds``.

    Attributes:
        iteration: Iterations completed.
        pseudo_gradient_norm: L2 norm of the mean pseudo-gradient over the whole model.
        momentum_norm: L2 norm of the outer momentum over the whole model, after the update.
        cosine_min: Smallest cosine, over the contributing groups, of a group's pseudo-gradient to the mean one. 1 means
            that all groups moved the same way; groups that moved at random are near ``1 / sqrt(groups)``.
        cosine_mean: Mean of those cosines.
        mu: Outer momentum coefficient.
        eta: Outer learning rate.
        bytes_sent: Bytes that one rank sent to other groups.
        seconds: Wall-clock time, the wait for the slowest group included.
        not_finite: Groups that were left out because their parameters were not finite.
        outliers: Groups that were left out because their pseudo-gradients were too long.
    """

    iteration: int
    pseudo_gradient_norm: float
    momentum_norm: float
    cosine_min: float
    cosine_mean: float
    mu: float
    eta: float
    bytes_sent: int
    seconds: float
    not_finite: tuple[int, ...] = ()
    outliers: tuple[int, ...] = ()

    def line(self) -> str:
        """The line for the log, in the manner of Megatron's own."""
        left_out = "".join(
            f" {why}, LEFT OUT AND RESTARTED: group {', '.join(map(str, groups))} |"
            for why, groups in (("NOT FINITE", self.not_finite), ("OUTLIER", self.outliers))
            if groups
        )
        return (
            f" outer step after iteration {self.iteration:8d} | mu: {self.mu:.3f} | eta: {self.eta:.3f} | "
            f"pseudo-gradient norm: {self.pseudo_gradient_norm:.4E} | momentum norm: {self.momentum_norm:.4E} | "
            f"cosine of groups to mean (min, mean): ({self.cosine_min:.3f}, {self.cosine_mean:.3f}) | "
            f"sent per rank (MB): {self.bytes_sent / 1e6:.2f} | elapsed time (ms): {self.seconds * 1e3:.1f} |" + left_out
        )

    def scalars(self) -> dict[str, float]:
        """What is plotted over iterations, by name."""
        return {
            SCALAR_PREFIX + field.name.replace("_", "-"): float(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("iteration", "not_finite", "outliers")
        } | {SCALAR_PREFIX + "groups-left-out": float(len(self.not_finite) + len(self.outliers))}

    def write(self, print_line: Callable[[str], None], tensorboard: Any, wandb: Any) -> None:
        """Writes the report.

        Args:
            print_line: Prints on the rank that prints Megatron's log.
            tensorboard: Megatron's TensorBoard writer, None on all other ranks.
            wandb: Megatron's Weights & Biases writer, likewise.
        """
        print_line(self.line())
        if tensorboard is not None:
            for name, value in self.scalars().items():
                tensorboard.add_scalar(name, value, self.iteration)
        if wandb is not None:
            wandb.log(self.scalars(), self.iteration)


def norms_and_cosines(sums: Tensor, contributes: Tensor) -> tuple[float, float, float, float]:
    """Evaluates the sums of all groups.

    Args:
        sums: As of :class:`pier_megatron.outer.OuterRound`, over each group's whole model; shape ``[groups, 4]``.
        contributes: Which groups count; boolean, shape ``[groups]``.

    Returns:
        Norm of the mean pseudo-gradient, norm of the momentum, smallest and mean cosine of the contributing groups. A
        cosine with a zero vector is 0.
    """
    own, product, mean, momentum = sums[contributes].unbind(1)
    denominator = (own * mean).sqrt()
    cosine = torch.where(denominator > 0, product / denominator, torch.zeros_like(product))
    return mean[0].sqrt().item(), momentum[0].sqrt().item(), cosine.min().item(), cosine.mean().item()
