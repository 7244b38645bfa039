"""What is logged is the mean over all iterations of all groups that were not skipped."""

import math

import pytest

from pier_megatron.integration.logged_means import GroupLog, means


def group(loss: float, total: float, advanced: int, skipped: bool = False, norm: float | None = 1.0) -> GroupLog:
    sums = {"lm loss": total} if advanced else {}
    return GroupLog({"lm loss": loss}, sums, advanced, skipped, None if skipped else norm)


@pytest.mark.parametrize(
    ("groups", "loss", "average"),
    [
        ((group(4.0, 9.0, 2), group(2.0, 6.0, 2)), 3.0, 21 / 6),
        # One skipped this iteration, or one before it, or all so far.
        ((group(4.0, 9.0, 2), group(2.0, 6.0, 2, skipped=True)), 4.0, 19 / 5),
        ((group(4.0, 9.0, 2), group(2.0, 3.0, 1)), 3.0, 18 / 5),
        ((group(4.0, 9.0, 2), group(math.nan, 0.0, 0, skipped=True)), 4.0, 13 / 3),
        # All skipped this iteration: its losses are seen, but do not count.
        ((group(4.0, 9.0, 2, skipped=True), group(2.0, 3.0, 1, skipped=True)), 3.0, 12 / 3),
    ],
)
def test_skipped_iterations_do_not_count(groups: tuple[GroupLog, ...], loss: float, average: float) -> None:
    for order in (groups, groups[::-1]):
        found = means(order)
        assert found.losses == pytest.approx({"lm loss": loss})
        assert found.averages == pytest.approx({"lm loss": average})


def test_nothing_advanced_anywhere() -> None:
    found = means([group(4.0, 0.0, 0, skipped=True), group(2.0, 0.0, 0, skipped=True)])
    assert (found.losses, found.averages, found.grad_norm) == ({"lm loss": 3.0}, {}, None)


def test_gradient_norm_is_the_mean_of_those_there_are() -> None:
    groups = [group(1.0, 1.0, 1, norm=2.0), group(1.0, 1.0, 1, norm=4.0), group(1.0, 1.0, 1, skipped=True)]
    assert means(groups).grad_norm == 3.0


def test_stages_without_losses_have_nothing_to_log() -> None:
    found = means([GroupLog({}, {}, 2, False, 1.0), GroupLog({}, {}, 1, True, None)])
    assert (found.losses, found.averages) == ({}, {})
