"""An outer rule of a user's own, which ranks import by name."""

import torch
from torch import Tensor

from pier_megatron.outer import OuterRule


class Aside(OuterRule):
    """Nesterov momentum out of a second buffer, which the first one only copies: what loses the second one goes another way."""

    memory = ("momentum", "aside")

    def step(self, anchor: Tensor, delta: Tensor, *memory: Tensor) -> None:
        momentum, aside = memory
        torch.add(delta, aside, alpha=self.mu, out=aside)
        momentum.copy_(aside)
        anchor.sub_(delta + self.mu * aside, alpha=self.eta)
