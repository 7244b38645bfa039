"""Gossip among a few groups at a time, as a rule pairs: how participants are drawn, and what they send each other.

Nothing here waits for a group that is not met. Reference: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training
Method for Large Models", arXiv 2506.10911.
"""

import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_megatron.exchange.collectives import Computed, Gathered, GroupExchange, Residual, Sum
from pier_megatron.exchange.wire import Wire


def draw_subgroups(groups: int, size: int, seed: int, iteration: int) -> list[tuple[int, ...]]:
    """Draws which groups meet after an iteration; the same on every rank, without talking.

    Returns:
        Every group once, in subgroups of ``size``; the last has the remainder, which may be a single group that sits out.
    """
    order = list(range(groups))
    random.Random(f"{seed}/{iteration}").shuffle(order)
    return [tuple(sorted(order[begin : begin + size])) for begin in range(0, groups, size)]


class Subgroup(GroupExchange):
    """Some of the groups, which send to each other directly, over the communicator of all.

    Once all groups have met on it: over NCCL, the first message of a communicator is a meeting of all its ranks.
    """

    def __init__(self, everyone: GroupExchange, groups: Sequence[int]) -> None:
        """Looks at the ``groups`` among all of them, in order; this rank's group is one of them."""
        self.process_group, self.codec, self.groups = everyone.process_group, everyone.codec, tuple(groups)
        self.size, self.rank = len(groups), groups.index(everyone.rank)
        self.wire = Wire(self.codec, self.size, is_direct=True)

    def sum(self, vectors: Sequence[Tensor], residuals: Sequence[Residual | None] = (), exactly: bool = False) -> Sum:
        """Begins to sum vectors over these groups, in FP32; see :meth:`GroupExchange.sum`."""
        if self.size == 1:
            return Sum()
        return _DirectSum(self, vectors)

    def gather(self, vector: Tensor) -> Gathered:
        """Begins to collect a short vector of each of these groups."""
        vectors = vector.expand(self.size, -1).clone()
        works = self.swap([(vectors[self.rank], [vectors[index] for index in self.others])])
        return Gathered(vectors, works or [Computed(vector.device)])

    def broadcast(self, tensor: Tensor, source: int, targets: Sequence[int]) -> None:
        """Copies a tensor of one of these groups to others of them; see :meth:`GroupExchange.broadcast`."""
        if self.rank == source:
            self._wait([self._operation(dist.isend, tensor, target) for target in targets])
        elif self.rank in targets:
            self._wait([self._operation(dist.irecv, tensor, source)])

    @property
    def others(self) -> list[int]:
        """All of these groups but the own one, by index."""
        return [index for index in range(self.size) if index != self.rank]

    def swap(self, tensors: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> list[dist.Work]:
        """Begins to send tensors to each of the others; each comes with where those of the others arrive."""
        operations = []
        for sent, received in tensors:
            operations += [self._operation(dist.isend, sent, other) for other in self.others]
            operations += [self._operation(dist.irecv, into, other) for into, other in zip(received, self.others, strict=True)]
        return dist.batch_isend_irecv(operations) if operations else []

    def _operation(self, kind: object, tensor: Tensor, index: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self.process_group, group_peer=self.groups[index])  # type: ignore[arg-type]

    def _wait(self, operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class _DirectSum(Sum):
    """Sums in the order of the groups, so that each group gets the same bits."""

    def __init__(self, subgroup: Subgroup, vectors: Sequence[Tensor]) -> None:
        self._subgroup = subgroup
        self._sent = [(vector, [torch.empty_like(vector) for _ in subgroup.others]) for vector in vectors]
        self._works = subgroup.swap(self._sent)

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        rank = self._subgroup.rank
        for vector, received in self._sent:
            in_order = [*received[:rank], vector, *received[rank:]]
            total = in_order[0]
            for other in in_order[1:]:
                total += other
            if total is not vector:
                vector.copy_(total)
