"""How a checkpoint describes itself, and which runs may resume from it."""

import argparse
import dataclasses
from pathlib import Path
from unittest import mock

import pytest

from pier_megatron import PierConfig
from pier_megatron.commands import planned_job
from pier_megatron.errors import PierConfigError
from pier_megatron.integration.checkpoint.description import ENTRY, Description


def described(groups: int = 2, own: tuple[int, ...] = (), **changes: object) -> Description:
    config = PierConfig(**({"train_iters": 1000, "groups": groups} | changes))  # type: ignore[arg-type]
    return Description.of_run(
        config, 400, {"ranks in a group": 2}, "cpu", own_inner_state=own, is_local=True, is_synchronised=True
    )


def test_metadata_is_plain_and_comes_back() -> None:
    description = described(own=(1,))
    assert Description.from_metadata(description.to_metadata()) == description


def test_same_run_goes_on_exactly() -> None:
    assert described().is_exact_for(described())
    assert described().check(described(), accepts_changes=False) == []
    assert not described().is_exact_for(described(chunk_mib=8))
    assert described().check(described(chunk_mib=8, offload=True), accepts_changes=False) == []
    # What depends on how ranks share the parameters.
    one, other = (dataclasses.replace(described(preset="noloco", fragments=2), cut=cut) for cut in (1, 2))
    assert one.is_exact_for(one)
    assert not one.is_exact_for(other)
    assert one.has_layout_of(other)
    other = dataclasses.replace(described(), layout={"ranks in a group": 4})
    assert described().check(other, accepts_changes=True) == ["ranks in a group 2 is now 4"]
    assert not described().has_layout_of(other)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preset": "noloco"}, "outer rule nesterov is now noloco"),
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
    assert dataclasses.replace(described(), iteration=100, is_local=False).holds_all_groups  # The last of the lazy start.


def test_what_is_not_there_has_to_be_accepted() -> None:
    lacking = ["there is no checkpoint of iteration 400 of island 1"]
    with pytest.raises(PierConfigError, match=r"of island 1.*--pier-override-checkpoint"):
        described().check(described(), accepts_changes=False, lacking=lacking)
    assert described().check(described(), accepts_changes=True, lacking=lacking) == lacking


def test_older_format_is_refused() -> None:
    with pytest.raises(PierConfigError, match=r"iteration 400 .* in format 7.*Finish the run .* or begin .* with --finetune"):
        Description.from_metadata(described().to_metadata() | {"format": 7, "version": "0.1.0"})


def test_doctor_accepts_weights_of_an_older_format() -> None:
    """The refusal names --finetune, and the job accepts it."""
    older = {ENTRY: described().to_metadata() | {"format": 7, "version": "0.1.0"}}
    files = mock.Mock(load_content_metadata=mock.Mock(return_value=older))
    config = PierConfig(train_iters=1000, groups=2)
    with mock.patch.multiple(
        planned_job,
        stored_checkpoint=mock.Mock(return_value=Path("run/iter_0000400")),
        refusal=mock.Mock(return_value=None),
        versions=mock.Mock(require=mock.Mock(return_value=files)),
    ):
        given = argparse.Namespace(load="run", ckpt_step=None, finetune=False)
        with pytest.raises(PierConfigError, match="with --finetune"):
            planned_job.check_checkpoint(given, config, 2)
        given.finetune = True
        assert "begins from its weights" in str(planned_job.check_checkpoint(given, config, 2))


def test_an_elastic_island_is_alone_in_its_folder() -> None:
    island = described(own=(0,), lighthouse="http://h:1", island=1)
    assert island.sources(1, 2, "mean") == [0]
    with pytest.raises(PierConfigError, match="run in one launch is now in elastic islands"):
        described().check(island, accepts_changes=False)


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


def test_run_that_would_fall_back_into_the_lazy_start_is_refused() -> None:
    saved = described()
    longer = described(train_iters=10_000)
    with pytest.raises(PierConfigError, match=r"--train-iters 10000.*to iteration 1000.*at iteration 400.*lazy-start-iters"):
        saved.check(longer, accepts_changes=True)
    assert saved.check(described(train_iters=10_000, lazy_start_iters=100), accepts_changes=True)
    # From within the lazy start it may be made as long as one likes.
    assert dataclasses.replace(saved, iteration=50, is_local=False).check(longer, accepts_changes=True)
