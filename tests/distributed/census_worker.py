"""The processes of the test of the census: ``python census_worker.py DIRECTORY WORLD_SIZE``. No Megatron, gloo."""

import sys
from pathlib import Path

import forked_ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from pier_megatron.integration.census import CollectiveCensus


def main() -> None:
    dist.init_process_group("gloo")
    pair, _ = dist.new_subgroups(2)
    values = torch.zeros(6)
    with CollectiveCensus() as census:
        functional.wait_tensor(functional.all_reduce(values, "sum", pair))
        functional.wait_tensor(functional.all_gather_tensor(values.double(), 0, pair))
        functional.wait_tensor(functional.reduce_scatter_tensor(values.half(), "sum", 0, pair))
        functional.wait_tensor(functional.all_to_all_single_autograd(values, [3, 3], [3, 3], pair))
        dist.all_gather_into_tensor(torch.zeros(24), values)
        dist.all_to_all_single(torch.zeros(6), values, [3, 3], [3, 3], group=pair)
        dist.barrier(group=pair)
        swap = [dist.P2POp(kind, values, group=pair, group_peer=1 - pair.rank()) for kind in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
    torch.save(census.collectives, Path(sys.argv[1]) / f"census-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    forked_ranks.run(int(sys.argv[2]), main)
