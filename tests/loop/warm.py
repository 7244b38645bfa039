"""Imported once for all ranks of ``ranks.py``: PyTorch imports what an optimizer's first step needs only then, for seconds."""

import ranks
import torch

_parameter = torch.zeros(1)
_parameter.grad = torch.zeros(1)
ranks.inner_optimizer([_parameter]).step()
