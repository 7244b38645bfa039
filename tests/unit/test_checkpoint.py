"""What a checkpoint says about itself, and who may go on from it."""

import dataclasses

import pytest

from pier_megatron import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.outer.description import Description


def described(groups: int = 2, own: tuple[int, ...] = (), **changes: object) -> Description:
    config = PierConfig(1000, groups=groups, **changes)  # type: ignore[arg-type]
    return Description.of_run(config, 400, {"ranks in a group": 2}, own_inner_state=own)


def test_metadata_is_plain_and_comes_back() -> None:
    description = described(own=(1,))
    assert Description.from_metadata(description.to_metadata()) == description


def test_same_run_goes_on_exactly() -> None:
    assert described().is_exact_for(described())
    assert described().check(described(), accepts_changes=False) == []
    assert not described().is_exact_for(described(chunk_mib=8))
    assert described().check(described(chunk_mib=8, offload=True), accepts_changes=False) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"groups": 4}, "--pier-groups 2 is now 4"),
        ({"sync_interval": 25}, "--pier-sync-interval 50 is now 25"),
        ({"preset": "diloco"}, "--pier-preset pier is now diloco"),
        ({"outer_lr": 0.5}, "--pier-outer-lr None is now 0.5"),
        ({"lazy_start_iters": 200}, "--pier-lazy-start-iters 100 is now 200"),
    ],
)
def test_another_run_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(PierConfigError, match=f"{said}.*--pier-override-checkpoint"):
        described().check(described(**changes), accepts_changes=False)  # type: ignore[arg-type]
    assert said in described().check(described(**changes), accepts_changes=True)  # type: ignore[arg-type]


def test_checkpoint_of_the_first_group_is_not_all() -> None:
    assert described(own=(1,)).holds_all_groups
    assert not described().holds_all_groups
    assert dataclasses.replace(described(), iteration=100).holds_all_groups  # The last of the lazy start.


def test_layout_counts() -> None:
    other = dataclasses.replace(described(), layout={"ranks in a group": 4})
    assert described().check(other, accepts_changes=True) == ["ranks in a group 2 is now 4"]
    assert not described().has_layout_of(other)


def test_newer_format_is_refused() -> None:
    future = described().to_metadata() | {"format": 2, "version": "9.0"}
    with pytest.raises(PierConfigError, match=r"pier_megatron 9\.0 in format 2.*Upgrade"):
        Description.from_metadata(future)


@pytest.mark.parametrize(
    ("saved", "own", "groups", "rule", "expected"),
    [
        # The same number: each its own; what is not stored apart is what Megatron's keys hold.
        (4, (1, 2, 3), 4, "mean", [[0], [1], [2], [3]]),
        (4, (0, 1, 2, 3), 4, "first", [[0], [1], [2], [3]]),
        (4, (), 4, "mean", [[0], [0], [0], [0]]),
        # Fewer: those whose place a group takes.
        (8, tuple(range(8)), 4, "mean", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, tuple(range(8)), 4, "first", [[0], [0], [0], [0]]),
        (3, (0, 1, 2), 2, "mean", [[0, 1], [1, 2]]),
        # More: the one that a group comes from.
        (2, (1,), 4, "mean", [[0], [0], [1], [1]]),
    ],
)
def test_sources_of_the_inner_state(
    saved: int, own: tuple[int, ...], groups: int, rule: str, expected: list[list[int]]
) -> None:
    description = described(groups=saved, own=own)
    assert [description.sources(group, groups, rule) for group in range(groups)] == expected


@pytest.mark.parametrize(
    ("iteration", "changes", "expected"),
    [
        (90, {}, True),
        (400, {}, True),
        (410, {}, False),
        (1000, {}, True),
        (400, {"overlap": 10}, False),
        (400, {"fragments": 2}, False),
        (1000, {"overlap": 10, "fragments": 2}, True),
    ],
)
def test_weights_are_synchronised_where_all_groups_have_met(iteration: int, changes: dict[str, object], expected: bool) -> None:
    saved = dataclasses.replace(described(**changes), iteration=iteration)  # type: ignore[arg-type]
    assert saved.holds_synchronised_weights is expected
