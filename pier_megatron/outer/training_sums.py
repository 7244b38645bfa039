"""What groups have trained with between two outer steps, for the report of the second one."""

import torch
from torch import Tensor


class TrainingSums:
    """Training losses and gradient norms of one rank since its last outer step; summed on the device, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        """Begins with none."""
        # The loss, how often there was one, the norm, how often there was one.
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, loss: Tensor | float | None, grad_norm: Tensor | float | None) -> None:
        """Adds those of an iteration; None for what it does not have."""
        for place, value in ((0, loss), (2, grad_norm)):
            if value is not None:
                self._sums[place] += value.detach().flatten()[0] if isinstance(value, Tensor) else value
                self._sums[place + 1] += 1

    def take(self) -> Tensor:
        """Returns the sums, to be sent behind those of a round, and begins again."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    @staticmethod
    def means(sums: Tensor) -> dict[str, float]:
        """Evaluates what groups have sent.

        Args:
            sums: Sums of the contributing groups, whose last four columns are those of :meth:`take` over all ranks of a group;
                float64, shape ``[groups, columns]``.

        Returns:
            Attributes of :class:`OuterStepReport`; none of what no group has noted.
        """
        found = {}
        loss, losses, norm, norms = sums[:, -4:].unbind(1)
        if losses.any():
            of_groups = loss[losses > 0] / losses[losses > 0]
            found = {"loss": of_groups.mean().item(), "loss_min": of_groups.min().item(), "loss_max": of_groups.max().item()}
        if norms.any():
            found["grad_norm"] = (norm[norms > 0] / norms[norms > 0]).mean().item()
        return found
