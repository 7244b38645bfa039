"""The short form of ``make torture``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPOSITORY
from torture import torture

pytestmark = pytest.mark.processes


def test_short_torture(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    outcome = torture(tmp_path, corpus, ranks=2, kills=2, seed=1)
    assert outcome.differences == []
    assert outcome.hangs == outcome.lost == 0
    assert outcome.kills == 2


@pytest.mark.parametrize("script", ["tests/end_to_end/torture.py", "tests/loop/islands_torture.py"])
def test_long_form_finds_what_it_imports(script: str) -> None:
    # Outside of pytest, which adds folders of its own.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, str(REPOSITORY / script), "--help"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
