"""Which iteration of a job ``pier-megatron doctor --start`` looks at."""

import pytest

from pier_megatron import PierConfig
from pier_megatron.integration.examination import examined_iteration


@pytest.mark.parametrize(
    ("flags", "iteration", "place"),
    [
        ({"sync_interval": 50}, 2, "between outer steps"),
        ({"sync_interval": 50, "overlap": 25, "fragments": 2}, 2, "before the first outer step"),
        ({"sync_interval": 50, "overlap": 10, "fragments": 2}, 2, "between outer steps"),
        ({"sync_interval": 3, "overlap": 2}, 2, "before the first outer step"),
        ({"sync_interval": 2}, 3, "between outer steps"),
        ({"sync_interval": 2, "overlap": 1}, 2, "as every iteration of this job"),
        ({"sync_interval": 4, "fragments": 4}, 2, "as every iteration of this job"),
        ({"sync_interval": 1}, 2, "as every iteration of this job"),
        ({"sync_interval": 50, "train_iters": 3}, 2, "between outer steps"),
        ({"sync_interval": 50, "train_iters": 2}, 1, "between outer steps"),
    ],
)
def test_iteration_without_an_exchange_if_there_is_one(flags: dict[str, int], iteration: int, place: str) -> None:
    config = PierConfig(**{"train_iters": 1000, "groups": 2, "lazy_start_iters": 0} | flags)
    assert examined_iteration(config)[0] == iteration
    assert place in examined_iteration(config)[1]
