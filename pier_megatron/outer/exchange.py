"""How pseudo-gradients cross the groups: a communicator that carries nothing else."""

import torch
import torch.distributed as dist
from torch import Tensor


class GroupExchange:
    """Collectives between the ranks that own the same parameters, one rank of each group.

    Attributes:
        size: Number of groups.
        rank: Index of this rank's group.
        bytes_sent: Bytes that this rank has put on the wire since the counter was last reset, by the cost model of a ring.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wraps the plugin's own communicator.

        Args:
            process_group: One rank of each group, in group order. None stands for a single group: there is nobody to
                talk to.
        """
        self._process_group = process_group
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.bytes_sent = 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums ``tensor`` over the groups in place; every group holds the same bits afterwards."""
        if self._process_group is not None:
            dist.all_reduce(tensor, group=self._process_group)
            self.bytes_sent += self.all_reduce_bytes(tensor.nbytes)
        return tensor

    def gather(self, vector: Tensor) -> Tensor:
        """Collects a short vector of each group.

        Args:
            vector: Shape ``[n]``.

        Returns:
            Shape ``[groups, n]``, the same on every rank.
        """
        if self._process_group is None:
            return vector[None]
        gathered = [torch.empty_like(vector) for _ in range(self.size)]
        dist.all_gather(gathered, vector, group=self._process_group)
        return torch.stack(gathered)

    def all_reduce_bytes(self, nbytes: int) -> int:
        """Bytes that each rank sends to all-reduce ``nbytes``: a reduce-scatter and an all-gather on a ring."""
        return round(2 * nbytes * (self.size - 1) / self.size)
