"""How a checkpoint describes itself, which runs resume from it, where an island finds its own, and what damaged files are."""

import argparse
import dataclasses
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from pier_megatron import PierConfig
from pier_megatron.commands import planned_job
from pier_megatron.errors import PierConfigError
from pier_megatron.integration.checkpoint import stored_run
from pier_megatron.integration.checkpoint.description import ENTRY, Description
from pier_megatron.integration.checkpoint.files import damage, names_nothing, newest_whole


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


def test_a_longer_run_is_told_the_whole_line() -> None:
    with pytest.raises(
        PierConfigError, match=r"--train-iters 1000 is now 2000.* --pier-override-checkpoint with --override-opt"
    ):
        described().check(described(train_iters=2000), accepts_changes=False)


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"weight": torch.arange(12.0), "bias": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_files_that_are_missing_or_short(folder: Path) -> None:
    (data,) = folder.glob("*.distcp")
    size = data.stat().st_size
    assert damage(folder) is None
    with data.open("r+b") as file:
        file.truncate(size // 2)
    assert f"{data.name} has {size // 2:,} of" in str(damage(folder))
    data.unlink()
    assert damage(folder) == f"{data.name} is missing"


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert newest_whole(tmp_path) is None
    groups = {3: ["pier.group_0.rank_0.objects", "pier.group_1.rank_0.objects"]}
    groups |= {6: groups[3], 9: groups[3][:1], 12: ["weight"]}
    for number, keys in groups.items():
        path = tmp_path / f"iter_{number:07d}"
        dcp.save({key: torch.ones(3) for key in keys}, checkpoint_id=path, no_dist=True)
    described_as = {"pier": {"settings": {"groups": 2}, "island": None}}
    monkeypatch.setattr(dist_checkpointing, "load_content_metadata", lambda folder: described_as)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("12")
    assert newest_whole(tmp_path) is None
    (tmp_path / "iter_0000012/.metadata").unlink()
    number, said = newest_whole(tmp_path)
    # Group 1 had not ended its part of iteration 9.
    assert number == 6
    assert "iter_0000012: .metadata cannot be read" in said
    assert damage(tmp_path / "iter_0000009") == "its save has not ended: groups [1] are not in .metadata"
    for content in (b"", b"\xff\x00", b"15"):
        tracker.write_bytes(content)
        assert newest_whole(tmp_path)[0] == 6
        # Megatron would end at the first two with exit status 0; the third is the number of an iteration.
        said, wrong = names_nothing(tmp_path), {b"": "is empty", b"\xff\x00": "no iteration"}.get(content)
        assert (said is None) == (wrong is None)
        assert wrong is None or (f"iteration.txt {wrong}" in said.replace("holds '\ufffd\\x00', which is ", ""))
        assert wrong is None or "Write one into it; whole ones there: 3, 6. --pier-load-newest-whole" in said
    for number in (3, 6):
        (tmp_path / f"iter_{number:07d}/.metadata").unlink()
    with pytest.raises(PierConfigError, match="none of the 4 checkpoints there is whole, as --pier-load-newest-whole needs"):
        newest_whole(tmp_path)


# Each raises something else.
_OTHER_CONTENTS = [
    pickle.dumps({"weight": 1}),
    b"cno_such_module\nMetadata\n.",
    b"ctorch.distributed.checkpoint.metadata\nNoSuchMetadata\n.",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n(I1\nI2\nI3\nI4\nI5\nI6\nI7\nI8\nI9\ntR.",
    b"\x80\x04.",
    b"\x80\x04\x8c\x02\xff\xff.",
]


def test_metadata_with_other_contents_or_an_end_that_was_never_written(folder: Path) -> None:
    path = folder / ".metadata"
    content = path.read_bytes()
    ends = [
        content[:place] + filler * (len(content) - place)
        for filler in (b"", b"\x00", b"\xff")
        for place in range(0, len(content) - 1, 5)
    ]
    for text in (*_OTHER_CONTENTS, *ends):
        path.write_bytes(text)
        assert str(damage(folder)).startswith(".metadata cannot be read")


@pytest.mark.slow
def test_flipped_bits_never_stop_the_look(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The one in C spends a minute on some of them, filling memory with an empty table before it fails.
    monkeypatch.setattr(pickle, "load", pickle._load)  # type: ignore[attr-defined]
    path = folder / ".metadata"
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        # It need not be seen: the bit may be of a number that is checked elsewhere.
        assert isinstance(damage(folder), str | None)


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
