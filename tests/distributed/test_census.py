"""The census of collectives, in real processes on gloo: participants and their bytes."""

import sys
from pathlib import Path

import pytest
import torch
from launch import as_a_fork, execute

from pier_megatron.integration.census import Collective

pytestmark = pytest.mark.processes


def test_ranks_and_bytes_of_every_kind_of_collective(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("census_worker.py")
    execute([sys.executable, str(worker), str(tmp_path), "4"], tmp_path / "log.txt", **as_a_fork())
    for rank, pair in enumerate(((0, 1), (0, 1), (2, 3), (2, 3))):
        assert torch.load(tmp_path / f"census-{rank}.pt", weights_only=False) == [
            # Functional collectives get their group by its name.
            Collective("all_reduce", pair, 24),
            Collective("all_gather_into_tensor", pair, 48),
            Collective("reduce_scatter_tensor", pair, 12),
            Collective("all_to_all_single", pair, 24),
            Collective("_allgather_base_", (0, 1, 2, 3), 24),
            # The sizes of the pieces are an argument too, and come last.
            Collective("alltoall_base_", pair, 24),
            Collective("barrier", pair, 0),
            Collective("send", pair, 24),
            Collective("recv_", pair, 0),
        ]
