"""The short form of the second half of ``make torture``."""

from pathlib import Path

import pytest
from islands_torture import torture

pytestmark = pytest.mark.processes


def test_short_torture_of_islands(tmp_path: Path) -> None:
    outcome = torture(tmp_path, events=4, seed=1)
    assert outcome.events.total() == 4
    assert outcome.remaining == 0
