"""Which folder an elastic island resumes from."""

from pathlib import Path

import pytest
import torch.distributed as dist

from pier_megatron.integration.checkpoint import stored_run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``--load`` folder; this process is the only rank."""

    def island_of(folder: Path, step: int | None) -> int | None:
        said = {int(path.name): path.read_text() for path in folder.glob("[0-9]*")} if folder.is_dir() else {}
        found = said.get(step or max(said, default=0), "launch")
        return None if found == "launch" else int(found)

    monkeypatch.setattr(stored_run, "_island_of", island_of)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects: None)
    return tmp_path


def store(folder: Path, iteration: int, by: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(iteration)).write_text(by)


def test_an_island_finds_its_own_checkpoint(root: Path) -> None:
    for island, folder in enumerate((root, root / "islands/1", root / "islands/2")):
        store(folder, 6, str(island))
        assert stored_run.folder_of_island(root, island) == folder
        assert stored_run.find(root, island, None, False) == stored_run.find(root, island, 6, False) == folder


def test_what_a_launch_has_saved_is_for_all_islands(root: Path) -> None:
    store(root, 6, "launch")
    assert [stored_run.find(root, island, None, False) for island in range(3)] == [root] * 3


def test_an_island_without_a_checkpoint_begins_anew_unless_it_may_have_that_of_another(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(root, 6, "0")
    assert stored_run.find(root, 1, None, False) == root / "islands/1"
    said = capsys.readouterr().out
    assert "has no checkpoint of island 1, which starts at iteration 0 and joins the others" in said
    assert "To start from the inner state of island 0, add --pier-override-checkpoint" in said
    assert stored_run.find(root, 1, None, True) == stored_run.find(root, 1, 6, False) == root
    # Its own one is of another iteration than the one that was asked for.
    store(root / "islands/1", 4, "1")
    assert stored_run.find(root, 1, 6, False) == root
    assert stored_run.find(root, 1, None, False) == root / "islands/1"
