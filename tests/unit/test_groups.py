"""Groups and nodes: Megatron's own rank layouts, laid over machines."""

import pytest

from pier_megatron import PierConfigError
from pier_megatron.exchange.topology import Rank, Topology, domain_name


def topology(
    world: int, per_node: int, tensor_parallel: int, members: list[list[int]], per_domain: int | None = None
) -> Topology:
    """Ranks in node order, groups as given."""
    group_of = {rank: group for group, ranks in enumerate(members) for rank in ranks}
    return Topology(
        [
            Rank(
                rank=rank,
                node=f"node {rank // per_node}",
                domain=domain_name(rank, f"node {rank // per_node}", per_domain),
                group=group_of[rank],
                tensor_parallel=rank - rank % tensor_parallel,
            )
            for rank in range(world)
        ]
    )


def test_draws_groups_and_nodes() -> None:
    drawn = topology(16, 4, 2, [[*range(8)], [*range(8, 16)]])
    assert drawn.describe() == ["group 0: ranks 0-7 on node 0, node 1", "group 1: ranks 8-15 on node 2, node 3"]
    drawn.check()
    assert topology(2, 1, 1, [[0], [1]]).describe() == ["group 0: rank 0 on node 0", "group 1: rank 1 on node 1"]


def test_ranks_of_a_node_are_counted_by_its_name_whatever_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # Under srun, torchrun's variable is missing or stale.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    scattered = Topology(
        [Rank(rank, f"node {rank % 3}", f"node {rank % 3}", group=0, tensor_parallel=rank) for rank in range(8)]
    )
    assert [scattered.ranks_beside(rank) for rank in (0, 1, 2)] == [3, 3, 2]
    assert topology(16, 4, 2, [[*range(8)], [*range(8, 16)]]).ranks_beside(5) == 4


def test_tensor_parallelism_may_cross_nodes_inside_a_fast_network() -> None:
    members = [[*range(8)], [*range(8, 16)]]
    spanning = topology(16, 4, 8, members, per_domain=8)
    spanning.check()
    assert spanning.describe() == [
        "group 0: ranks 0-7 on domain 0 (node 0, node 1)",
        "group 1: ranks 8-15 on domain 1 (node 2, node 3)",
    ]
    with pytest.raises(PierConfigError, match=r"crosses nodes.*say with --pier-ranks-per-domain"):
        topology(16, 4, 8, members).check()
    with pytest.raises(PierConfigError, match=r"crosses domains \(rank 0 on domain 0, .*rank 2 on domain 1"):
        topology(16, 4, 4, members, per_domain=2).check()
