"""The communicator between elastic islands, in real processes: what it computes, and that nobody waits for a silent one."""

import sys
from pathlib import Path

import pytest
import torch
from communicator_worker import COMPARED, DEAD, ISLANDS, TIMEOUT_SECONDS
from exchange_worker import DEVICE, vector
from launch import as_a_fork, execute

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    folder = tmp_path_factory.mktemp("communicator")
    worker = Path(__file__).with_name("communicator_worker.py")
    execute([sys.executable, str(worker), str(folder)], folder / "log.txt", **as_a_fork(DEVICE.type))
    return [torch.load(folder / f"communicator-{rank}.pt", weights_only=False) for rank in range(ISLANDS)]


@pytest.mark.parametrize("codec", COMPARED)
def test_collectives_on_the_device(records: list[dict[str, dict]], codec: str) -> None:
    found = [record["collectives"][codec] for record in records]
    exact = sum(vector(rank).cpu().double() for rank in range(ISLANDS))
    assert all(torch.equal(each["sum"], found[0]["sum"]) for each in found)
    torch.testing.assert_close(found[0]["sum"].double(), exact, rtol=0, atol=1e-5 if codec == "fp32" else 0.5)
    assert all(each["gathered"].tolist() == [[7, rank] for rank in range(ISLANDS)] for each in found)
    assert [each["handed"].tolist() for each in found] == [[0.0] * 3, [1.0] * 3, [1.0] * 3]


def test_all_are_interrupted_when_one_hears_that_another_is_silent(records: list[dict[str, dict]]) -> None:
    for rank in set(range(ISLANDS)) - {DEAD}:
        for waiting, seconds in records[rank]["seconds"].items():
            assert seconds < TIMEOUT_SECONDS / 2, f"{waiting} waits for the time-out"
