"""The short form of ``make torture``."""

from pathlib import Path

import pytest
from torture import torture

pytestmark = pytest.mark.processes


def test_short_torture(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    outcome = torture(tmp_path, corpus, ranks=2, kills=1, seed=1)
    assert outcome.differences == []
    assert outcome.hangs == outcome.lost == 0
    assert outcome.kills == 1
