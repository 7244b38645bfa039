"""The demo around its training: what it starts and what it says afterwards."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from pier_megatron.commands import cli
from pier_megatron.commands.demo import corpus, run


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the demo with a training that leaves the log of one with the given arguments, and outer steps at H = 10."""

    def run_demo(flags: str, **arguments: object) -> str:
        from torch.utils.tensorboard import SummaryWriter

        def show(command: Sequence[str], log: Path) -> int:
            writer = SummaryWriter(str(tmp_path / "tensorboard"))
            for name, value in {"world_size": 4, "train_iters": 20, **arguments}.items():
                writer.add_text(name, str(value), global_step=0)
            writer.add_scalar("lm loss", 5.0, 20)
            writer.add_scalar("lm loss validation", 5.0, 20)
            if "pier_groups" in arguments:
                for iteration in (10, 20):
                    writer.add_scalar("pier/bytes-sent", 1e6, iteration)
            writer.close()
            return 0

        monkeypatch.setattr(run, "_show", show)
        monkeypatch.setattr(corpus, "write", lambda folder: (folder / "train", folder / "validation"))
        assert cli.main(["demo", "--iterations", "20", "--output", str(tmp_path), *flags.split()]) == 0
        return capsys.readouterr().out

    return run_demo


def test_synchronous_run_needs_no_room_for_a_lazy_start(demo) -> None:
    said = demo("--synchronous", pier=False)
    assert "Validation loss after 20 iterations" in said
    assert "Crossed" not in said


def test_report_is_on_the_run_and_not_on_the_flags_of_the_demo(demo) -> None:
    arguments = {"pier_groups": 4, "pier_sync_interval": 10, "pier_preset": "diloco", "pier_lazy_start_iters": 0}
    said = demo("-- --pier-sync-interval 10", pier=True, pier_lazy_start_fraction=None, **arguments)
    # 4 ranks, 1 MB in each of two outer steps, and in each of twenty iterations of a synchronous run.
    assert "8 MB (0 synchronous iterations, 2 outer steps); synchronous training: 80 MB, 10.0 x as much" in said


def test_report_on_a_low_bit_exchange_compares_no_bytes(demo) -> None:
    arguments = {"pier_groups": 2, "pier_sync_interval": 10, "pier_lazy_start_iters": 0, "pier_exchange_dtype": "int8"}
    said = demo("", pier=True, **arguments)
    assert "Crossed the groups in 2 outer steps, all ranks together: 8 MB" in said
