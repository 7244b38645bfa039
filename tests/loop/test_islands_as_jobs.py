"""Islands that are jobs: what they come to when some of them die, hang or join, and how soon."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from archipelago import INTERVAL, ISLAND_TIMEOUT, PARTS, Archipelago, Plan, archipelago

from pier_megatron.outer.verdicts import ABSENT, GOOD, NOT_FINITE

pytestmark = pytest.mark.processes


@pytest.fixture
def sea(tmp_path: Path) -> Iterator[Archipelago]:
    with archipelago(tmp_path) as started:
        yield started


def test_undisturbed_islands_are_the_simulated_ones(sea: Archipelago) -> None:
    for index in range(3):
        sea.start(Plan(index, train_iters=30))
    assert [island.wait(30) for island in sea.islands] == [["done"] * PARTS] * 3
    steps = sea.check()
    assert all(step["verdicts"] == [GOOD] * 3 for step in steps.values())
    assert max(steps) == 30
