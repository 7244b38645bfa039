"""The first thing that runs where a GPU is at hand, on small shards."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import first_step

pytestmark = pytest.mark.processes


def test_outer_steps_of_7b_shards_are_the_same_in_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_TEST_DEVICE", "cpu")
    blocking, _, _, hidden = first_step.MODES
    found = list(first_step.rows(500_000, [blocking, hidden]))
    assert [(row.what, row.status, row.why) for row in found] == [(blocking, "ok", ""), (hidden, "ok", "")]
    anchors = [row.result.split("anchor at least ")[1] for row in found]
    assert anchors[0] == anchors[1]
    assert all("parameters 5.003e+05" in row.result for row in found)
