"""The short form of the second half of ``make torture``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from islands_torture import Event, draw, shrunk, torture

# What an island's death or a pause does has tests of its own.
_FIXED = "cut_one_way:2:0.1:0.2 restart_from_an_older_save:1:0.1:0.1 darken:0:0.3:0.1 hang:1:0.1:0.7"
_LOST, _SAVED = "die_in_the_exchange:1:0.1:0.2", "restart_of_all_from_a_save:0:0.3:0.9"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "fixed"),
    [
        ({}, _FIXED),
        ({"overlap": 2, "fragments": 2, "codec": "int2"}, _FIXED),
        ({"overlap": 5, "rule": "muon"}, f"{_LOST} {_SAVED}"),
    ],
)
def test_short_torture_of_islands(tmp_path: Path, settings: dict[str, Any], fixed: str) -> None:
    events = list(map(Event.parse, fixed.split()))
    outcome = torture(tmp_path, events, settings)
    assert outcome.events.total() == len(events)
    assert outcome.remaining == 0
    # What the codec drops is late and not lost, whoever dies meanwhile.
    assert (outcome.conserved > 0) == ("codec" in settings)


def test_failure_shrinks_to_what_is_needed_and_is_replayed() -> None:
    events = draw(40, seed=3)
    tried = []

    def fails(some: Sequence[Event]) -> bool:
        tried.append(some)
        return events[7] in some and events[31] in some

    assert shrunk(events, fails, attempts=200) == [events[7], events[31]]
    assert len(tried) < 60
    assert fails(shrunk(events, fails, attempts=3))
    assert [Event.parse(str(event)) for event in events] == events
