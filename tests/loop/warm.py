"""Imported once for all ranks and islands: PyTorch imports what an optimizer's first step needs only then, for seconds."""

from unittest import mock

import archipelago  # noqa: F401
import ranks
import torch
import torchft.process_group  # noqa: F401

_parameter = torch.zeros(1)
_parameter.grad = torch.zeros(1)
# The step asks a GPU whether it records a graph, and no fork of a process that has talked to a GPU can use it.
with (
    mock.patch.object(torch.accelerator, "current_accelerator", return_value=None),
    mock.patch.object(torch.cuda, "is_available", return_value=False),
):
    ranks.inner_optimizer([_parameter]).step()
