"""Plots from TensorBoard logs."""

from pathlib import Path

import pytest

from pier_megatron.commands.plot import draw
from pier_megatron.commands.tensorboard_log import TensorBoardLog, means


def written(folder: Path, offset: float, outer: bool) -> TensorBoardLog:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    writer.add_text("seq_length", "128", global_step=0)
    for step in range(1, 21):
        writer.add_scalar("batch-size", 16, step)
        writer.add_scalar("lm loss", offset - step / 10, step)
        if step % 10 == 0:
            writer.add_scalar("lm loss validation", offset, step)
            writer.add_scalar("lm loss validation", offset + 2, step)
        if outer and step % 5 == 0:
            writer.add_scalar("pier/eta", 0.7, step)
    writer.close()
    return TensorBoardLog(folder)


def test_repeated_values_are_averaged() -> None:
    assert means([10, 20, 20, 10], [1.0, 2.0, 4.0, 3.0]) == [(10, 2.0), (20, 3.0)]


def test_runs_are_overlaid(tmp_path: Path) -> None:
    logs = {"one": written(tmp_path / "one" / "tensorboard", 5, True), "other": written(tmp_path / "other", 6, False)}
    assert logs["one"].arguments["seq_length"] == "128"
    assert logs["one"].mean("lm loss validation") == [(10, 6.0), (20, 6.0)]
    paths = draw(logs, tmp_path)
    assert [path.name for path in paths] == ["loss_over_tokens.png", "loss_over_time.png", "outer_loop.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no TensorBoard event files"):
        TensorBoardLog(tmp_path)
