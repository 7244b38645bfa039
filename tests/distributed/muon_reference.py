"""Muon for matrices and AdamW for the rest, in one process: ``emerging_optimizers``' own Muon, on the weights of a checkpoint.

Everything is float64 but the orthogonalization, which takes and gives float32.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from gpt_reference import HEADS
from torch import Tensor

MOMENTUM = 0.9

# Along which dimension tensor parallelism cuts a matrix of each kind.
_CUT = {"linear_qkv.weight": 0, "linear_fc1.weight": 0, "linear_proj.weight": 1, "linear_fc2.weight": 1}


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains it: matrices of layers, stacked, and position embeddings, which Megatron does not count as such."""
    return name.endswith("position_embeddings.weight") or (
        ".layers." in name and name.endswith("weight") and parameter.ndim > 2
    )


class _Muon(Muon):
    """Muon on stacks of matrices; ``blocks`` is the number of tensor-parallel ranks that orthogonalize their own parts."""

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str], blocks: int, **settings: Any) -> None:
        super().__init__(parameters, momentum=MOMENTUM, fp32_matmul_prec="highest", **settings)
        self._names = {id(parameter): name for parameter, name in zip(parameters, names, strict=True)}
        self._blocks = blocks

    def orthogonalize(self, p: Tensor, grad: Tensor, **_: Any) -> Tensor:
        name = self._names[id(p)]
        dimension = next((dimension - 2 for kind, dimension in _CUT.items() if name.endswith(kind)), -2)
        blocks = self._blocks if name.endswith(tuple(_CUT)) else 1
        each = [self._of_block(name, block) for block in grad.reshape(-1, *grad.shape[-2:]).float().chunk(blocks, dimension)]
        return torch.cat(each, dimension).double().view(grad.shape)

    def _of_block(self, name: str, stack: Tensor) -> Tensor:
        if not name.endswith("linear_qkv.weight"):
            return self.scaled_orthogonalize_fn(stack)
        # Megatron interleaves query, key and value by head, and orthogonalizes the three apart.
        hidden = stack.shape[-1]
        by_head = stack.unflatten(-2, (-1, 3, hidden // HEADS))
        each = [self.scaled_orthogonalize_fn(by_head.select(-3, kind).flatten(-3, -2)) for kind in range(3)]
        return torch.stack([part.unflatten(-2, (-1, hidden // HEADS)) for part in each], -3).view(stack.shape)


class _Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> collections.ChainMap[Tensor, Any]:
        return collections.ChainMap(*(optimizer.state for optimizer in self._optimizers))

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def muon(
    names: Sequence[str],
    adamw: Callable[[list[Tensor], list[str]], torch.optim.Optimizer],
    lr: float,
    decay: float,
    blocks: int,
) -> Callable[[list[Tensor]], Any]:
    """What makes the inner optimizer of one group.

    Args:
        names: Names of the parameters.
        adamw: Makes the optimizer of those that are no matrices, with their names.
        lr: Learning rate.
        decay: Weight decay.
        blocks: Number of blocks, as for the class above.
    """

    def make(parameters: list[Tensor]) -> Any:
        pairs = list(zip(parameters, names, strict=True))
        matrices = [pair for pair in pairs if is_matrix(pair[1], pair[0])]
        rest = [pair for pair in pairs if not is_matrix(pair[1], pair[0])]
        return _Both(
            _Muon([p for p, _ in matrices], [name for _, name in matrices], blocks, lr=lr, weight_decay=decay),
            adamw([p for p, _ in rest], [name for _, name in rest]),
        )

    return make
