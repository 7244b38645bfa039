"""Which iteration, and which folders, a run goes on from."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pier_megatron.config import PierConfig
from pier_megatron.errors import PierConfigError
from pier_megatron.integration.checkpoint import stored_run
from pier_megatron.integration.checkpoint.content import RunPosition
from pier_megatron.integration.checkpoint.sources import Sources
from pier_megatron.integration.checkpoint.stored_run import StoredRun
from pier_megatron.outer.description import Description


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose checkpoints say what the files of that name say."""

    def entry(folder: Path) -> dict[str, object]:
        path = folder / "said"
        if not path.exists():
            return {}
        island, groups = map(int, path.read_text().split())
        return {"island": None if island < 0 else island, "settings": {"groups": groups}}

    monkeypatch.setattr(stored_run, "_entry", entry)
    return tmp_path


def store(root: Path, said: Mapping[int, Mapping[int, int]], instances: bool = False) -> dict[int, set[int]]:
    """Stores checkpoints of islands: by island and iteration, the number of islands of the run."""
    for island, of_island in said.items():
        folder = root / "islands" / str(island) if island else root
        for iteration, groups in of_island.items():
            checkpoint = folder / f"iter_{iteration:07d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / ".metadata").touch()
            (checkpoint / "said").write_text(f"{-1 if instances else island} {groups}")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(max(of_island)))
    return stored_run._iterations_in(root)


@pytest.mark.parametrize(
    ("said", "step", "iteration", "islands"),
    [
        ({0: {6: 2, 9: 2}, 1: {6: 2, 9: 2}}, None, 9, (0, 1)),
        ({0: {6: 2, 9: 2}, 1: {6: 2, 9: 2}}, 6, 6, (0, 1)),
        # A failure came while they were saving.
        ({0: {6: 2, 9: 2}, 1: {6: 2}}, None, 6, (0, 1)),
        # Folders of an earlier run with four islands.
        ({0: {6: 4, 9: 2}, 1: {6: 4, 9: 2}, 2: {6: 4}, 3: {6: 4}}, None, 9, (0, 1)),
        # The run that had four again failed while it was saving.
        ({0: {6: 4, 9: 2, 12: 4}, 1: {6: 4, 9: 2, 12: 4}, 2: {6: 4, 12: 4}, 3: {6: 4}}, None, 9, (0, 1)),
        # One has lost all: the others say so.
        ({0: {6: 2, 9: 2}}, None, 9, (0,)),
        ({0: {6: 2, 9: 2}, 1: {9: 2}}, 6, 6, (0,)),
    ],
)
def test_islands_of_one_launch_find_what_all_have(
    root: Path, said: dict[int, dict[int, int]], step: int | None, iteration: int, islands: tuple[int, ...]
) -> None:
    assert stored_run._common(root, store(root, said), step) == StoredRun(root, iteration, islands)


def test_groups_in_one_folder_are_left_to_megatron(root: Path) -> None:
    assert stored_run._common(root, store(root, {0: {6: 4}}, instances=True), None) == StoredRun(root)
    # Islands that went on from it failed in their first save: what they have left is not all of their run.
    found = store(root, {0: {9: 4}})
    stored = stored_run._common(root, found, None)
    assert stored == StoredRun(root, 6)
    assert stored.arguments(0) == {"load": str(root), "ckpt_step": 6}
    assert stored_run._common(root / "nothing", {0: set()}, None) == StoredRun(root / "nothing")


def test_elastic_island_goes_on_from_its_own_or_begins_anew(root: Path) -> None:
    found = store(root, {0: {6: 4, 9: 4}, 2: {6: 4}})

    def of(index: int, step: int | None = None, accepts: bool = False) -> StoredRun | None:
        return stored_run._for_an_elastic_island(root, index, found, step, accepts)

    assert of(0) == StoredRun(root, 9, (0,))
    assert of(2) == StoredRun(root, 6, (0, 2))
    # Without one of its own it does not take that of another, unless it is told to.
    assert of(1) is None
    assert of(1, accepts=True) == StoredRun(root, 9, (0,))
    # Told to load an iteration, it says that it does not have it.
    assert of(1, step=9) == StoredRun(root, 9, (0,))
    assert stored_run._for_an_elastic_island(root / "nothing", 1, {0: set()}, None, False) == StoredRun(root / "nothing")


@dataclasses.dataclass(frozen=True)
class Run(RunPosition):
    """The place of a group, in a layout that is the same everywhere."""

    def describe(self, iteration: int, **content: Any) -> Description:
        return Description.of_run(self.config, iteration, {}, self.device_type, island=self.group, **content)


def place_of(groups: int, **settings: Any) -> Run:
    config = PierConfig(train_iters=12, groups=groups, sync_interval=2, islands=True, **settings)
    return Run(config, "cpu", 0, dist.GroupMember.NON_GROUP_MEMBER, [], [])


@pytest.mark.parametrize(
    ("settings", "in_world", "in_launch"),
    [
        ({}, range(4), range(4)),
        ({"islands": True}, range(2, 3), range(4)),
        ({"islands": True, "lighthouse": "http://127.0.0.1:29510", "island": 2}, range(2, 3), range(2, 3)),
    ],
    ids=["instances", "islands of one launch", "elastic island"],
)
def test_groups_that_share_a_folder_and_those_that_decide_together(
    settings: Mapping[str, Any], in_world: range, in_launch: range
) -> None:
    config = PierConfig(train_iters=12, groups=4, sync_interval=2, **settings)
    place = RunPosition(config, "cpu", 2, dist.GroupMember.NON_GROUP_MEMBER, [], [])
    assert (place.in_world, place.in_launch) == (in_world, in_launch)


def test_mean_of_islands_needs_the_folders_of_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = place_of(4).describe(3, is_local=True)
    monkeypatch.setattr(StoredRun, "description", lambda stored, key: saved)
    whole, stored = StoredRun(root, 3, (0, 1, 2, 3)), StoredRun(root, 3, (0, 1, 3))
    Sources(place_of(2), whole).check_folders(saved)
    with pytest.raises(PierConfigError, match=r"the islands \[2\] hold no checkpoint of iteration 3.*--pier-load-inner-state"):
        Sources(place_of(2), stored).check_folders(saved)
    Sources(place_of(2, load_inner_state="first"), stored).check_folders(saved)
    # As many islands as were saved: the one without a folder of its own takes the state of island 0.
    Sources(place_of(4), stored).check_folders(saved)
    assert "island 2, which takes the inner state of island 0" in Sources(place_of(4), stored).lacking(saved)[0]
